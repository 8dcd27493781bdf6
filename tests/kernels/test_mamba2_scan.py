"""Mamba2's scan in plain torch: the contract of recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.mamba2_scan import reference as mamba2_scan
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens
from megatron_hybrid.kernels.tiles import largest_tile
from tests.kernels.recurrence_contract import *  # noqa: F403
from tests.kernels.recurrence_contract import Data, Recurrence, draw_columns

HEADS, HEAD_DIM, GROUPS, SIZE = 4, 5, 2, 6
LIMIT = (0.02, 1.5)


def draw(length: int, seed: int = 0, head_dim: int = HEAD_DIM, size: int = SIZE) -> Data:
    widths = [HEADS * head_dim, GROUPS * size, GROUPS * size, HEADS]
    x, B, C, dt = draw_columns(length, widths, seed)
    dt *= 2
    h = torch.Generator().manual_seed(99)
    return Data(
        Mamba2Tokens(
            x=x.unflatten(1, (HEADS, head_dim)),
            B=B.unflatten(1, (GROUPS, size)),
            C=C.unflatten(1, (GROUPS, size)),
            dt=dt,
        ),
        Mamba2Constants(
            A=-8 * torch.rand(HEADS, generator=h) - 0.05,
            D=torch.randn(HEADS, generator=h),
            dt_bias=torch.randn(HEADS, generator=h) - 2,
            dt_limit=LIMIT,
        ),
    )


def step(state: Tensor, token: Any) -> tuple[Tensor, Tensor]:
    dt = F.softplus(token.dt + token.dt_bias).clamp(*token.dt_limit)
    B, C = (values.repeat_interleave(HEADS // GROUPS, 0)[:, None] for values in (token.B, token.C))
    state = torch.exp(dt * token.A)[:, None, None] * state + (dt[:, None] * token.x)[:, :, None] * B
    return (state * C).sum(-1) + token.D[:, None] * token.x, state


@pytest.fixture(scope="module")
def recurrence() -> Recurrence:
    return Recurrence(mamba2_scan, (HEADS, HEAD_DIM, SIZE), draw, step)


def test_both_limits_of_dt_are_reached() -> None:
    data = draw(60)
    dt = F.softplus(data.tokens.dt + data.constants.dt_bias)
    assert (dt < LIMIT[0]).any() and (dt > LIMIT[1]).any()


def test_a_tile_divides_the_kernel_chunk() -> None:
    assert [largest_tile(q, 64) for q in (256, 128, 16, 96, 1, 100)] == [64, 64, 16, 48, 1, 50]
