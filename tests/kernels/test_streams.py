"""Residual streams in plain torch against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.streams import reference as streams
from tests.kernels.streams_cases import SHAPES, TYPES, check_all, check_alone, check_balanced


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_sum(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_all(streams, shape, dtype)


@pytest.mark.parametrize(("count", "times"), [(2, 1), (4, 20), (5, 3)])
def test_matrices_are_balanced(count: int, times: int) -> None:
    check_balanced(streams, 7, count, times)


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_who_is_beside(dtype: torch.dtype) -> None:
    check_alone(streams, dtype)
