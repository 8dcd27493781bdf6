"""Kimi delta attention's prefill and decodes in Triton's interpreter, on a CPU, in float32.
(Runs: test_runs_triton.py.)"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from tests.kernels.recurrence_contract import Data, Recurrence, close
from tests.kernels.segments import Segment, int64, prefill_segments
from tests.kernels.test_kimi_delta_attention import BOUNDS, HEADS, draw, step
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.gated_delta_rule import triton as delta_rule  # noqa: E402

# where nothing is taken
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

# (kernel chunk, tile)
TILES = pytest.mark.parametrize(
    ("chunk", "tile"), usually([(32, 16), (64, 64)], [(16, 16), (32, 32), (32, 16), (64, 64)])
)


@pytest.fixture(scope="module", params=BOUNDS)
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    return recurrence_of(BOUNDS[request.param])


def recurrence_of(bound: float | None, k_dim: int = 16) -> Recurrence:
    own = partial(draw, v_dim=16, k_dim=k_dim, lower_bound=bound)
    return Recurrence(delta_rule, (HEADS, 16, k_dim), own, step)


def run(
    data: Data, segments: list[Segment], state: Tensor, chunk: int, tile: int, padding: int = 1
) -> Tensor:
    packed = prefill_segments(segments, padding, chunks=(chunk,))
    out = torch.full_like(data.tokens.like, float("nan"))
    tiling = delta_rule.Tiling(tile, 16, walk_warps=4, walk_stages=1)
    plan: Any = delta_rule.plan(packed, chunk)
    return delta_rule.prefill(*data.arguments(), state, plan, out, tiling=tiling)


@A_THIRD
@TILES
@pytest.mark.parametrize("length", usually([70], [1, 17, 64, 70]))
def test_one_sequence_equals_the_token_loop(
    recurrence: Recurrence, length: int, chunk: int, tile: int
) -> None:
    data, state = recurrence.draw(length), recurrence.poisoned(3)
    y = run(data, [Segment(0, length, 0, 2)], state, chunk, tile)
    expected, states = recurrence.token_loop(data)
    close(y, expected)
    close(state[2], states[length])
    assert state[:2].isnan().all()


@A_THIRD
@pytest.mark.parametrize(("chunk", "tile"), usually([(32, 16)], [(32, 32), (32, 16)]))
def test_packed_sequences_with_checkpoints_equal_the_token_loop(
    recurrence: Recurrence, chunk: int, tile: int
) -> None:
    """More sequences than the walk counts tiles of at once, among them empty ones."""
    segments = [
        Segment(0, 70, 0, 6, [(32, 7), (64, 8)]),
        *[Segment(i, i % 2, 0, 0) for i in range(70)],
        Segment(21, 45, 1, 1, [(32, 9), (64, 0), (66, 10)]),
        Segment(40, 0, 2, 14),
        Segment(95, 1, 3, 3, [(96, 11)]),
    ]
    data, state = recurrence.draw(sum(s.length for s in segments) + 3), recurrence.poisoned(15)
    drawn = torch.Generator().manual_seed(3)
    state[1:4] = torch.randn(3, *recurrence.shape, generator=drawn)
    before = state.clone()
    y = run(data, segments, state, chunk, tile)
    begin = 0
    for s in segments:
        if s.length:
            initial = before[s.read] if s.read else None
            expected, states = recurrence.token_loop(data.rows(begin, begin + s.length), initial)
            close(y[begin : begin + s.length], expected)
            for position, slot in (*s.checkpoints, (s.start + s.length, s.write)):
                if slot > 0:
                    close(state[slot], states[position - s.start])
        begin += s.length
    assert torch.equal(state[14], before[2])


def test_segments_cut_on_the_grid_give_the_very_same_bits(recurrence: Recurrence) -> None:
    data, whole, cut = recurrence.draw(80), recurrence.poisoned(4), recurrence.poisoned(4)
    y = run(data, [Segment(0, 80, 0, 1, [(32, 2)])], whole, 32, 16)
    first = run(data.rows(0, 32), [Segment(0, 32, 0, 2)], cut, 32, 16)
    rest = run(data.rows(32, 80), [Segment(32, 48, 2, 1)], cut, 32, 16)
    assert torch.equal(torch.cat((first, rest)), y)
    assert torch.equal(whole[1:3], cut[1:3])


@pytest.mark.parametrize("bound", BOUNDS.values())
def test_keys_of_no_power_of_two_equal_the_token_loop(bound: float | None) -> None:
    recurrence = recurrence_of(bound, k_dim=24)
    data, state = recurrence.draw(50), recurrence.poisoned(3)
    y = run(data, [Segment(5, 50, 0, 2, [(32, 1)])], state, 32, 32)
    expected, states = recurrence.token_loop(data)
    close(y, expected)
    close(state[2], states[50])
    close(state[1], states[27])


def test_decode_equals_the_token_loop(recurrence: Recurrence) -> None:
    """In place, from one slot to another, from zeros, to nowhere, and a padded row."""
    read, write = [1, 2, 0, 3, 0], [1, 4, 5, 0, 0]
    data, state = recurrence.draw(5), recurrence.poisoned(7)
    drawn = torch.Generator().manual_seed(5)
    state[1:4] = torch.randn(3, *recurrence.shape, generator=drawn)
    before = state.clone()
    y = delta_rule.decode(*data.arguments(), state, DecodeSlots(int64(read), int64(write)))
    for row in range(4):
        initial = before[read[row]] if read[row] else None
        expected, states = recurrence.token_loop(data.rows(row, row + 1), initial)
        close(y[row : row + 1], expected)
        if write[row]:
            close(state[write[row]], states[1])
    assert y[4].eq(0).all() and torch.equal(state[2:4], before[2:4])
