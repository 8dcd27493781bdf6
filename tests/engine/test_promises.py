"""What a request waits for, how long, and what is kept for it against whom."""

from __future__ import annotations

import pytest

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.engine.scheduler import Scheduler
from megatron_hybrid.engine.tracked_request import Running
from megatron_hybrid.engine.twins import MOST_DEFERRALS, Promises, Twins
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import answer, expected_answer, make_engine, random_tokens, run

T = random_tokens(51, 400)
U = random_tokens(52, 400)
pytestmark = pytest.mark.usefixtures("asynchronous")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_a_promised_state_is_kept_from_those_that_run_until_its_twin_was_tried():
    """The first one ends; in the next step, before its twin is tried, a running prefill wants more
    slots than are free, and the promised state is the one that would go."""
    engine = make_engine(num_blocks=400, cached_slots=8, max_tokens=24, exact_ends=True)
    for i in range(8):  # fill the pool
        engine.add_request(f"old {i}", U[40 * i : 40 * i + 39], greedy(1))
    run(engine)
    states = engine.context.cache.states
    assert states.num_free <= 4
    rule = states.queue.rule
    rule.score = lambda state, *now: (1, state.position)  # type: ignore[method-assign]
    engine.add_request("first", T[:17], greedy(1))
    engine.add_request("twin", T[:17], greedy(1))
    engine.add_request("other", T[100:200], greedy(1), cache_checkpoints=tuple(range(8, 96, 4)))
    events = run(engine)
    assert answer(events["twin"]) == expected_answer(T[:17], 1)
    assert events["twin"][-1].cached_tokens == 17
    assert engine.stats()["twins_waited"] == 1


def test_what_is_held_is_given_up_before_anybody_is_preempted(monkeypatch: pytest.MonkeyPatch):
    given_up = 0

    def preempt(scheduler: Scheduler, running: Running) -> None:
        assert not list(scheduler.pins)
        really_preempt(scheduler, running)

    def release_pins(twins: Twins) -> bool:
        nonlocal given_up
        held = really_release(twins)
        given_up += held
        return held

    really_preempt, really_release = Scheduler._preempt, Twins.release_pins
    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    monkeypatch.setattr(Twins, "release_pins", release_pins)
    for length in range(5, 17):
        for num_blocks in (9, 10, 11):
            engine = make_engine(
                num_blocks=num_blocks, max_requests=3, max_seq_length=36, max_tokens=5,
                exact_ends=True,
            )  # fmt: skip
            engine.add_request("decodes", U[:length], greedy(36 - length))
            for _ in range(length // 4):
                engine.step()
            engine.add_request("first", T[:17], greedy(1))
            engine.add_request("twin", T[:17], greedy(1))
            events = run(engine)
            assert answer(events["twin"]) == expected_answer(T[:17], 1)
    assert given_up > 0


def test_what_is_held_is_given_up_when_nobody_could_run_otherwise():
    """A more important request that wants the whole cache comes before the twin was tried."""
    engine = make_engine(num_blocks=8, max_requests=2, max_seq_length=32, exact_ends=True)
    engine.add_request("first", T[:9], greedy(1))
    engine.add_request("twin", T[:9], greedy(3))
    engine.step()
    assert len(list(engine.scheduler.twins.pins)) == 1
    engine.add_request("large", U[:30], greedy(2), priority=-5)
    events = run(engine)
    assert answer(events["large"]) == expected_answer(U[:30], 2)
    assert answer(events["twin"]) == expected_answer(T[:9], 3)
    assert not list(engine.scheduler.twins.pins)


def test_answers_of_one_request_draw_from_streams_of_their_own():
    engine = make_engine()
    for params in (SamplingParams(n=4, seed=7), SamplingParams(n=4)):
        engine.add_request("a", T[:9], params)
        seeds = [request.seed for request in engine.scheduler._waiting]
        assert len(set(seeds)) == 4
        assert params.seed is None or seeds[0] == 7
        engine.abort("a")
        run(engine)


def test_after_so_many_steps_a_twin_computes_for_itself():
    engine = make_engine(
        num_blocks=600, max_requests=3, max_tokens=10, max_seq_length=1000, exact_ends=True
    )
    text = random_tokens(53, 900)
    engine.add_request("first", text, greedy(1))
    engine.add_request("twin", text, greedy(1))
    for _ in range(MOST_DEFERRALS):
        engine.step()
    assert engine.scheduler.num_running == 1
    engine.step()  # a chunk of 8 tokens, which ends on the grid, leaves it 2
    assert {running.request.request_id for running in engine.context.running()} == {"first", "twin"}
    events = run(engine)
    assert answer(events["twin"]) == expected_answer(text, 1)
    assert engine.stats()["twin_deferrals"] == MOST_DEFERRALS


def test_a_prompt_that_is_the_beginning_of_a_longer_one_leaves_one_token_to_compute():
    """A state at its very end, without logits, would be of no use to it."""
    for length in (48, 49, 50, 51):
        engine = make_engine(num_blocks=100, cached_slots=20, exact_ends=True)
        engine.add_request("long", T[:100], greedy(2))
        engine.add_request("short", T[:length], greedy(2))
        events = run(engine)
        assert answer(events["short"]) == expected_answer(T[:length], 2)
        assert events["short"][-1].cached_tokens == length - 1


def test_a_promise_at_the_very_end_of_a_prompt_counts_with_logits_alone():
    engine = make_engine()
    for request_id in ("a", "b"):
        engine.add_request(request_id, T[:20], greedy(1))
    request, _ = engine.scheduler._waiting
    keys = engine.context.keys.of(request)
    for has_logits in (False, True):
        promises = Promises(block_size=4)

        def awaited(skip: int, promises: Promises = promises) -> BlockKey | None:
            longest = next(promises.to(request, skip), None)
            return None if longest is None else longest.key

        promises.add(keys, 20, has_logits=has_logits)
        assert (awaited(0) == keys.at(20)) is has_logits
        promises.add(keys, 9, has_logits=False)
        assert awaited(8) == keys.at(20 if has_logits else 9)
        assert awaited(9) == (keys.at(20) if has_logits else None)
        # a promise with logits stays one when the same prefix is promised without
        promises.add(keys, 20, has_logits=False)
        assert (awaited(9) == keys.at(20)) is has_logits
    engine.abort("a")
    engine.abort("b")
    run(engine)


def test_a_request_that_goes_on_after_a_preemption_places_no_checkpoints_of_a_prompt():
    engine = make_engine(exact_ends=True)
    engine.add_request("a", T[:30], greedy(20))
    for _ in range(8):
        engine.step()
    (running,) = engine.context.running()
    engine.preempt(running)
    engine.reset()  # all of it has to be computed again
    before = dict(engine.stats()["checkpoints_published"])
    run(engine)
    published = engine.stats()["checkpoints_published"]
    new = {kind for kind, n in published.items() if n > before.get(kind, 0)}
    assert new <= {"decode", "answer_end"}


@pytest.mark.parametrize("own", [[], [5, 6, 7]])
def test_a_tail_is_given_back_after_the_step_that_copied_it(own: list[int]):
    engine = make_engine(exact_ends=True)
    engine.add_request("a", T[:18], greedy(1))
    run(engine)
    engine.add_request("b", T[:18] + own, greedy(9))
    engine.step()
    (request,) = engine.context.running()
    assert request.lease.skip == 18
    assert request.lease.copy is None
    (tail,) = {tail.block for _, tail in engine.context.cache.kv.tails.items() if tail.fill == 2}
    assert engine.context.cache.kv._references[tail] == 0
    run(engine)


def test_who_wants_every_logit_of_its_prompt_waits_for_nobody():
    engine = make_engine(num_blocks=100, max_tokens=30, exact_ends=True)
    engine.add_request("first", T[:100], greedy(1))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    engine.add_request("all logits", T[:100], params)
    engine.step()  # the first one's chunk of 28 tokens leaves a budget of 2
    assert engine.scheduler.num_running == 2
    events = run(engine)
    assert events["all logits"][-1].cached_tokens == 0
    assert engine.stats()["twin_deferrals"] == 0


@pytest.mark.parametrize("exact_ends", [True, False])
def test_who_shares_the_whole_prompt_needs_no_fork_in_it(exact_ends: bool):
    engine = make_engine(num_blocks=100, exact_ends=exact_ends, cached_slots=20)
    engine.add_request("a", T[:22], greedy(1))
    engine.add_request("same", T[:22], greedy(1))
    engine.add_request("longer", T[:22] + U[:5], greedy(1))
    engine.step()
    assert "fork" not in engine.stats()["checkpoints_published"]
    assert engine.runner.plans[0].prefills[0].end == 22
    run(engine)
