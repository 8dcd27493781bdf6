"""The same in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.kernels.convolved_heads_cases import SIZES, Case

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.convolved_heads import triton  # noqa: E402


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size(size: tuple[int, int, int, int, int]) -> None:
    """In float32: the interpreter has no products of bfloat16."""
    Case(size, torch.float32).check(triton)
