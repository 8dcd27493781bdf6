"""The mLSTM in plain torch: the contract of recurrences, against the sums themselves; gates whose
exponentials are no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import MLSTMConstants, MLSTMTokens
from megatron_hybrid.kernels.mlstm import reference as mlstm
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, close, draw_columns
from tests.kernels.segments import Segment

HEADS, KEYS, VALUES = 2, 4, 3
SHAPE = (HEADS, VALUES + 2, KEYS)


def draw(length: int, seed: int = 0) -> Data:
    widths = [HEADS * KEYS, HEADS * KEYS, HEADS * VALUES, HEADS, HEADS]
    q, k, v, i, f = draw_columns(length, widths, seed)
    q, k, v = (x.unflatten(1, (HEADS, -1)) for x in (q, k, v))
    return Data(MLSTMTokens(q, k, v, 2 * i, 2 * f), MLSTMConstants(eps=1e-6))


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    """By the sums themselves, with nothing divided by exp(m) but what is kept."""
    scale = torch.exp(state[:, -1, 0])
    sums = state[:, :-1] * scale[:, None, None]
    values = torch.cat((token.v, torch.ones_like(token.v[:, :1])), dim=1)
    sums = sums * torch.sigmoid(token.f)[:, None, None]
    sums = sums + torch.exp(token.i)[:, None, None] * values[:, :, None] * token.k[:, None]
    both = (sums @ (token.q * KEYS**-0.5)[:, :, None])[..., 0]
    m = torch.maximum(state[:, -1, 0] + torch.sigmoid(token.f).log(), token.i)
    eps = token.eps * torch.exp(m)[:, None]
    y = both[:, :-1] / (both[:, -1:].abs().clamp(min=1) + eps)
    last = torch.zeros(HEADS, 1, KEYS, dtype=state.dtype)
    last[:, 0] = state[:, -1]  # what nobody reads stays
    last[:, 0, 0] = m
    return y, torch.cat((sums / torch.exp(m)[:, None, None], last), dim=1)


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence(mlstm, SHAPE, draw, step)


def test_gates_whose_exponentials_are_no_numbers(recurrence: Recurrence) -> None:
    """Where the denominator is not bounded, a constant in the input gates cancels out."""
    data, states = draw(40), [recurrence.poisoned(3), recurrence.poisoned(3)]
    outputs = []
    for state, size in zip(states, (30.0, 200.0), strict=True):
        tokens = data.tokens._replace(i=data.tokens.i + size)
        shifted = Data(tokens, data.constants)
        outputs.append(recurrence.prefill(shifted, [Segment(0, 40, 0, 1)], state))
        again = recurrence.decode(shifted.rows(39, 40), [1], [2], state)
        assert again.isfinite().all()
    close(outputs[1], outputs[0], 1e-4)
    close(states[1][1, :, -1, 0], states[0][1, :, -1, 0] + 170, 1e-4)
