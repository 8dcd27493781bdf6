"""Packing states in plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.packed_states import reference as packing
from tests.kernels.packing_cases import (
    KINDS,
    check_casts,
    check_extremes,
    check_nothing_to_move,
    check_round_trip,
)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_comes_back_rounded_once_to_half_a_step(
    kind: str, state_dtype: torch.dtype
) -> None:
    check_round_trip(packing, kind, state_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["mamba2", "mamba1", "convolution"])
def test_other_types_are_rounded_as_torch_does(kind: str, dtype: torch.dtype) -> None:
    check_casts(packing, kind, dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf - inf
def test_zeros_halves_and_what_is_not_finite() -> None:
    check_extremes(packing)


def test_nothing_to_move() -> None:
    check_nothing_to_move(packing)
