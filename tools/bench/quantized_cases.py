"""Products with quantised weights, for tools/benchmark_kernels.py: dense ones of the model's widest
projection, and experts; beside them the same in the model's own type, and on a GPU libraries'."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import humming_products
from bench.cases import Bench, Calls, Case
from bench.recurrent_kinds import library
from bench.timing import Call
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, QuantizedRows
from megatron_hybrid.models.config import HybridModelConfig

FORMATS = {
    "FP8": WeightFormat("float8_e4m3fn", activations="token"),
    "FP8 blocks": WeightFormat("float8_e4m3fn", 128, 128, activations="group"),
    "INT8": WeightFormat("int8", activations="token"),
    "NVFP4": WeightFormat("float4_e2m1", 1, 16),
    "4 bits": WeightFormat("uint4", 1, 128),
}


def weight_bytes(format: WeightFormat, rows: int, columns: int) -> float:
    """Of a weight."""
    grid = format.grid(rows, columns)
    scale = 1 if format.numbers == "float4_e2m1" else 4
    return rows * columns * format.bits / 8 + grid[0] * grid[1] * scale


def _time_of(format: WeightFormat) -> float:
    """Products in 8 bits take half the time of those in 16."""
    return 0.5 if format.activations != "none" else 1.0


def widest(model: HybridModelConfig) -> int:
    """Rows of the widest projection of the hidden size."""
    rows = [2 * model.hidden_size]
    if model.mlp is not None:
        rows.append(model.mlp.intermediate_size * (2 if model.mlp.gated else 1))
    if model.mamba is not None:
        rows.append(
            2 * model.mamba.inner_size + 2 * model.mamba.num_groups * model.mamba.state_size
        )
    return max(rows) // 16 * 16


def quantized_linear_cases(bench: Bench) -> Iterator[Case]:
    rows, columns = widest(bench.model), bench.model.hidden_size
    for name, format in FORMATS.items():
        for tokens in [*bench.batches(), bench.rows()[-1]]:

            def make(format: WeightFormat = format, tokens: int = tokens) -> Calls:
                weight = bench.normal(rows, columns).mul_(columns**-0.5)
                packed = format.quantize(weight)
                x = bench.normal(tokens, columns)
                inputs: Inputs = x
                if format.activations != "none":  # norms and activations leave them rounded
                    inputs = bench.kernels.linear.quantize_rows(x, format, None)
                calls: Calls = {
                    "ours": lambda: bench.kernels.linear.multiply(inputs, packed),
                    "not quantised": lambda: F.linear(x, weight),
                }
                return calls if bench.tiny else calls | _linear_libraries(x, inputs, packed)

            moved = weight_bytes(format, rows, columns) + tokens * (rows + columns) * bench.item
            flops = 2 * tokens * rows * columns * _time_of(format)
            yield Case(f"linear {name}", f"{tokens} x {columns} to {rows}", moved, make, flops)


def _linear_libraries(x: Tensor, inputs: Inputs, weight: QuantizedWeight) -> Calls:
    """`inputs`: x as the format takes it."""
    format = weight.format
    if isinstance(inputs, QuantizedRows):
        if format.numbers == "int8":
            return _int_mm(inputs, weight)
        return _scaled_mm(inputs, weight) if format.columns is None else _by_block(inputs, weight)
    if format.numbers == "float4_e2m1" and library("humming"):
        return {"humming": humming_products.products((weight, x))}
    return {}


def _int_mm(x: QuantizedRows, weight: QuantizedWeight) -> Calls:
    values, transposed = x.values, weight.values.t()
    if len(values) <= 16:  # it takes no fewer
        return {}
    return {"torch._int_mm (no scales)": lambda: torch._int_mm(values, transposed)}


def _scaled_mm(x: QuantizedRows, weight: QuantizedWeight) -> Calls:
    values, transposed = x.values, weight.values.t()
    scales = x.scale.contiguous(), weight.scale.t()
    return {
        "torch._scaled_mm": lambda: torch._scaled_mm(
            values, transposed, *scales, out_dtype=x.dtype, use_fast_accum=True
        )
    }


def _by_block(x: QuantizedRows, weight: QuantizedWeight) -> Calls:
    """cuBLASLt takes rows to a multiple of 4, their scales side by side, and weights' scales four
    by four."""
    below = (0, 0, 0, -len(x.values) % 4)
    values = F.pad(x.values.view(torch.uint8), below).view(x.values.dtype)
    scale = F.pad(x.scale, below).t().contiguous().t()
    theirs = F.pad(weight.scale, (0, -weight.scale.shape[1] % 4)).t()
    return {
        "torch scaled_mm": lambda: F.scaled_mm(
            values, weight.values.t(), scale, F.ScalingType.BlockWise1x128, theirs,
            F.ScalingType.BlockWise128x128, output_dtype=x.dtype,
        )
    }  # fmt: skip


def quantized_expert_cases(bench: Bench) -> Iterator[Case]:
    config = bench.model.moe
    if config is None:
        return
    inner = config.expert.intermediate_size
    rows = 2 * inner if config.expert.gated else inner
    width, number = config.latent_size or bench.model.hidden_size, config.num_experts
    for name in ("FP8", "FP8 blocks", "NVFP4"):
        kept = FORMATS[name]  # blocks lie within one expert
        format = replace(kept, rows=math.gcd(kept.rows, rows, width))
        for tokens in [*bench.batches(), bench.rows()[-1]]:
            drawn = torch.rand(tokens, number, device=bench.device)
            chosen = drawn.topk(config.experts_per_token).indices.int()

            def make(format: WeightFormat = format, chosen: Tensor = chosen) -> Calls:
                x, shares = bench.normal(len(chosen), width), torch.rand(chosen.shape)
                shares = shares.to(bench.device)
                up = bench.normal(number, rows, width).mul_(width**-0.5)
                down = bench.normal(number, width, inner).mul_(inner**-0.5)
                expert = config.expert.activation, config.expert.gated
                plain = ExpertWeights(up, down, *expert)
                packed = ExpertWeights(
                    format.quantize(up.flatten(0, 1)).stacked(number),
                    format.quantize(down.flatten(0, 1)).stacked(number),
                    *expert,
                )
                mix = bench.kernels.experts.mix
                calls: Calls = {
                    "ours": lambda: mix(x, chosen, shares, packed),
                    "not quantised": lambda: mix(x, chosen, shares, plain),
                }
                return calls if bench.tiny else calls | _expert_libraries(bench, x, chosen, packed)

            used = len(chosen.unique())  # experts whose weights are read
            moved = used * (weight_bytes(format, rows, width) + weight_bytes(format, width, inner))
            moved += 2 * tokens * width * bench.item
            pairs = tokens * config.experts_per_token
            flops = 2 * pairs * width * (rows + inner) * _time_of(format)
            yield Case(f"experts {name}", f"{tokens} tokens", moved, make, flops)


def _expert_libraries(bench: Bench, x: Tensor, chosen: Tensor, layer: ExpertWeights) -> Calls:
    """Both products, but no activation and no sum of a token's experts."""
    up, down = layer.up, layer.down
    assert isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    hidden = bench.normal(chosen.numel(), down.shape[-1])
    if up.format == FORMATS["FP8"]:
        return {"torch grouped (products alone)": _grouped(bench, x, hidden, chosen, up, down)}
    if up.format == FORMATS["NVFP4"] and library("humming"):
        both = humming_products.products((up, x), (down, hidden), chosen=chosen)
        return {"humming (products alone)": both}
    return {}


def _grouped(
    bench: Bench, x: Tensor, hidden: Tensor, chosen: Tensor, up: QuantizedWeight,
    down: QuantizedWeight,
) -> Call:  # fmt: skip
    """Of pairs that are sorted by expert and rounded before."""
    pairs = chosen.flatten()
    ends = torch.bincount(pairs, minlength=up.shape[0]).cumsum(0).int()
    gathered = x[pairs.argsort(stable=True) // chosen.shape[1]]
    factors = []
    for plain, weight in ((gathered, up), (hidden, down)):
        rows = bench.kernels.linear.quantize_rows(plain, weight.format, None)
        scales = rows.scale.flatten().contiguous(), weight.scale.flatten(1)
        factors.append((rows.values, weight.values.transpose(-1, -2), *scales))

    return lambda: [
        torch._scaled_grouped_mm(*each, offs=ends, out_dtype=x.dtype, use_fast_accum=True)
        for each in factors
    ]
