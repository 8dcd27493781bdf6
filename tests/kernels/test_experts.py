from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.experts.reference import mix, route
from tests.kernels.experts_by_hand import by_hand, mixture, route_by_hand, shared_out


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_mix_is_the_weighted_sum_over_the_chosen_experts(activation: str, gated: bool) -> None:
    m = mixture(50, activation=activation, gated=gated)
    torch.testing.assert_close(mix(*m.arguments()).double(), by_hand(m), atol=1e-5, rtol=1e-5)


def test_ranks_with_some_of_the_experts_add_up_to_all() -> None:
    m = mixture(50, chosen=3)
    total = sum(mix(*part.arguments(6)) for part in shared_out(m, 4))
    torch.testing.assert_close(total.double(), by_hand(m), atol=1e-5, rtol=1e-5)


def test_mix_of_no_tokens() -> None:
    assert mix(*mixture(0).arguments()).shape == (0, 40)


def test_experts_without_tokens_and_a_token_that_chose_one_twice() -> None:
    m = mixture(20)
    m.experts.fill_(3)
    torch.testing.assert_close(mix(*m.arguments()).double(), by_hand(m), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_experts", [6, 64])
def test_route(num_experts: int, normalize: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(11)])
    logits = (logits / 4 - 3).to(dtype)  # no two are equal
    experts, weights = route(logits, 6, normalize)
    expected, expected_weights = route_by_hand(logits, 6, normalize)
    assert experts.tolist() == expected
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)


def test_route_takes_the_largest_logits_and_their_softmax() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, -1.0, 5.0, -2.0]])
    experts, weights = route(logits, 2)
    assert experts.tolist() == [[1, 3], [2, 0]]
    expected = torch.tensor([[4.0, 3.0], [5.0, 0.0]]).softmax(dim=-1)
    torch.testing.assert_close(weights, expected)
