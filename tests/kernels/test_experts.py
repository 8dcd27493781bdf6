from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.experts.reference import mix
from tests.kernels.experts_by_hand import by_hand, mixture, shared_out


@pytest.mark.parametrize(
    ("activation", "gated"),
    [(name, gated) for name in ("silu", "relu2") for gated in (True, False)]
    + [("silu_to_0.25", True), ("silu_capped_0.5_0.25", True)],
)
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
