"""Triton norms and activations with rounded results in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.kernels.rounding_cases import CALLS, READERS, calls, check_rounded

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.activation import triton as activation  # noqa: E402
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402
from tests.thorough import A_THIRD


@A_THIRD
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [96, 512])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", CALLS)
def test_rounded_as_if_afterwards(name: str, reader: str, size: int, plain: bool) -> None:
    call = calls(norm, activation, 3, size, torch.float32)[name]
    # The interpreter does not carry from a mantissa of float8 that is rounded up to its exponent.
    differing = 0.1 if READERS[reader].numbers == "float8_e4m3fn" else 0.0
    check_rounded(call, READERS[reader], plain=plain, differing=differing)
