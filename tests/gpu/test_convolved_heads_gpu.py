"""Heads of convolved attention on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.convolved_heads_cases import SIZES, Case, check_each_alone

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.convolved_heads import triton  # noqa: E402

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [*SIZES, (3000, 8, 2, 128, 2)], ids=str)
def test_every_size(size: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    Case(size, dtype, "cuda").check(triton)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(150, 8, 2, 128, 2), (70, 6, 3, 24, 2)], ids=str)
def test_a_tokens_bits_are_its_own(
    size: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_each_alone(triton, Case(size, dtype, "cuda"))
