"""Mamba1's scan in plain torch: the contract of recurrences, and blocks longer than a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.mamba1_scan import reference as mamba1_scan
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, close, draw_columns
from tests.kernels.segments import Segment

CHANNELS, SIZE = 5, 6


def draw(length: int, seed: int = 0, channels: int = CHANNELS, size: int = SIZE) -> Data:
    widths = [channels, channels, channels, size, size]
    x, z, dt, B, C = draw_columns(length, widths, seed)
    dt *= 2
    h = torch.Generator().manual_seed(99)
    return Data(
        Mamba1Tokens(x, z, dt, B, C),
        Mamba1Constants(
            A=-8 * torch.rand(channels, size, generator=h) - 0.05,
            D=torch.randn(channels, generator=h),
            dt_bias=torch.randn(channels, generator=h) - 3,
        ),
    )


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    dt = F.softplus(token.dt + token.dt_bias)
    state = torch.exp(dt[:, None] * token.A) * state + (dt * token.x)[:, None] * token.B
    return (state @ token.C + token.D * token.x) * F.silu(token.z), state


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence(mamba1_scan, (CHANNELS, SIZE), draw, step)


def test_a_checkpoint_at_a_block_s_end_is_the_same_however_the_prompt_was_cut(
    recurrence: Recurrence,
) -> None:
    """Blocks of 2048: one pass, and a first segment that ends before the block does."""
    data, whole, cut = draw(2966), recurrence.poisoned(4), recurrence.poisoned(4)
    for state, segments in (
        (whole, [Segment(0, 2966, 0, 1, [(2048, 2)])]),
        (cut, [Segment(0, 1866, 0, 1), Segment(1866, 1100, 1, 1, [(2048, 2)])]),
    ):
        for segment in segments:
            part = data.rows(segment.start, segment.start + segment.length)
            recurrence.prefill(part, [segment], state, padding=0)
    close(cut[1:3], whole[1:3])
    states = recurrence.token_loop(data)[1]
    close(whole[2], states[2048])
    close(whole[1], states[2966])
