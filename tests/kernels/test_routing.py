from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.experts.reference import choose, route
from tests.kernels.routing_by_hand import KINDS, chosen_by_hand, router


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_experts", [8, 64])
def test_route(num_experts: int, kind: str) -> None:
    to = router(num_experts, 4, width=24, **KINDS[kind])
    x = torch.randn(11, 24, generator=torch.Generator().manual_seed(0))
    experts, weights = route(x, to)
    expected, expected_weights = chosen_by_hand(x @ to.weight.t(), to)
    assert experts.tolist() == expected
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)


def test_choose_takes_the_largest_logits_and_their_softmax() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, -1.0, 5.0, -2.0]])
    experts, weights = choose(logits, router(4, 2))
    assert experts.tolist() == [[1, 3], [2, 0]]
    expected = torch.tensor([[4.0, 3.0], [5.0, 0.0]]).softmax(dim=-1)
    torch.testing.assert_close(weights, expected)
