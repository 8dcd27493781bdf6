"""What kernels are given of the tokens that travel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.layers.expert_dispatch import ExpertDispatch


@pytest.mark.parametrize(("owners", "of_padding"), [(1, 0), (2, 2)])
def test_padding_is_for_no_expert_or_counts_nothing(owners: int, of_padding: int) -> None:
    """Kernels of a rank with every expert look none of them up that is not there."""
    replicas: Any = SimpleNamespace(
        all_gather_rows=lambda rows: torch.cat((rows, rows)),
        reduce_scatter_rows=lambda rows: rows[: rows.shape[0] // 2] * 2,
    )
    ranks: Any = SimpleNamespace(
        owners=SimpleNamespace(size=owners, rank=0),
        tensor=SimpleNamespace(size=2 // owners),
        everyone=SimpleNamespace(size=2),
        replicas=replicas,
    )
    tensor: Any = SimpleNamespace(size=1, rank=0)
    dispatch = ExpertDispatch(ranks, tensor, num_experts=4)

    def compute(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        assert experts.tolist() == [[0, 1], *[[of_padding] * 2] * 2] * 2
        assert weights.tolist() == [[0.25, 0.75], *[[0.0] * 2] * 2] * 2
        return x

    x = torch.tensor([[1.0, 2.0]])
    step: Any = SimpleNamespace(all_to_all=False, most_tokens=3)
    result = dispatch.run(x, torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]]), compute, step)
    assert result.tolist() == [[2.0, 4.0]]
