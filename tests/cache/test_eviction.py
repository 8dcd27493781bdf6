"""EvictionQueue: against a search of everything that is in it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.eviction import (
    SCORED_ANEW,
    EvictionQueue,
    LeastRecentlyUsed,
)
from megatron_hybrid.cache.replay_cost import ReplayCost


class Given:
    """A rule whose scores are set from outside."""

    def __init__(self) -> None:
        self.scores: dict[CachedState, float] = {}
        self.asked = 0

    def score(self, state: CachedState, *now: int) -> tuple[int, float]:
        self.asked += 1
        return 1, self.scores[state]

    def __getattr__(self, name: str) -> Callable[..., None]:  # told what happens; learns nothing
        if name.startswith("was_"):
            return lambda *args: None
        raise AttributeError(name)


def make_state(slot: int, kind: str = "fork") -> CachedState:
    state = CachedState(slot.to_bytes(2, "little"), 10 + slot, kind)
    state.slot, state.alive = slot, True
    return state


@pytest.mark.parametrize("seed", range(6))
def test_the_first_is_the_smallest_of_all_in_any_order_of_calls(seed: int):
    rng = random.Random(seed)
    rule = Given()
    queue = EvictionQueue(rule)
    inside: dict[int, CachedState] = {}
    for turn in range(3000):
        slot, action = rng.randrange(1, 30), rng.random()
        if action < 0.5:
            state = inside.get(slot) or make_state(slot)  # again: its score has changed
            rule.scores[state] = turn + rng.random() * 50
            queue.add(state)
            inside[slot] = state
        elif action < 0.8:
            queue.discard(slot)
            inside.pop(slot, None)
        else:
            first = queue.pop()
            if inside:
                assert first is min(inside.values(), key=lambda state: rule.scores[state])
                del inside[first.slot]
            else:
                assert first is None
        assert len(queue) == len(inside)
        assert all((slot in queue) == (slot in inside) for slot in range(1, 30))


def test_a_state_whose_score_has_risen_unseen_lets_the_next_one_go_first():
    rule = Given()
    queue = EvictionQueue(rule)
    a, b, c = (make_state(slot) for slot in (1, 2, 3))
    for worth, state in ((1.0, a), (2.0, b), (3.0, c)):
        rule.scores[state] = worth
        queue.add(state)
    rule.scores[a] = 2.5
    assert queue.pop() is b
    assert len(queue) == 2 and 2 not in queue
    assert [queue.pop(), queue.pop(), queue.pop()] == [a, c, None]


def test_looking_for_the_first_scores_a_bounded_number_of_states_again():
    rule = Given()
    queue = EvictionQueue(rule)
    states = [make_state(slot) for slot in range(1, 2001)]
    for state in states:
        rule.scores[state] = float(state.slot)
        queue.add(state)
    for state in states:
        rule.scores[state] += 1e6
    rule.asked = 0
    first = queue.pop()
    assert first is not None and first.slot not in queue and len(queue) == 1999
    assert rule.asked <= 4 * SCORED_ANEW


def test_the_heap_stays_linear_in_the_number_of_states():
    rule = Given()
    queue = EvictionQueue(rule)
    states = [make_state(slot) for slot in range(10)]
    for use in range(10_000):
        state = states[use % 10]
        rule.scores[state] = float(use)
        queue.add(state)
    assert len(queue) == 10 and len(queue._heap) < 200
    order = [state.slot for _ in range(10) if (state := queue.pop()) is not None]
    assert order == list(range(10)) and queue.pop() is None


def test_the_scores_of_those_that_wait_are_taken_anew_by_and_by():
    """Worth falls with age: what was high once must not stay at the heap's bottom for ever."""
    rule = Given()
    queue = EvictionQueue(rule)
    states = [make_state(slot) for slot in range(1, 101)]
    for state in states:
        rule.scores[state] = 1000.0 + state.slot
        queue.add(state)
    rule.scores[states[-1]] = 0.0  # nobody says so
    for _ in range(2 * 100 // SCORED_ANEW):
        first = queue.pop()
        assert first is not None
        if first is states[-1]:
            break
        queue.add(first)
    else:
        raise AssertionError("its score was never looked at again")


def test_under_lru_the_state_that_was_used_longest_ago_goes_first():
    queue = EvictionQueue(LeastRecentlyUsed())
    states = [make_state(slot) for slot in range(1, 6)]
    for state, last_use in zip(states, (3, 1, 5, 2, 4), strict=True):
        state.last_use = last_use
        queue.add(state)
    states[1].last_use = 9
    queue.add(states[1])
    order = [state.last_use for _ in states if (state := queue.pop()) is not None]
    assert order == [2, 3, 4, 5, 9]


def make_path(positions: list[int], kind: str = "answer_end") -> list[CachedState]:
    """Cached states, each behind the one before it."""
    states: list[CachedState] = []
    for slot, position in enumerate(positions, start=1):
        parent = states[-1] if states else None
        state = CachedState(slot.to_bytes(2, "little"), position, kind, parent)
        state.slot = slot
        state.join()
        states.append(state)
    return states


def test_under_replay_cost_what_another_state_covers_goes_before_the_rest():
    rule = ReplayCost()
    queue = EvictionQueue(rule)
    covered, last = make_path([5000, 5100])
    (alone,) = make_path([30])
    alone.slot = 3
    for state in (covered, last, alone):
        queue.add(state)
    assert queue.pop() is covered


def test_under_replay_cost_a_fork_is_spared_for_what_it_costs():
    rule = ReplayCost()
    queue = EvictionQueue(rule)
    fork, *_ = make_path([5000, 5100], "fork")
    (alone,) = make_path([30])
    alone.slot = 3
    for state in (fork, alone):
        queue.add(state)
    assert queue.pop() is alone


def test_under_replay_cost_of_two_of_one_age_the_one_that_costs_less_goes_first():
    rule = ReplayCost()
    (short,), (long,) = make_path([300]), make_path([3000])
    short.used_at = long.used_at = 7
    assert rule.score(short, 50) < rule.score(long, 50)
    # a tenth of the cost at a hundredth of the age is worth more
    short.used_at = 4999
    assert rule.score(short, 5000) > rule.score(long, 5000)


def publish(queue: EvictionQueue, slot: int, position: int, parent: CachedState | None, kind: str):  # type: ignore[no-untyped-def]
    state = CachedState(slot.to_bytes(2, "little"), position, kind, parent)
    state.slot = slot
    state.join()
    queue.rule.was_left(state)
    queue.add(state)
    queue.rescore(state if parent is None else parent)
    return state


@pytest.mark.parametrize("why", ["kind", "branches", "reads"])
def test_where_prompts_part_a_state_is_spared(why: str):
    queue = EvictionQueue(ReplayCost())
    tail = publish(queue, 1, 300, None, "answer_end")
    queue.now = 1000
    fork = publish(queue, 2, 5000, None, "hint" if why == "kind" else "prompt_end")
    publish(queue, 3, 6000, fork, "answer_end")
    if why == "branches":
        publish(queue, 4, 7000, fork, "answer_end")
    if why == "reads":  # by two requests, of which one has left nothing
        queue.rule.was_read(fork, 1000)
        queue.rule.was_read(fork, 1000)
    queue.rescore(fork)
    queue.add(fork)
    assert queue.pop() is tail
