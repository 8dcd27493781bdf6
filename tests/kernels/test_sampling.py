from __future__ import annotations

import pytest
import torch

from megatron_hybrid.kernels.sampling import reference
from tests.kernels.sampling_cases import Draws, check_draws


@pytest.mark.parametrize("vocabulary", [1, 7, 1000])
def test_draws_are_those_of_brute_force(vocabulary: int) -> None:
    check_draws(reference, Draws.random(200, vocabulary))


def test_a_filter_that_no_row_uses_changes_nothing() -> None:
    draws = Draws.random(300, 500)
    tokens = reference.draw(*draws.all())
    plain = (draws.top_k <= 0) & (draws.top_p >= 1) & (draws.min_p <= 0)
    for which in (plain, draws.top_k <= 0, draws.top_p >= 1, draws.min_p <= 0):
        some = draws.rows(which)
        assert len(some.logits) and not all(some.used()[1][4:])
        assert torch.equal(reference.draw(*some.used()), tokens[which])


def test_a_row_does_not_depend_on_the_others() -> None:
    draws = Draws.random(50, 300)
    tokens = reference.draw(*draws.all())
    for row in range(50):
        alone = draws.rows(slice(row, row + 1))
        assert reference.draw(*alone.used()) == tokens[row]


def test_equal_logits_keep_the_order_of_their_ids() -> None:
    draws = Draws.random(40, 10)
    draws.logits.zero_()
    draws.temperature.fill_(1.0)
    draws.top_k.fill_(4)
    draws.top_p.fill_(1.0)
    draws.min_p.fill_(0.0)
    expected = (draws.point * 4).long()
    assert torch.equal(reference.draw(*draws.all()), expected)


def test_a_masked_token_is_never_drawn() -> None:
    draws = Draws.random(200, 50)
    draws.logits[:, ::2] = -torch.inf
    assert (reference.draw(*draws.all()) % 2 == 1).all()


@pytest.mark.parametrize("point", [0.0, 0.25, 0.5, 1 - 2.0**-53])
def test_a_weight_of_zero_is_never_chosen(point: float) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0]])
    tokens = reference.invert(weights, torch.full((2,), point, dtype=torch.float64))
    assert tokens.tolist() == [1 if point < 0.25 else 3, 0]
