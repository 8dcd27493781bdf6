"""RWKV-4's weighted key values in plain torch: the contract of recurrences, against sums and their
quotient; keys of any size; states that are empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import WKVConstants, WKVTokens
from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.slots import plan_decode
from megatron_hybrid.kernels.wkv import reference as wkv
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, close, draw_columns
from tests.kernels.segments import Segment, int64

CHANNELS = 5


def draw(length: int, seed: int = 0) -> Data:
    k, v = draw_columns(length, [CHANNELS, CHANNELS], seed)
    h = torch.Generator().manual_seed(99)
    decay, bonus = -torch.rand(CHANNELS, generator=h) - 0.01, torch.randn(CHANNELS, generator=h)
    return Data(WKVTokens(2 * k, v), WKVConstants(decay, bonus))


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    """By the sums themselves: of weighted values, and of weights."""
    mean, log = state.unbind(-1)
    weights = torch.where(log == 0, 0, log.exp())
    values = mean * weights
    own = torch.exp(token.bonus + token.k)
    y = (values + own * token.v) / (weights + own)
    weights = weights * torch.exp(token.decay) + torch.exp(token.k)
    values = values * torch.exp(token.decay) + torch.exp(token.k) * token.v
    return y, torch.stack((values / weights, weights.log()), dim=-1)


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence(wkv, (CHANNELS, 2), draw, step)


@pytest.mark.parametrize("size", [-500.0, 500.0])
def test_keys_whose_exponentials_are_no_numbers(recurrence: Recurrence, size: float) -> None:
    """A constant that is added to all keys changes no output: not even the first token's."""
    data, state, other = draw(40), recurrence.poisoned(3), recurrence.poisoned(3)
    shifted = Data(data.tokens._replace(k=data.tokens.k + size), data.constants)
    expected = recurrence.prefill(data, [Segment(0, 40, 0, 1)], state)
    close(recurrence.prefill(shifted, [Segment(0, 40, 0, 1)], other), expected, 5e-4)
    close(other[1, :, 1], state[1, :, 1] + size, 5e-4)
    token, far = draw(1, seed=2), draw(1, seed=2)
    far.tokens.k.add_(size)
    close(recurrence.decode(far, [1], [1], other), recurrence.decode(token, [1], [1], state), 5e-4)


def test_a_log_of_exactly_zero_is_no_empty_state(recurrence: Recurrence) -> None:
    data, state = draw(2), recurrence.poisoned(3)
    data.tokens.k[0] = 0  # the only token so far: the log of the weights' sum
    plan = plan_decode(DecodeSlots(int64([0]), int64([1])))
    wkv.decode(*data.rows(0, 1).arguments(), state=state, plan=plan)
    assert torch.allclose(state[1, :, 0], data.tokens.v[0]) and (state[1, :, 1] != 0).all()
    y = recurrence.decode(data.rows(1, 2), [1], [1], state)
    k, v, bonus = *(values.double() for values in data.tokens), data.constants.bonus.double()
    own = torch.exp(bonus + k[1])
    close(y[0], (v[0] + own * v[1]) / (1 + own))


def test_a_state_without_tokens_stays_empty(recurrence: Recurrence) -> None:
    """As of a prompt of which nothing is computed yet."""
    state = recurrence.poisoned(3)
    recurrence.prefill(draw(0), [Segment(0, 0, 0, 1)], state, padding=0)
    assert (state[1] == 0).all()
    expected = recurrence.token_loop(draw(1))[0]
    close(recurrence.decode(draw(1), [1], [2], state), expected)
