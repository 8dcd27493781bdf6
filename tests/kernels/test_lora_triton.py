"""Adapters' products by Triton's kernels in its interpreter, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tests.interpreter  # noqa: F401
from tests.kernels.lora_cases import (
    check_add,
    check_alone,
    check_experts,
    check_wide,
    check_wide_alone,
    make_weights,
)

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.experts import triton as experts  # noqa: E402
from megatron_hybrid.kernels.linear import reference as linear  # noqa: E402
from megatron_hybrid.kernels.linear import whole_tiles as linear_by_tiles  # noqa: E402
from megatron_hybrid.kernels.lora import triton as lora  # noqa: E402
from megatron_hybrid.kernels.lora import triton_in_order as in_order  # noqa: E402
from tests.kernels.dots_in_order import dots_in_order as dots_in_order  # noqa: E402
from tests.thorough import A_THIRD

pytestmark = pytest.mark.usefixtures("poisoned")


@A_THIRD
@pytest.mark.parametrize(
    ("columns", "counts", "rank"),
    [(48, [40], 8), (600, [24, 70], 16), (1040, [100, 24, 30, 5], 3)],
)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_float32(columns: int, counts: list[int], rank: int, tokens: int) -> None:
    check_add(lora.add, tokens, make_weights(columns, counts, rank=rank), 1e-4)


@pytest.mark.parametrize(("tokens", "rank"), [(3, 16), (20, 16), (70, 5), (130, 16)])
@pytest.mark.usefixtures("dots_in_order")  # the interpreter's are not of bfloat16
def test_bfloat16(tokens: int, rank: int) -> None:
    weights = make_weights(600, [70, 40, 24], rank=rank, dtype=torch.bfloat16)
    check_add(lora.add, tokens, weights, 0.06)  # the interpreter rounds towards zero


@A_THIRD
@pytest.mark.parametrize(
    ("counts", "slots", "rank"), [([40], 3, 8), ([70, 70], 20, 16), ([100, 24, 30, 6], 5, 3)]
)
@pytest.mark.parametrize("tokens", [1, 40, 70])
def test_wide_float32(counts: list[int], slots: int, rank: int, tokens: int) -> None:
    weights = make_weights(48, counts, slots=slots, rank=rank)
    for multiply in (lora.multiply, in_order.multiply):
        for activation, gated in (("none", False), ("relu2", False), ("silu", True)):
            check_wide(multiply, linear, tokens, weights, 1e-4, activation, gated)


@pytest.mark.parametrize(("tokens", "rank"), [(3, 16), (20, 16), (70, 5), (130, 16)])
@pytest.mark.usefixtures("dots_in_order")
def test_wide_bfloat16(tokens: int, rank: int) -> None:
    weights = make_weights(48, [70, 40, 24], slots=9, rank=rank, dtype=torch.bfloat16)
    for activation, gated in (("none", False), ("silu", True)):
        check_wide(in_order.multiply, linear, tokens, weights, 0.06, activation, gated)


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_wide_layers_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    weights = make_weights(48, [24, 70], slots=9, rank=16, dtype=dtype)
    check_wide_alone(in_order.multiply, linear_by_tiles, weights)


def test_steps_without_adapters_change_nothing() -> None:
    check_add(lora.add, 20, make_weights(48, [40]), 1e-4, torch.zeros(20, dtype=torch.int32))


def test_a_share_depends_on_the_columns_alone() -> None:
    for columns in (16, 512, 4096, 21504, 100_000):
        share = lora.share_of(columns)
        assert share % 128 == 0 and -(-columns // share) <= 16


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Nor on the tile."""
    check_alone(lora.add, make_weights(600, [24, 70], rank=16, dtype=dtype))


@pytest.mark.parametrize(("tokens", "gated", "elsewhere"), [(3, True, 0), (40, False, 3)])
def test_experts(tokens: int, gated: bool, elsewhere: int) -> None:
    check_experts(experts.mix_adapted, tokens=tokens, gated=gated, elsewhere=elsewhere)
