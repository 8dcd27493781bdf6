"""When decoding requests write their states: as seldom as they may, and where they must."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.sizing import ring_length
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import CheckedEngine, make_engine, random_tokens, run

T = random_tokens(7, 400)
GRID = 16


def decode(engine: CheckedEngine, count: int, tokens: int) -> list[list[bool]]:
    """Of each step of that many decodes alone: which of them write."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(count):
        engine.add_request(str(number), T[20 * number : 20 * number + 5], params)
    run(engine)
    return [
        plan.writes.tolist()
        for plan in engine.runner.plans
        if plan.writes is not None and len(plan.decode_rows) == count and not plan.prefills
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_request_writes_once_in_an_interval_and_not_all_at_once(asynchronous: bool) -> None:
    engine = make_engine(
        max_requests=8, num_blocks=100, kernel_chunk=64, write_interval=4, asynchronous=asynchronous
    )
    writes = decode(engine, 8, 34)
    *steady, last = writes
    assert all(last), "nothing is behind the last token"
    for step in steady:
        assert sum(step) == 2
    for own in list(zip(*steady, strict=True)):
        assert own.count(True) in (len(own) // 4, len(own) // 4 + 1)


def test_a_state_on_the_grid_is_written_where_it_is_kept() -> None:
    """And so is the next one, to the request's own slot."""
    engine = make_engine(block_size=GRID, kernel_chunk=GRID, write_interval=8, exact_ends=False)
    plans = engine.runner.plans
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add_request("a", T[:5], params)
    run(engine)
    writes = [bool(plan.writes[0]) for plan in plans if len(plan.decode_rows)]
    position = {5 + i: written for i, written in enumerate(writes)}
    # the token at 15 completes the first 16 positions
    for end in (15, 31):
        assert position[end] and position[end + 1]
    assert sum(writes) <= 2 + 4 + len(writes) // 8


def test_rings_have_room_for_what_is_pending_and_what_is_new() -> None:
    assert ring_length(0, 1) == 0
    assert ring_length(0, 4) == 4  # three pending, and the next one
    assert ring_length(3, 1) == 7  # three that hold, the next one and three drafts
    assert ring_length(2, 8) == 7 + 3  # seven pending, the next one and two drafts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_new_weights_find_all_states_written(asynchronous: bool) -> None:
    engine = make_engine(write_interval=4, asynchronous=asynchronous, kernel_chunk=64)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for number in range(3):
        engine.add_request(str(number), T[20 * number : 20 * number + 5], params)
    for _ in range(9):
        engine.step()
    rows = engine.context.rows
    assert rows.unfolded.any()
    engine.update_weights("new ones")
    assert not rows.unfolded.any()
    run(engine)  # whose runner checks each state that it reads
