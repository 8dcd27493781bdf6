"""ReplayCost: what it learns of groups of states, against a plain count of what happened."""

from __future__ import annotations

import random

from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.replay_cost import LEARNS_EVERY, ReplayCost


def make_state(kind: str = "answer_end", turn: int = 0, pause: int = 0) -> CachedState:
    state = CachedState(b"key", 100, kind)
    state.turn, state.pause = turn, pause
    return state


def live(estimator: ReplayCost, state: CachedState, age: int, *, is_read: bool) -> None:
    """A state is left in step 0 and read or lost at that age."""
    state.used_at = 0
    estimator.was_left(state)
    (estimator.was_read if is_read else estimator.was_lost)(state, age)


def fresh(estimator: ReplayCost, **figures: int) -> CachedState:
    state = make_state(**figures)
    state.used_at = 0
    estimator.was_left(state)
    return state


def test_before_anything_is_known_the_older_is_the_less_likely_to_be_read():
    estimator = ReplayCost()
    state = fresh(estimator)
    densities = [estimator.density(state, now) for now in (0, 1, 5, 50, 500, 50_000, 10**9)]
    assert densities == sorted(densities, reverse=True) and densities[-1] > 0


def test_conversations_that_go_on_at_once_are_told_from_those_that_take_their_time():
    """Quick ones are read after 16 steps; slow ones after 2,000, if at all."""
    rng = random.Random(1)
    estimator = ReplayCost()
    for _ in range(2000):
        live(estimator, make_state(turn=2, pause=10), 16, is_read=True)
        late = rng.random() < 0.5
        live(estimator, make_state(turn=2, pause=2_000), 2_000 if late else 20_000, is_read=late)
    quick, slow = fresh(estimator, turn=2, pause=10), fresh(estimator, turn=2, pause=2_000)
    assert estimator.density(quick, 8) > 20 * estimator.density(slow, 8)
    # one that was not read in its time will hardly be read later
    assert estimator.density(quick, 500) < estimator.density(quick, 8) / 20


def test_a_density_is_reads_by_the_time_that_states_stay():
    estimator = ReplayCost()
    # of four, three are read in [64, 128) and one is lost in [256, 512)
    for _ in range(2 * LEARNS_EVERY):
        for age, is_read in ((100, True), (100, True), (100, True), (300, False)):
            live(estimator, make_state(turn=1), age, is_read=is_read)
    density = estimator.density(fresh(estimator, turn=1), 0)
    # who leaves in a bucket stays for half of it: three for 64 + 32 steps, one for 256 + 128
    assert abs(density - 3 / (3 * 96 + 384)) < 0.1 * density


def test_first_answers_behind_a_beginning_are_judged_by_those_before_them():
    estimator = ReplayCost()
    chat, form = CachedState(b"chat", 50, "hint"), CachedState(b"form", 50, "hint")
    for _ in range(1500):
        for fork, is_read in ((chat, True), (form, False)):
            state = make_state()
            state.fork = fork
            live(estimator, state, 100 if is_read else 5_000, is_read=is_read)
    assert (chat.born, chat.continued, form.born, form.continued) == (1500, 1500, 1500, 0)
    states = []
    for fork in (chat, form):
        state = make_state()
        state.fork, state.used_at = fork, 0
        estimator.was_left(state)
        states.append(state)
    assert estimator.density(states[0], 10) > 50 * estimator.density(states[1], 10)


def test_what_was_learnt_fades():
    estimator = ReplayCost()
    for _ in range(20 * LEARNS_EVERY):
        live(estimator, make_state(turn=1), 1_000, is_read=False)
    before = estimator.density(fresh(estimator, turn=1), 0)
    for _ in range(20 * LEARNS_EVERY):
        live(estimator, make_state(turn=1), 30, is_read=True)
    assert estimator.density(fresh(estimator, turn=1), 0) > 20 * before
