"""Norms and activations with rounded results on a GPU, at the sizes of real models."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.rounding_cases import CALLS, READERS, calls, check_rounded

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.activation import triton as activation  # noqa: E402
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("tokens", "size"), [(1, 2688), (7, 4096), (300, 21504)])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", CALLS)
def test_rounded_as_if_afterwards(
    name: str, reader: str, tokens: int, size: int, plain: bool
) -> None:
    call = calls(norm, activation, tokens, size, torch.bfloat16, "cuda")[name]
    check_rounded(call, READERS[reader], plain=plain, device="cuda")
