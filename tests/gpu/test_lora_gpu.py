"""Adapters on a GPU: their kernels beside plain sums, engines with CUDA graphs beside a CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.lora_cases import (
    check_add,
    check_alone,
    check_experts,
    check_wide,
    check_wide_alone,
    make_slots,
    make_weights,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from bench.adapters import random_adapter  # noqa: E402
from megatron_hybrid import LLM, SamplingParams  # noqa: E402
from megatron_hybrid.kernels.experts import triton as experts  # noqa: E402
from megatron_hybrid.kernels.linear import triton as linear  # noqa: E402
from megatron_hybrid.kernels.linear import triton_in_order as linear_in_order  # noqa: E402
from megatron_hybrid.kernels.lora import triton as lora  # noqa: E402
from megatron_hybrid.kernels.lora import triton_in_order as in_order  # noqa: E402
from tests.models.conftest import random_tokens  # noqa: E402
from tests.tiny_models import FAMILIES, make_tiny_model  # noqa: E402

BF16 = torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 7, 32, 100, 600])
@pytest.mark.parametrize(
    ("columns", "counts"), [(4096, [4096, 1024, 1024]), (21504, [4096]), (1000, [30, 70])]
)
def test_bfloat16(columns: int, counts: list[int], tokens: int) -> None:
    weights = make_weights(columns, counts, slots=8, rank=16, dtype=BF16, device="cuda")
    check_add(lora.add, tokens, weights, 0.05)


@pytest.mark.parametrize("tokens", [1, 40])
def test_float32(tokens: int) -> None:
    check_add(lora.add, tokens, make_weights(1000, [30, 70], rank=12, device="cuda"), 1e-4)


@pytest.mark.parametrize("tokens", [1, 7, 32, 100, 600])
@pytest.mark.parametrize(
    ("counts", "slots", "rank"),
    [([4096, 1024, 1024], 8, 16), ([21504], 8, 16), ([1200, 1200], 20, 8), ([30, 70], 3, 64)],
)
def test_wide(counts: list[int], slots: int, rank: int, tokens: int) -> None:
    for dtype, tolerance in ((BF16, 0.05), (torch.float32, 1e-4)):
        weights = make_weights(256, counts, slots=slots, rank=rank, dtype=dtype, device="cuda")
        for kernels, products in ((lora, linear), (in_order, linear_in_order)):
            for activation, gated in (("none", False), ("relu2", False), ("silu", True)):
                check_wide(
                    kernels.multiply, products, tokens, weights, tolerance, activation, gated
                )  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_bits_of_wide_layers_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    for slots, rank in ((8, 16), (20, 16), (3, 64), (9, 8)):
        weights = make_weights(512, [512, 256], slots=slots, rank=rank, dtype=dtype, device="cuda")
        check_wide_alone(in_order.multiply, linear_in_order, weights)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    check_alone(lora.add, make_weights(4096, [512, 256], rank=16, dtype=dtype, device="cuda"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 0.03), (torch.float32, 1e-4)])
@pytest.mark.parametrize("tokens", [1, 32, 3000])
def test_experts(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    for gated, elsewhere in ((True, 0), (False, 3)):
        check_experts(
            experts.mix_adapted, tokens=tokens, gated=gated, elsewhere=elsewhere, dtype=dtype,
            device="cuda", tolerance=tolerance,
        )  # fmt: skip


def test_in_a_graph_slots_are_read_anew() -> None:
    weights = make_weights(512, [256], slots=4, rank=16, dtype=BF16, device="cuda")
    x = torch.randn(8, 512, device="cuda").to(BF16)
    y, slots = torch.zeros(8, 256, device="cuda", dtype=BF16), make_slots(8, 4, "cuda")
    lora.add(y, x, weights, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.zero_()
        lora.add(y, x, weights, slots)
    for _ in range(3):
        slots.copy_(torch.randint(0, 5, (8,)))
        graph.replay()
        wanted = torch.zeros_like(y)
        lora.add(wanted, x, weights, slots)
        assert torch.equal(y, wanted)


WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"inference_dynamic_batching_num_cuda_graphs": 0},
    "chunked": {"inference_dynamic_batching_max_tokens": 48},
    "batch-invariant": {"batch_invariant": True},
    "sleep": {"enable_sleep_mode": True},
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_answer_as_on_a_cpu(family: str, tmp_path: Path) -> None:
    """With adapters at random, some of experts; cold and from the cache."""
    make_tiny_model(family, tmp_path)
    prompts = [random_tokens(n, seed=n) for n in (1, 20, 37, 70, 90, 21)]
    names = ["", "0", "1", "2", "1", ""]

    def answers(with_experts: bool, **options: Any) -> list[list[int]]:
        llm = LLM(
            str(tmp_path), enable_lora=True, max_loras=3, max_lora_rank=8, dtype="float32",
            lora_experts=with_experts, inference_dynamic_batching_block_size=16,
            inference_dynamic_batching_max_requests=8,
            inference_dynamic_batching_buffer_size_gb=0.05,
            inference_dynamic_batching_prefix_caching_mamba_gb=0.05, **options,
        )  # fmt: skip
        model = llm.engine.runner._model  # type: ignore[attr-defined]
        for i in range(3):
            adapter = random_adapter(model, 4 + i, i, experts=with_experts, strength=0.4)
            llm.load_adapter(str(i), *adapter)
        cold = llm.generate(prompts, PARAMS, adapter=names, progress=False)
        if options.get("enable_sleep_mode"):
            llm.sleep()
            llm.load_adapter("1", *random_adapter(model, 5, 1, experts=with_experts, strength=0.4))
            llm.wake_up()
        warm = llm.generate(prompts, PARAMS, adapter=names, progress=False)
        assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
        return [output.token_ids for output in cold]

    for with_experts in (False, True):
        wanted = answers(with_experts, device="cpu")
        for way, options in WAYS.items():
            if not (with_experts and "batch_invariant" in options):
                assert answers(with_experts, device="cuda", **options) == wanted, way
