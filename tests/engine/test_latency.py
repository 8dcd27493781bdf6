"""What the engine's clock is read for: latencies of requests, and ages of what is cached."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.engine.latency import SECONDS, TOKEN_SECONDS, Histogram, StepTimes
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from tests.engine.symbolic import CheckedEngine, expected_answer, make_engine, random_tokens

T = random_tokens(7, 400)
STOPPED = next(
    T[start : start + 30]
    for start in range(0, 300, 10)
    if expected_answer(T[start : start + 30], 4)[-1]
    not in expected_answer(T[start : start + 30], 3)
)


class ManualClock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine_at(clock: ManualClock, **options) -> CheckedEngine:  # type: ignore[no-untyped-def]
    return make_engine(clock=clock, **options)


def greedy(max_tokens: int, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def run(engine: CheckedEngine, clock: ManualClock, seconds: float = 1.0) -> list[RequestEvent]:
    """Step until there is no work; the clock moves before each step."""
    events = []
    while engine.has_work():
        clock.now += seconds
        events += engine.step()
    return events


def sum_and_count(engine: CheckedEngine, name: str) -> tuple[float, int]:
    figures = engine.stats()["latency"][name]
    return figures["sum"], figures["count"]


# ------------------------------------------------------------- histograms


def test_buckets_are_cumulative_and_a_bound_belongs_to_its_bucket():
    histogram = Histogram((1, 2, 4))
    histogram.observe(1)
    histogram.observe_all(np.array([1.5, 2.0, 3.0, 9.0]))
    figures = histogram.as_dict()
    assert figures["buckets"] == [[1.0, 1], [2.0, 3], [4.0, 4]]
    assert figures["count"] == 5 and figures["sum"] == 16.5


def test_one_by_one_and_all_at_once_count_the_same():
    values = np.random.default_rng(3).exponential(0.02, 5000)
    values[:20] = TOKEN_SECONDS[:20]
    together, alone = Histogram(TOKEN_SECONDS), Histogram(TOKEN_SECONDS)
    together.observe_all(values)
    for value in values:
        alone.observe(float(value))
    assert together.as_dict()["buckets"] == alone.as_dict()["buckets"]
    assert together.sum == pytest.approx(alone.sum)
    for bound, count in together.as_dict()["buckets"]:
        assert count == (values <= bound).sum()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 0.999])
def test_a_quantile_stands_in_the_bucket_of_the_true_one(share: float):
    values = np.sort(np.random.default_rng(4).exponential(0.1, 4001))
    histogram = Histogram(SECONDS)
    histogram.observe_all(values)
    true = float(np.quantile(values, share))
    place = int(np.searchsorted(SECONDS, true))
    low = SECONDS[place - 1] if place else 0.0
    assert low <= histogram.quantile(share) <= SECONDS[place]


def test_quantiles_of_nothing_are_none_and_beyond_all_bounds_the_largest():
    histogram = Histogram((1, 2))
    assert histogram.quantile(0.5) is None
    histogram.observe(100)
    assert histogram.quantile(0.5) == 2.0


# -------------------------------------------------------------- latencies


@pytest.mark.usefixtures("asynchronous")
def test_the_parts_of_a_requests_life_are_measured(asynchronous: bool):
    clock = ManualClock()
    engine = engine_at(clock, max_requests=1)
    engine.add_request("a", T[:30], greedy(4), arrived=clock.now - 7)
    engine.add_request("b", T[40:50], greedy(1))
    run(engine, clock)
    # a is admitted in the first step; an asynchronous engine has a step's tokens one step later
    late = int(asynchronous)
    first, ended = 1 + late, 4 + late
    freed = 5  # b gets the row in the step after the last one of a
    assert sum_and_count(engine, "request_queue_time_seconds") == (7 + 1 + freed, 2)
    assert sum_and_count(engine, "request_prefill_time_seconds") == (2 * late, 2)
    firsts = 7 + first + freed + late
    assert sum_and_count(engine, "time_to_first_token_seconds") == (firsts, 2)
    assert sum_and_count(engine, "inter_token_latency_seconds") == (3, 3)
    assert sum_and_count(engine, "e2e_request_latency_seconds") == (7 + ended + freed + late, 2)
    assert engine.stats()["iteration_tokens"]["count"] == 5
    assert engine.stats()["iteration_tokens"]["sum"] == 30 + 3 + 10


@pytest.mark.usefixtures("asynchronous")
def test_the_first_token_says_how_long_it_took(asynchronous: bool):
    clock = ManualClock()
    engine = engine_at(clock, max_requests=2)
    engine.add_request("a", T[:30], greedy(3, n=2), arrived=clock.now - 7)
    events = run(engine, clock)
    for index in (0, 1):
        first, second, last = [event for event in events if event.index == index]
        queued = 8 + index  # a step later than the twin that computes the prompt
        assert (first.queue_seconds, first.prefill_seconds) == (queued, int(asynchronous))
        assert (second.queue_seconds, second.prefill_seconds) == (None, None)
        assert (last.queue_seconds, last.prefill_seconds) == (queued, None)


def test_a_request_without_an_arrival_arrives_when_it_is_submitted():
    clock = ManualClock()
    engine = engine_at(clock)
    clock.now += 3
    engine.add_request("a", T[:10], greedy(1))
    run(engine, clock)
    assert sum_and_count(engine, "e2e_request_latency_seconds") == (1, 1)


@pytest.mark.usefixtures("asynchronous")
def test_rows_of_a_step_have_times_of_their_own(asynchronous: bool):
    clock = ManualClock()
    engine = engine_at(clock)
    engine.add_request("a", T[:10], greedy(6))
    gaps = iter([1, 1, 10, 100, 1000, 0, 0, 0])
    while engine.has_work():
        clock.now += next(gaps)
        engine.step()
        if engine.statistics.totals["steps"] == 2 and not engine.scheduler.knows("b"):
            engine.add_request("b", T[20:30], greedy(3))
    tokens = engine.stats()["latency"]["inter_token_latency_seconds"]
    assert tokens["count"] == 5 + 2
    if asynchronous:  # a token comes with the step after its own
        assert tokens["sum"] == (10 + 100 + 1000) + 1000
    else:
        assert tokens["sum"] == (1 + 10 + 100 + 1000) + (100 + 1000)


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("hits", [False, True])
def test_a_preempted_answer_goes_on_from_the_time_of_its_last_token(hits: bool):
    clock = ManualClock()
    engine = engine_at(clock, prefix_caching=hits, exact_ends=hits, max_requests=1)
    engine.add_request("a", T[:30], greedy(5), arrived=clock.now)
    while engine.stats()["generated_tokens"] < 2:
        clock.now += 1
        engine.step()
    (running,) = engine.context.running()
    engine.preempt(running)
    # somebody else has its row meanwhile
    engine.add_request("b", T[60:70], greedy(2), priority=-10)
    while engine.scheduler.knows("b"):
        clock.now += 1
        engine.step()
    clock.now += 50
    run(engine, clock)
    figures = engine.stats()["latency"]
    assert figures["time_to_first_token_seconds"]["count"] == 2
    assert figures["request_queue_time_seconds"]["count"] == 2
    assert figures["inter_token_latency_seconds"]["count"] == 4 + 1
    # all time after a first token is between tokens: none of it is lost or counted twice
    between = figures["inter_token_latency_seconds"]["sum"]
    assert between > 50
    ends, firsts = "e2e_request_latency_seconds", "time_to_first_token_seconds"
    assert between == figures[ends]["sum"] - figures[firsts]["sum"]


def test_dropped_tokens_are_not_observed():
    """The token behind a stop is computed with another row's, and dropped."""
    clock = ManualClock()
    engine = engine_at(clock, asynchronous=True)
    stop = expected_answer(STOPPED, 4)[-1]
    engine.add_request("a", STOPPED, greedy(20, stop_token_ids=(stop,)))
    engine.add_request("b", T[100:110], greedy(9))
    run(engine, clock)
    figures = engine.stats()
    assert figures["generated_tokens"] == 4 + 9
    assert figures["latency"]["inter_token_latency_seconds"]["count"] == 3 + 8
    assert figures["latency"]["inter_token_latency_seconds"]["sum"] == 3 + 8


@pytest.mark.usefixtures("asynchronous")
def test_each_answer_counts_and_so_does_each_end():
    clock = ManualClock()
    engine = engine_at(clock, max_requests=4)
    engine.add_request("a", T[:10], greedy(3, n=3))
    engine.add_request("b", T[50:60], greedy(30))
    engine.add_request("c", T[50:60], greedy(30))
    clock.now += 1
    engine.step()
    engine.abort("b", reason=FinishReason.STOP)  # a stop string, which the front end has seen
    engine.abort("c")  # still waits, or has just begun
    run(engine, clock)
    figures = engine.stats()
    assert figures["requests_finished"] == {"length": 3, "stop": 1, "abort": 1}
    assert figures["latency"]["e2e_request_latency_seconds"]["count"] == 5


def test_a_failed_step_ends_its_requests_with_an_error_that_is_counted():
    clock = ManualClock()
    engine = engine_at(clock)
    engine.add_request("a", T[:10], greedy(3))
    engine.runner.fail_next = True
    run(engine, clock)
    assert engine.stats()["requests_finished"] == {"error": 1}
    assert sum_and_count(engine, "e2e_request_latency_seconds") == (1, 1)
    assert engine.stats()["iteration_tokens"]["count"] == 0


# ------------------------------------------------------------------- ages


def ages(counts: list[list[object]]) -> list[object]:
    assert [label for label, _ in counts] == ["<10 s", "<1 min", "<10 min", "<1 h", "older"]
    return [number for _, number in counts]


def test_steps_are_counted_by_how_long_ago_they_ran():
    times = StepTimes()
    for step in range(8000):  # a step a second
        times.note(step, float(step))
    counts = ages(times.count_by_age(np.arange(8000), 7999.0))
    assert counts == [10, 50, 540, 3000, 4400]


def test_quick_steps_are_told_apart_to_a_second():
    times = StepTimes()
    for step in range(100_000):  # 1000 a second
        times.note(step, step / 1000)
    counts = ages(times.count_by_age(np.arange(100_000), 100.0))
    assert sum(counts) == 100_000
    assert abs(counts[0] - 10_000) <= 1000 and abs(counts[1] - 50_000) <= 1000
    assert len(times._times) <= 101


def test_steps_before_a_long_rest_are_as_old_as_the_rest():
    times = StepTimes()
    times.note(0, 0.0)
    times.note(1, 0.5)  # not noted: less than a second after the one before
    assert ages(times.count_by_age(np.array([0, 1]), 700.0)) == [0, 0, 0, 2, 0]
    times.note(2, 700.0)
    assert ages(times.count_by_age(np.array([0, 1, 2]), 705.0)) == [1, 0, 0, 2, 0]


def test_before_the_first_step_nothing_has_an_age():
    assert ages(StepTimes().count_by_age(np.array([], dtype=np.int64), 5.0)) == [0] * 5


@pytest.mark.parametrize("recurrent", [False, True])
def test_what_is_cached_grows_old_and_young_again_when_it_is_used(recurrent: bool):
    clock = ManualClock()
    engine = engine_at(clock, recurrent=recurrent, exact_ends=True)
    for number in range(2):
        engine.add_request(f"{number}", T[100 * number : 100 * number + 40], greedy(2))
        run(engine, clock)
        clock.now += 100
    figures = engine.stats()
    kv, states = ages(figures["kv_cached_by_age"]), ages(figures["state_cached_by_age"])
    assert sum(kv) == figures["kv_evictable"] and kv[2] == sum(kv) > 0
    assert sum(states) == figures["state_cached"] and states[2] == sum(states) > 0
    clock.now += 3000
    engine.add_request("again", T[:40], greedy(2))
    run(engine, clock)
    figures = engine.stats()
    kv, states = ages(figures["kv_cached_by_age"]), ages(figures["state_cached_by_age"])
    assert kv[0] >= 10 and kv[3] >= 10 and kv[0] + kv[3] == figures["kv_evictable"]
    assert states[0] >= 1 and states[3] >= 1


@pytest.mark.parametrize("recurrent", [False, True])
def test_free_used_and_cached_are_everything_at_every_step(recurrent: bool):
    clock = ManualClock()
    engine = engine_at(clock, recurrent=recurrent, exact_ends=True, num_blocks=40)
    for number in range(6):
        start = 20 * (number // 2)
        engine.add_request(f"{number}", T[start : start + 50], greedy(8))
    while engine.has_work():
        clock.now += 5
        engine.step()
        s = engine.stats()
        cached = sum(ages(s["kv_cached_by_age"]))
        assert s["kv_free"] + s["kv_used"] + cached == s["kv_blocks"]
        kept = sum(ages(s["state_cached_by_age"]))
        assert kept == s["state_cached"]
        assert s["state_free"] + s["state_live"] + kept == s["state_slots"]
