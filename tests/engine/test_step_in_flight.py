"""What is particular to an engine that schedules a step while the one before is in flight."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.engine.scheduler import Scheduler
from megatron_hybrid.engine.tracked_request import Running
from megatron_hybrid.errors import DeviceLostError
from megatron_hybrid.execution.plan import StepDemand, StepPlan
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from tests.engine.symbolic import (
    CheckedEngine,
    SymbolicLaunch,
    SymbolicRunner,
    answer,
    expected_answer,
    generate,
    make_engine,
    random_tokens,
    run,
)

T = random_tokens(61, 1000)
# The tenth token of this answer has not been in it before.
STOPPED = next(
    T[start : start + 30]
    for start in range(0, 900, 10)
    if expected_answer(T[start : start + 30], 10)[-1]
    not in expected_answer(T[start : start + 30], 9)
)


def engine_in_flight(**options) -> CheckedEngine:  # type: ignore[no-untyped-def]
    return make_engine(**({"asynchronous": True, "exact_ends": True, "num_blocks": 100} | options))


def greedy(max_tokens: int, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def tokens_of(events: list[RequestEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_token_comes_with_the_step_after_the_one_that_computed_it():
    engine = engine_in_flight()
    engine.add_request("a", T[:9], greedy(2))
    assert engine.step() == [] and len(engine.runner.in_flight) == 1
    (first,) = engine.step()
    (last,) = engine.step()
    assert tokens_of([first, last]) == expected_answer(T[:9], 2)
    assert first.finish_reason is None and last.finish_reason is FinishReason.LENGTH
    assert not engine.has_work() and len(engine.runner.plans) == 2


def test_an_answer_of_max_tokens_is_not_in_the_next_step_and_its_row_is_free():
    engine = engine_in_flight(max_requests=1)
    engine.add_request("a", T[:9], greedy(2))
    engine.add_request("b", T[50:60], greedy(2))
    engine.step()
    engine.step()  # computes the last token of a
    assert engine.scheduler.num_running == 0 and engine.has_work()
    engine.abort("a")  # too late: all that is to be said of it has been computed
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason) == ("a", FinishReason.LENGTH)
    plan = engine.runner.plans[-1]
    assert len(plan.decode_rows) == 0 and plan.prefills[0].owner.request_id == "b"
    assert answer(run(engine)["b"]) == expected_answer(T[50:60], 2)


def test_the_token_after_a_stop_is_dropped_and_the_state_that_fed_the_stop_is_kept():
    engine = engine_in_flight(max_requests=1)
    stop = expected_answer(STOPPED, 10)[-1]
    engine.add_request("a", STOPPED, greedy(50, stop_token_ids=(stop,)))
    engine.add_request("b", T[500:520], greedy(9))
    events = run(engine)  # b takes the row while the dropped token is in flight
    assert answer(events["a"]) == expected_answer(STOPPED, 10)
    assert events["a"][-1].finish_reason is FinishReason.STOP
    assert events["a"][-1].stop_token_id == stop
    assert answer(events["b"]) == expected_answer(T[500:520], 9)
    assert len(engine.runner.plans) == 11 + 9
    assert engine.stats()["generated_tokens"] == 10 + 9
    # with a step at a time, 39: nothing had fed the last token
    assert generate(engine, [STOPPED + answer(events["a"]) + [5]])[0].cached_tokens == 40


def test_a_stop_in_the_step_before_the_last_one_ends_the_answer_there():
    engine = engine_in_flight()
    stop = expected_answer(STOPPED, 10)[-1]
    for max_tokens, reason in ((10, "stop"), (11, "stop"), (9, "length")):
        engine.add_request("a", STOPPED, greedy(max_tokens, stop_token_ids=(stop,)))
        events = run(engine)["a"]
        assert answer(events) == expected_answer(STOPPED, min(10, max_tokens))
        assert events[-1].finish_reason == reason


def test_aborting_hands_out_the_token_in_flight_and_keeps_what_was_fed():
    """So that who goes on with the answer computes one token."""
    engine = engine_in_flight()
    engine.add_request("a", T[:30], greedy(50))
    events = [event for _ in range(6) for event in engine.step()]
    assert len(events) == 5
    engine.abort("a")
    engine.check_integrity()
    assert engine.context.rows.num_free == 4
    (last,) = run(engine)["a"]
    assert last.finish_reason is FinishReason.ABORT and len(last.token_ids) == 1
    answered = tokens_of([*events, last])
    assert answered == expected_answer(T[:30], 6)
    assert generate(engine, [T[:30] + answered])[0].cached_tokens == 35


@pytest.mark.parametrize("ways", ["stop", "twice"])
def test_an_end_that_is_not_to_be_gone_on_with_drops_the_token_in_flight(ways: str):
    engine = engine_in_flight()
    engine.add_request("a", T[:30], greedy(50))
    for _ in range(6):
        engine.step()
    if ways == "stop":  # what a stop string ends was handed out already
        engine.abort("a", reason=FinishReason.STOP)
    else:
        engine.abort("a")
        engine.abort("a", reason=FinishReason.STOP)  # too late
    (last,) = run(engine)["a"]
    aborted = ways == "twice"
    assert last.finish_reason is (FinishReason.ABORT if aborted else FinishReason.STOP)
    assert len(last.token_ids) == aborted and not engine.has_work()


def test_an_aborted_answer_whose_last_step_is_lost_ends_with_an_error():
    engine = engine_in_flight()
    engine.add_request("a", T[:30], greedy(50))
    for _ in range(5):
        engine.step()
    engine.runner.lose_next = RuntimeError("lost")
    engine.step()
    engine.abort("a")
    (last,) = run(engine)["a"]
    assert last.finish_reason is FinishReason.ERROR and not engine.has_work()


def test_who_aborts_and_asks_again_under_the_same_name_gets_only_new_tokens():
    engine = engine_in_flight(max_requests=1)
    engine.add_request("a", T[:30], greedy(50))
    engine.step()
    engine.step()
    engine.abort("a")
    engine.add_request("a", T[100:110], greedy(3))
    events = run(engine)["a"]
    assert events[0].finish_reason is FinishReason.ABORT
    assert answer(events[1:]) == expected_answer(T[100:110], 3)


def test_nobody_is_preempted_with_a_token_in_flight(monkeypatch: pytest.MonkeyPatch):
    def preempt(scheduler: Scheduler, running: Running) -> None:
        assert not engine.runner.in_flight
        assert running.request.num_tokens == engine.context.computed_tokens(running) + 1
        really_preempt(scheduler, running)

    really_preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    engine = engine_in_flight(num_blocks=24, max_requests=6)
    for i in range(12):
        engine.add_request(f"r{i}", T[50 * i : 50 * i + 10], greedy(60))
    events = run(engine)
    for i in range(12):
        assert answer(events[f"r{i}"]) == expected_answer(T[50 * i : 50 * i + 10], 60)
    assert engine.stats()["preemptions"] > 0


def test_a_launch_that_fails_spares_the_step_before_it():
    engine = engine_in_flight()
    stop = expected_answer(STOPPED, 10)[-1]
    engine.add_request("ends", T[900:909], greedy(10))
    engine.add_request("stops", STOPPED, greedy(50, stop_token_ids=(stop,)))
    engine.add_request("goes on", T[950:959], greedy(50))
    before = [event for _ in range(10) for event in engine.step()]
    published = engine.stats()["checkpoints_published"]
    engine.runner.fail_next = True
    events = engine.step()
    assert not engine.has_work() and not engine.runner.in_flight
    by_name = {name: [e for e in events if e.request_id == name] for name in ("ends", "stops")}
    assert [e.finish_reason for e in by_name["ends"]] == [FinishReason.LENGTH]
    assert [e.finish_reason for e in by_name["stops"]] == [FinishReason.STOP]
    received, failed = (event for event in events if event.request_id == "goes on")
    assert received.token_ids and not failed.token_ids
    assert failed.finish_reason is FinishReason.ERROR and "made to fail" in (failed.error or "")
    said = tokens_of([e for e in before if e.request_id == "stops"] + by_name["stops"])
    assert said == expected_answer(STOPPED, 10)
    # the failed step may have spoiled the state of the one that stopped
    assert engine.stats()["checkpoints_published"] == published
    engine.check_integrity()
    generate(engine, [T[900:909], STOPPED + said, T[950:959]])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_lost_result_ends_everything_that_runs_and_empties_the_cache(asynchronous: bool):
    engine = engine_in_flight(asynchronous=asynchronous, max_tokens=16)
    generate(engine, [T[:40]])
    engine.add_request("ends", T[100:109], greedy(2))
    engine.step()
    engine.add_request("begins", T[200:300], greedy(5))
    engine.runner.lose_next = RuntimeError("no such luck")
    events = engine.step()
    engine.add_request("new", T[:40], greedy(3))
    while not any(event.request_id == "begins" for event in events):
        events += engine.step()
    last = {event.request_id: event for event in events}
    assert all(last[name].finish_reason is FinishReason.ERROR for name in ("ends", "begins"))
    assert "no such luck" in (last["ends"].error or "")
    assert not engine.context.kv_hash_to_block_id and not engine.context.mamba_hash_to_slot_id
    engine.check_integrity()
    more = run(engine)
    if "new" not in last:  # else it was in the step behind the lost one
        assert answer(more["new"]) == expected_answer(T[:40], 3)
        assert more["new"][-1].cached_tokens == 0
    assert engine.context.cache.occupancy().kv_used == 0
    generate(engine, [T[:40]])


def test_a_device_that_is_lost_during_a_step_is_not_survived():
    engine = engine_in_flight()
    engine.add_request("a", T[:12], greedy(4))
    engine.runner.lose_next = DeviceLostError("gone")
    engine.step()
    with pytest.raises(DeviceLostError):
        engine.step()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_that_is_interrupted_leaves_nothing_to_be_found(asynchronous: bool):
    """What it launched was not published: its states are not what the host takes them for."""
    engine = engine_in_flight(asynchronous=asynchronous)
    engine.add_request("ends", T[100:109], greedy(4))
    engine.add_request("a", T[:30], greedy(50))
    for _ in range(4):
        engine.step()
    engine.add_request("waits", T[:30], greedy(4))
    engine.runner.lose_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            engine.step()
    engine.check_integrity()
    events = run(engine)
    assert events["a"][-1].finish_reason is FinishReason.ERROR
    assert not engine.scheduler.knows("ends")
    if asynchronous:  # it was in a step that was launched
        assert events["waits"][-1].finish_reason is FinishReason.ERROR
    generate(engine, [T[:30] + expected_answer(T[:30], 6)])


def test_a_launch_that_fails_while_the_result_before_it_is_lost_ends_everything():
    engine = engine_in_flight()
    engine.add_request("a", T[:30], greedy(50))
    engine.runner.lose_next = RuntimeError("lost")
    engine.step()
    engine.add_request("b", T[100:109], greedy(50))
    engine.runner.fail_next = True
    events = engine.step()
    assert {e.request_id: e.finish_reason for e in events} == dict.fromkeys(
        "ab", FinishReason.ERROR
    )
    engine.check_integrity()
    assert not engine.has_work()
    generate(engine, [T[:30]])


def test_random_streams_advance_with_the_launch(monkeypatch: pytest.MonkeyPatch):
    engine = engine_in_flight()
    generated: list[int] = []

    def launch(
        runner: SymbolicRunner, plan: StepPlan, agreed: StepDemand | None = None
    ) -> SymbolicLaunch:
        generated.extend(engine.context.rows.generated[plan.sampled_rows].tolist())
        return really_launch(runner, plan, agreed)

    really_launch = SymbolicRunner.launch
    monkeypatch.setattr(SymbolicRunner, "launch", launch)
    engine.add_request("a", T[:12], greedy(6))
    run(engine)
    assert generated == [0, 1, 2, 3, 4, 5]


def test_the_host_knows_no_token_before_it_is_received():
    engine = engine_in_flight()
    engine.add_request("a", T[:12], greedy(6))
    engine.step()
    (running,) = engine.context.running()
    request = running.request
    for count in range(5):
        assert len(request.output) == count
        assert engine.context.computed_tokens(running) == 12 + count
        engine.context.rows.last_token[:] = -7  # no runner needs it
        engine.step()
    assert request.running is None and len(request.output) == 5 and engine.has_work()
    engine.step()
    assert request.output == expected_answer(T[:12], 6)


def test_statistics_count_what_was_launched_and_what_was_received():
    engine = engine_in_flight()
    generate(engine, [T[:12]], max_tokens=1)
    engine.add_request("a", T[100:112], greedy(3))
    shares = []
    while engine.has_work():
        engine.step()
        share = engine.stats()["last_step"]
        names = ("steps", "computed_tokens", "decode_tokens", "generated_tokens")
        shares.append([share[name] for name in names] + [share["requests_finished"]])
    assert shares == [
        [1, 12, 0, 0, {}],
        [1, 0, 1, 1, {}],
        [1, 0, 1, 1, {}],
        [0, 0, 0, 1, {"length": 1}],
    ]


@pytest.mark.parametrize("preserve", [True, False])
def test_a_reset_and_an_idle_step_leave_the_step_in_flight_alone(preserve: bool):
    engine = engine_in_flight(max_tokens=16)
    engine.add_request("a", T[:40], greedy(4))
    events = []
    while engine.has_work():
        events += engine.step()
        before = engine.stats()
        engine.dummy_forward()
        assert engine.stats() == before
        engine.reset(preserve_prefix_cache=preserve)
        engine.check_integrity()
    assert answer(events) == expected_answer(T[:40], 4)
    cached = generate(engine, [T[:40]])[0].cached_tokens
    assert cached == (40 if preserve else 0)


def test_a_prefix_that_a_step_in_flight_leaves_is_found_by_the_next_one():
    """It is computed before whoever reads it, since steps take effect in their order."""
    engine = engine_in_flight()
    engine.add_request("a", T[:40], greedy(1))
    engine.step()
    engine.add_request("b", T[:40] + [3], greedy(1))
    engine.step()
    assert [chunk.start for chunk in engine.runner.plans[-1].prefills] == [40]
    run(engine)


def test_what_is_held_for_a_twin_is_not_given_up_because_a_step_is_in_flight():
    engine = engine_in_flight(max_requests=1)
    engine.add_request("first", T[:40], greedy(3))
    engine.add_request("twin", T[:40], greedy(3))
    events = run(engine)
    assert events["twin"][-1].cached_tokens == 40
    assert np.all(engine.context.rows.decoding == np.False_)
