"""Products of the library humming-kernels with weights of float4_e2m1, for quantized_cases.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from bench.recurrent_kinds import library
from bench.timing import Call
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, unpack_codes

LOCKS = 8192  # that programs wait for one another with: more than any of its kernels asks for


def products(*factors: tuple[QuantizedWeight, Tensor], chosen: Tensor | None = None) -> Call:
    """Weights [N, K] times inputs [tokens, K], one product after the other. With `chosen` [tokens,
    experts of a token], weights [experts, N, K] times inputs [tokens, K] or [tokens * experts of a
    token, K]. The call gives what came of each; it is prepared when first made, so that what fails
    costs no other figure."""

    @cache
    def prepared() -> list[Call]:
        return [_product(weight, x, chosen) for weight, x in factors]

    return lambda: [product() for product in prepared()]


def _product(weight: QuantizedWeight, x: Tensor, chosen: Tensor | None) -> Call:
    _choose_compiler()
    rows, columns = weight.shape[-2:]
    count, gemm, experts = len(x), "dense", 0
    if chosen is not None:
        count, gemm, experts = chosen.numel(), "indexed", weight.shape[0]
    schema = library("humming.schema").HummingWeightSchema(
        b_dtype="float4e2m1", bs_dtype="float8e4m3", weight_scale_group_size=16,
        weight_scale_type="group", weight_scale_2_type="tensor",
    )  # fmt: skip
    transform = library("humming.transform")
    layer = transform.prepare_layer_config(
        shape_n=rows, shape_k=columns, weight_schema=schema, num_experts=experts,
        torch_dtype=x.dtype, device=x.device,
    )  # fmt: skip
    tile = library("humming.tune").get_heuristics_config(
        layer, shape_m=count, gemm_type=gemm, device=x.device
    )
    kernel = library("humming.kernel.humming").HummingKernel.prepare_kernels(
        layer.to_str(), {"gemm_type": gemm}, tile, x.device
    )
    tensors = transform.transform_humming_tensors(layer, weight_tensors(weight))
    arguments = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if chosen is not None:
        arguments |= blocks(chosen, experts, tile["block_shape"][0])
    launch: Callable[..., Tensor] = library("humming.ops").launch_kernel
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=x.device)
    out = x.new_empty(count, rows)
    return partial(
        launch, configs=kernel, inputs=x, outputs=out, locks=locks, top_k=count // len(x),
        **arguments,
    )  # fmt: skip


@cache
def _choose_compiler() -> None:
    """Kernels are compiled by NVRTC; by nvcc where it doesn't find that."""
    try:
        library("humming.utils.nvrtc").get_nvrtc_library_path()
    except Exception:  # of any kind: it looks through folders of CUDA
        os.environ.setdefault("HUMMING_COMPILER", "nvcc")


def weight_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """As humming takes a weight: words of eight codes with the first in the lowest bits, their
    scales, and one of the whole or of each expert."""
    assert weight.row_scale is not None
    codes = unpack_codes(weight.values, weight.format)
    words = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous().view(torch.int32)
    whole = weight.row_scale[..., 0].reshape(-1).contiguous()
    return {"weight": words, "weight_scale": weight.scale, "weight_scale_2": whole}


def blocks(chosen: Tensor, experts: int, size: int) -> dict[str, Tensor]:
    """Pairs of a token and an expert by expert, each expert's filled up to blocks of `size` with
    the number of pairs, which stands for none; the expert of every block."""
    pairs = chosen.flatten().long()
    counts = torch.bincount(pairs, minlength=experts)
    filled = (counts + size - 1) // size * size
    order = pairs.argsort(stable=True)
    # how much further than among all pairs an expert's lie
    shift = (filled.cumsum(0) - filled) - (counts.cumsum(0) - counts)
    place = torch.arange(len(pairs), device=pairs.device) + shift[pairs[order]]
    total = filled.sum().int()
    ids = torch.full((int(total),), len(pairs), dtype=torch.int32, device=pairs.device)
    ids[place] = order.int()
    owners = torch.arange(experts, dtype=torch.int32, device=pairs.device)
    return {
        "sorted_ids": ids,
        "expert_ids": owners.repeat_interleave(filled // size),
        "num_tokens_padded": total.reshape(1),
    }
