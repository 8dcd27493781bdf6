"""The real-gated linear recurrent unit in plain torch: the contract of recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import RGLRUConstants, RGLRUTokens
from megatron_hybrid.kernels.rg_lru import reference as rg_lru
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, draw_columns

CHANNELS = 5


def draw(length: int, seed: int = 0) -> Data:
    x, gate = draw_columns(length, [CHANNELS, CHANNELS], seed)
    decay = -2 * torch.rand(CHANNELS, generator=torch.Generator().manual_seed(99)) - 0.01
    return Data(RGLRUTokens(x, 2 * gate), RGLRUConstants(decay))


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    state = torch.exp(token.decay * torch.sigmoid(token.gate)) * state + token.x
    return state, state


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence(rg_lru, (CHANNELS,), draw, step)
