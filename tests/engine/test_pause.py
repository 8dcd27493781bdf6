"""What a paused engine does with those who run, those who wait and those who come."""

from __future__ import annotations

import pytest

from megatron_hybrid.errors import InvalidRequestError, WeightsError, WeightsLostError
from megatron_hybrid.pause_mode import PAUSE_MODES
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from tests.engine.symbolic import (
    CheckedEngine,
    answer,
    expected_answer,
    generate,
    make_engine,
    random_tokens,
    run,
)

T = random_tokens(71, 1000)
pytestmark = pytest.mark.usefixtures("asynchronous")
Events = dict[str, list[RequestEvent]]


def greedy(max_tokens: int, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompt(number: int, length: int = 18) -> list[int]:
    return T[30 * number : 30 * number + length]


def engine_with_two_running(steps: int = 6, **options) -> tuple[CheckedEngine, Events]:  # type: ignore[no-untyped-def]
    """Requests 0 and 1 run, 2 and 3 wait; with the events so far."""
    engine = make_engine(**({"max_requests": 2, "exact_ends": True} | options))
    for number in range(4):
        engine.add_request(f"{number}", prompt(number), greedy(20))
    events: Events = {}
    for _ in range(steps):
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert engine.scheduler.num_running == 2 and engine.scheduler.num_waiting == 2
    return engine, events


def join(first: Events, second: Events) -> Events:
    return {name: first.get(name, []) + second.get(name, []) for name in first | second}


def test_finish_lets_those_that_run_end_and_begins_nobody():
    engine, events = engine_with_two_running()
    engine.pause("finish")
    assert engine.is_paused and not engine.is_quiet
    engine.add_request("late", prompt(5), greedy(3))
    drained = join(events, run(engine))
    assert set(drained) == {"0", "1"}
    for number in range(2):
        assert answer(drained[f"{number}"]) == expected_answer(prompt(number), 20)
    assert engine.is_quiet and not engine.has_work() and engine.scheduler.num_waiting == 3
    assert engine.step() == [], "a step of a paused engine is harmless"
    engine.resume()
    ends = run(engine)
    assert list(ends) == ["2", "3", "late"], "they kept their order"
    assert answer(ends["2"]) == expected_answer(prompt(2), 20)


def test_abort_ends_those_that_have_begun_and_leaves_the_others_their_place():
    engine, events = engine_with_two_running()
    engine.pause("abort")
    ended = run(engine)
    assert {name: one[-1].finish_reason for name, one in ended.items()} == {
        "0": FinishReason.ABORT,
        "1": FinishReason.ABORT,
    }
    assert engine.is_quiet and engine.scheduler.num_waiting == 2
    assert engine.context.rows.num_free == 2
    engine.resume()
    assert list(run(engine)) == ["2", "3"]


def test_keep_stops_everything_where_it_stands_and_goes_on_from_there():
    engine, events = engine_with_two_running()
    engine.pause("keep")
    events = join(events, run(engine))
    assert engine.is_quiet and engine.scheduler.num_running == 2
    assert not any(one[-1].finish_reason for one in events.values())
    assert not engine.runner.in_flight
    steps = len(engine.runner.plans)
    engine.add_request("late", prompt(5), greedy(3))
    for _ in range(3):
        assert engine.step() == []
    assert len(engine.runner.plans) == steps, "nothing was computed meanwhile"
    engine.resume()
    events = join(events, run(engine))
    for number in range(4):
        assert answer(events[f"{number}"]) == expected_answer(prompt(number), 20)
    computed = engine.stats()["computed_tokens"] + engine.stats()["skipped_tokens"]
    assert computed == 5 * 18, "nobody was computed twice"


def test_a_prompt_in_the_middle_of_its_chunks_is_kept_and_finished():
    for mode in ("keep", "finish"):
        engine = make_engine(max_tokens=16, max_requests=2)
        engine.add_request("long", T[:90], greedy(4))
        engine.step()
        engine.pause(mode)
        first = run(engine)
        assert bool(first) is (mode == "finish")
        engine.resume()
        assert answer(join(first, run(engine))["long"]) == expected_answer(T[:90], 4)


@pytest.mark.parametrize("mode", ["finish", "abort"])
def test_a_preempted_request_counts_as_begun(mode: str):
    """It has handed out tokens: after new weights it would be a mixture."""
    engine, events = engine_with_two_running()
    last = max(engine.context.running(), key=lambda running: running.admission)
    victim = last.request
    engine.preempt(last)
    events = join(events, {e.request_id: [e] for e in engine.scheduler.take_events()})
    engine.pause(mode)
    events = join(events, run(engine))
    assert set(events) == {"0", "1"} and engine.is_quiet
    if mode == "finish":
        assert answer(events[victim.request_id]) == expected_answer(list(victim.prompt), 20)
    else:
        assert events[victim.request_id][-1].finish_reason is FinishReason.ABORT


def test_a_frozen_request_can_be_aborted_and_its_end_is_handed_out():
    engine, _ = engine_with_two_running()
    engine.pause("keep")
    run(engine)
    engine.abort("0")
    assert engine.has_work() and not engine.is_quiet
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason) == ("0", FinishReason.ABORT)
    assert engine.is_quiet


def test_pausing_again_changes_the_mode_and_resuming_twice_changes_nothing():
    engine, events = engine_with_two_running()
    engine.pause("keep")
    engine.pause("keep")
    events = join(events, run(engine))
    engine.pause("finish")
    assert not engine.is_quiet
    events = join(events, run(engine))
    assert set(events) == {"0", "1"} and engine.is_quiet
    engine.pause("abort")
    assert engine.is_quiet and engine.is_paused
    engine.resume()
    engine.resume()
    assert set(run(engine)) == {"2", "3"} and not engine.is_paused
    with pytest.raises(InvalidRequestError, match="mode is 'wait'; it can be finish, abort, keep"):
        engine.pause("wait")


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_an_idle_engine_is_paused_at_once(mode: str):
    engine = make_engine()
    engine.pause(mode)
    assert engine.is_quiet and engine.stats()["paused"]
    engine.add_request("a", prompt(0), greedy(2))
    assert not engine.has_work()
    engine.resume()
    assert answer(run(engine)["a"]) == expected_answer(prompt(0), 2)


def test_new_weights_empty_the_cache_and_what_went_on_publishes_nothing():
    """Neither blocks nor states while it decodes, nor the state and the logits at its end, nor
    anything for those who wait for it."""
    engine = make_engine(max_requests=4, exact_ends=True, interval=8, num_blocks=200)
    generate(engine, [prompt(9)])
    twins = {"max_tokens": 24}
    engine.add_request("first", T[:61], greedy(**twins))
    engine.add_request("decodes", prompt(8), greedy(60))
    for _ in range(12):
        engine.step()
    assert engine.context.cache.occupancy().state_cached > 0
    engine.add_request("twin", T[:61], greedy(4))
    engine.pause("keep")
    before = run(engine)
    engine.update_weights("folder")
    assert engine.runner.updates == ["folder"] and engine.epoch == engine.stats()["epoch"] == 1
    occupancy = engine.context.cache.occupancy()
    assert (occupancy.kv_cached, occupancy.state_cached) == (0, 0)
    engine.check_integrity()
    published = engine.stats()["checkpoints_published"]
    engine.abort("twin")
    engine.resume()
    events = run(engine)
    assert events["first"][-1].finish_reason is FinishReason.LENGTH and "decodes" in before | events
    occupancy = engine.context.cache.occupancy()
    assert (occupancy.kv_cached, occupancy.state_cached) == (0, 0)
    assert engine.stats()["checkpoints_published"] == published
    # and what comes now is computed, published and found again
    assert generate(engine, [T[:61]])[0].cached_tokens == 0
    assert generate(engine, [T[:61]])[0].cached_tokens == 61


def test_one_that_is_preempted_after_new_weights_begins_anew_under_them():
    engine, _ = engine_with_two_running(num_blocks=200)
    engine.pause("keep")
    run(engine)
    engine.update_weights("folder")
    victim = next(engine.context.running())
    engine.preempt(victim)
    engine.resume()
    run(engine)
    tokens = [*victim.request.prompt.tolist(), *victim.request.output]
    assert generate(engine, [[*tokens, 3]])[0].cached_tokens >= len(tokens) - 4


def test_a_step_in_flight_is_received_before_weights_change():
    engine = make_engine(asynchronous=True)
    engine.add_request("a", prompt(0), greedy(8))
    events = [*engine.step(), *engine.step()]
    engine.update_weights("folder")  # the runner asserts it
    events += run(engine)["a"]
    assert answer(events) == expected_answer(prompt(0), 8)


def test_those_who_wait_share_prefixes_under_the_new_weights():
    """Their forks are found by the new keys: the third leaves a state where two others part."""
    engine = make_engine(num_blocks=200, cached_slots=40, max_tokens=24, max_requests=1)
    engine.add_request("runs", prompt(9), greedy(6))
    for name, tail in (("x", T[500:520]), ("y", T[600:620]), ("z", T[700:720])):
        engine.add_request(name, T[:40] + tail, greedy(2))
    engine.step()
    engine.pause("finish")
    run(engine)
    engine.update_weights("folder")
    engine.resume()
    events = run(engine)
    assert [events[name][-1].cached_tokens for name in "xyz"] == [0, 40, 40]


def test_weights_that_do_not_fit_change_nothing_and_half_copied_ones_end_the_engine():
    engine = make_engine(exact_ends=True)
    generate(engine, [prompt(0)])
    with pytest.raises(WeightsError, match="no fit"):
        engine.update_weights(WeightsError("no fit"))
    assert engine.epoch == 0 and generate(engine, [prompt(0)])[0].cached_tokens == 18
    with pytest.raises(WeightsLostError):
        engine.update_weights(WeightsLostError("The weights are a mixture."))
    assert engine.has_work(), "a loop must learn of it"
    for call in (engine.step, lambda: engine.update_weights("folder")):
        with pytest.raises(WeightsLostError, match="a mixture"):
            call()
