"""Heads of convolved attention in plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.convolved_heads import reference, whole_tiles
from tests.kernels.convolved_heads_cases import SIZES, Case, check_each_alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kernels", [reference, whole_tiles])
def test_every_size(kernels: object, size: tuple[int, int, int, int, int], dtype: torch.dtype):
    Case(size, dtype).check(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_whole_tiles_a_token_is_alone(dtype: torch.dtype) -> None:
    check_each_alone(whole_tiles, Case((37, 6, 3, 24, 2), dtype))
