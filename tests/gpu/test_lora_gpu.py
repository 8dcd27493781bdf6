"""Adapters on a GPU: their kernels beside plain sums, and engines with CUDA graphs beside PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.lora_cases import (
    check_add,
    check_alone,
    check_experts,
    make_slots,
    make_weights,
)

pytest.importorskip("triton")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.experts import triton as experts  # noqa: E402
from megatron_hybrid.kernels.lora import triton as lora  # noqa: E402
from tests.engine.test_lora import TWO, check, with_adapters  # noqa: E402
from tests.lora_adapters import EXPERTS, Adapted, make_adapted, with_experts  # noqa: E402
from tests.models.conftest import random_tokens  # noqa: E402

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


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "jamba", "zamba2", "falcon_h1"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engine_equals_peft(family: str, batch_invariant: bool, tmp_path: Path) -> None:
    adapted = make_adapted(family, tmp_path, TWO)
    check_engine(adapted, batch_invariant=batch_invariant)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_an_engine_equal_peft(family: str, tmp_path: Path) -> None:
    check_engine(make_adapted(family, tmp_path, with_experts(family, TWO)), lora_experts=True)


def check_engine(adapted: Adapted, **options: bool) -> None:
    llm = with_adapters(adapted, device="cuda", dtype="float32", **options)
    prompts = [random_tokens(37, seed=1)] * 3 + [random_tokens(21, seed=2)]
    for _ in range(2):
        check(adapted, llm, prompts, ["", "wide", "narrow", "narrow"])
