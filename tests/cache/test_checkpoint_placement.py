"""CheckpointPlacement: which positions a prompt leaves its states at."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid.cache.checkpoint_placement import (
    MAX_FORKS,
    MAX_MESSAGE_ENDS,
    CheckpointHints,
    CheckpointPlacement,
)
from megatron_hybrid.cache.geometry import CacheGeometry

HYBRID = CacheGeometry(4, 16, 9, 1, 1, 1, 1)
ATTENTION = CacheGeometry(4, 1, 9, 1, 1, 1, 0)
RECURRENT = CacheGeometry(4, 16, 0, 1, 1, 0, 1)


def test_without_exact_ends_divergence_and_the_last_aligned_positions_are_named():
    placement = CheckpointPlacement(HYBRID, exact_ends=False, interval=0)
    assert placement.for_prompt(60, skip=0, matched_tokens=0) == [(48, "last_aligned")]
    assert placement.for_prompt(64, 0, 0) == [(48, "last_aligned"), (64, "last_aligned")]
    assert placement.for_prompt(60, 0, 40) == [(32, "divergence"), (48, "last_aligned")]
    assert placement.for_prompt(60, 32, 44) == [(48, "last_aligned")]
    assert placement.for_prompt(60, 48, 48) == []
    assert placement.for_prompt(7, 0, 0) == []


def test_exact_ends_add_the_prompts_end():
    placement = CheckpointPlacement(HYBRID, interval=0)
    for length in range(1, 70):
        planned = placement.for_prompt(length, 0, 0)
        assert planned[-1] == (length, "prompt_end")
    assert (7, "prompt_end") in placement.for_prompt(7, 0, 0)
    assert (64, "prompt_end") in placement.for_prompt(64, 0, 0)


def test_a_model_without_recurrent_layers_keeps_its_end_alone():
    hints = CheckpointHints((5,), (9,))
    assert CheckpointPlacement(ATTENTION).for_prompt(60, 0, 40, hints) == [(60, "prompt_end")]
    assert CheckpointPlacement(ATTENTION, exact_ends=False).for_prompt(60, 0, 40, hints) == []


def test_a_model_without_attention_has_no_divergence():
    """What is matched there are states alone."""
    placement = CheckpointPlacement(RECURRENT, exact_ends=False, interval=0)
    assert placement.for_prompt(60, 16, 32) == [(48, "last_aligned")]


@pytest.mark.parametrize("geometry", [HYBRID, ATTENTION, RECURRENT])
@pytest.mark.parametrize("exact_ends", [True, False])
def test_positions_ascend_lie_above_the_skip_and_on_the_grid_or_are_worth_a_step(
    geometry: CacheGeometry, exact_ends: bool
):
    rng = random.Random(0)
    placement = CheckpointPlacement(geometry, exact_ends=exact_ends, interval=rng.choice([0, 24]))
    for _ in range(2000):
        length = rng.randrange(1, 200)
        skip = rng.randrange(length)
        matched = rng.randrange(skip, length)
        named = tuple(rng.randrange(1, length + 1) for _ in range(rng.randrange(4)))
        ends = tuple(rng.randrange(-3, length + 9) for _ in range(rng.randrange(12)))
        hints = CheckpointHints(named, ends)
        planned = placement.for_prompt(length, skip, matched, hints)
        positions = [position for position, _ in planned]
        assert positions == sorted(set(positions))
        assert all(skip < position <= length for position in positions)
        off_grid = [p for p in positions if p % geometry.grid and p != length]
        if not exact_ends:
            assert not off_grid and length % geometry.grid * (length in positions) == 0
        assert set(off_grid) <= {*named, *ends[:1], *[e for e in ends if 0 < e <= length][:1]}
        for position in positions:
            assert placement.needs_break(position) == bool(position % geometry.grid)


def test_named_positions_are_exact_where_much_follows_and_on_the_grid_otherwise():
    placement = CheckpointPlacement(HYBRID, interval=0)
    planned = placement.for_prompt(200, 0, 0, CheckpointHints((77, 190)))
    assert planned == [(77, "hint"), (176, "hint"), (192, "last_aligned"), (200, "prompt_end")]
    on_grid = CheckpointPlacement(HYBRID, exact_ends=False, interval=0)
    planned = on_grid.for_prompt(200, 0, 0, CheckpointHints((77, 190)))
    assert planned == [(64, "hint"), (176, "hint"), (192, "last_aligned")]


def test_the_system_messages_end_is_exact_and_the_last_few_others_are_rounded():
    placement = CheckpointPlacement(HYBRID, interval=0)
    ends = tuple(range(21, 400, 37))  # more than are kept
    planned = placement.for_prompt(420, 0, 0, CheckpointHints(message_ends=ends))
    hints = [position for position, kind in planned if kind == "hint"]
    last = ends[1:][1 - MAX_MESSAGE_ENDS :]
    assert hints == sorted({21, *(end - end % 16 for end in last)} - {416, 0})
    assert len(hints) <= MAX_MESSAGE_ENDS


def test_intervals_lie_above_the_skip_and_below_the_end():
    placement = CheckpointPlacement(HYBRID, exact_ends=False, interval=100)
    planned = placement.for_prompt(450, 130, 130)
    assert [p for p, kind in planned if kind == "interval"] == [192, 288, 400]
    assert CheckpointPlacement(HYBRID, exact_ends=False, interval=5).for_prompt(40, 0, 0) == [
        (16, "interval"), (32, "last_aligned")
    ]  # fmt: skip


@pytest.mark.parametrize("exact_ends", [True, False])
def test_forks_are_ranked_by_waiters_times_tokens_saved(exact_ends: bool):
    rng = random.Random(1)
    placement = CheckpointPlacement(HYBRID, exact_ends=exact_ends, interval=0)
    for _ in range(500):
        reached, length = rng.randrange(100), rng.randrange(120, 500)
        above = reached + rng.randrange(20)
        shared = [(rng.randrange(1, length + 20), rng.randrange(1, 9)) for _ in range(15)]
        planned = placement.for_waiters(shared, reached, above, length)
        worth: dict[int, int] = {}
        for common, waiters in shared:
            position = common if exact_ends else common - common % 16
            # with a grid position behind the last state, but not behind what is computed
            if common - common % 16 > reached and above < position < length:
                worth[position] = worth.get(position, 0) + waiters * (position - reached)
        best = sorted(worth, key=lambda p: (-worth[p], p))[:MAX_FORKS]
        assert planned == [(position, "fork") for position in sorted(best)]
    assert CheckpointPlacement(ATTENTION).for_waiters([(30, 2)], 0, 0, 60) == [(28, "fork")]
    assert placement.for_waiters([], 0, 0, 60) == []


def test_ends_off_the_grid_are_kept_with_exact_ends_alone():
    exact = CheckpointPlacement(HYBRID)
    on_grid = CheckpointPlacement(HYBRID, exact_ends=False)
    assert all(exact.keeps_end(position) for position in range(1, 50))
    assert [p for p in range(1, 50) if on_grid.keeps_end(p)] == [16, 32, 48]
    for placement in (exact, on_grid):
        assert [p for p in range(1, 50) if placement.decode_position(p)] == [16, 32, 48]
