"""Grouping pairs of a token and an expert at the sizes of real prompts, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from tests.kernels.groups_by_hand import check_groups  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_experts", [1, 64, 256, 512])
@pytest.mark.parametrize("number", [6, 4096, 4097, 49152, 65536, 200000])
def test_groups(number: int, num_experts: int, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)  # memory is allocated full of the largest integers
    try:
        experts = torch.randint(0, num_experts, (number // 2, 2), device="cuda", dtype=dtype)
        check_groups(experts, num_experts, 32)
        check_groups(experts, max(num_experts // 4, 1), 32)
    finally:
        torch.use_deterministic_algorithms(False)
