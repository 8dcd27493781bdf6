"""Sleeping engines on a runner that forgets what was in the memory that was given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hybrid.engine.sleep import TAGS
from megatron_hybrid.errors import InvalidRequestError, SleepError, WeightsError
from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from tests.engine.symbolic import (
    CheckedEngine,
    SymbolicRunner,
    answer,
    expected_answer,
    generate,
    make_engine,
    random_tokens,
    run,
)
from tests.thorough import A_THIRD

T = random_tokens(83, 1000)


class Memory:
    """An arena of which nothing is there but what was in it."""

    device = torch.device("cpu")
    nbytes = 10

    def __init__(self, runner: SymbolicRunner | None = None) -> None:
        self.runner = runner
        self.is_released = False
        self.kept: list[bool] = []
        self.has_room = True

    def release(self, *, keep: bool) -> None:
        if self.is_released:
            return
        self.is_released = True
        self.kept.append(keep)
        if self.runner is not None:
            assert not self.runner.in_flight, "a step may read what goes"
            for memory in (self.runner._kv, self.runner._states, self.runner._logits):
                memory.clear()
                memory._written.clear()
            self.runner._states.put(0, 0)
            self.runner._rings.clear()

    def restore(self) -> None:
        if not self.has_room:
            raise MemoryError("cuMemCreate failed: out of memory (2).")
        self.is_released = False


def sleepy(engine: CheckedEngine) -> CheckedEngine:
    weights, caches = Memory(), Memory(engine.runner)
    model = SimpleNamespace(arena=weights, adapters=None)
    engine.sleeper.use(model, caches, lambda value: value)  # type: ignore[arg-type]
    return engine


def memory_of(engine: CheckedEngine, tag: str) -> Memory:
    return engine.sleeper._arenas[tag]  # type: ignore[return-value]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompt(number: int, length: int = 18) -> list[int]:
    return T[30 * number : 30 * number + length]


def with_two_running(
    steps: int = 6, **options
) -> tuple[CheckedEngine, dict[str, list[RequestEvent]]]:  # type: ignore[no-untyped-def]
    """Requests 0 and 1 run, 2 waits."""
    engine = sleepy(make_engine(**({"max_requests": 2, "exact_ends": True} | options)))
    for number in range(3):
        engine.add_request(f"{number}", prompt(number), greedy(20))
    events: dict[str, list[RequestEvent]] = {}
    for _ in range(steps):
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert engine.scheduler.num_running == 2
    return engine, events


pytestmark = pytest.mark.usefixtures("asynchronous")


@pytest.mark.parametrize("paused", [False, True])
def test_answers_that_have_begun_go_on_after_waking(paused: bool):
    engine, events = with_two_running()
    if paused:
        engine.pause("keep")
    engine.sleep()
    assert engine.sleeping == list(TAGS) and engine.is_paused
    engine.check_integrity()
    engine.add_request("late", prompt(4), greedy(3))
    kv, states = engine.context.cache.kv, engine.context.cache.states
    assert kv.num_free == kv.num_blocks and states.num_free == states.num_slots
    for name, more in run(engine).items():  # tokens that were in flight
        events.setdefault(name, []).extend(more)
    assert not engine.has_work() and engine.is_quiet
    engine.runner.capture_next = lambda: pytest.fail("what has no memory is captured")  # type: ignore[method-assign,return-value]
    assert not engine.use_idle_time()
    del engine.runner.capture_next
    for call in (engine.step, engine.dummy_forward):
        with pytest.raises(SleepError, match=r"sleeps \(weights, kv_cache\): wake it up first"):
            call()
    engine.wake_up()
    assert engine.sleeping == [] and engine.is_paused is paused
    if paused:
        assert not engine.has_work()
        engine.resume()
    for name, more in run(engine).items():
        events.setdefault(name, []).extend(more)
    for number in range(3):
        assert answer(events[f"{number}"]) == expected_answer(prompt(number), 20)
    assert answer(events["late"]) == expected_answer(prompt(4), 3)
    assert engine.stats()["preemptions"] == 2


def test_a_request_that_ends_while_the_engine_sleeps_is_told_of():
    engine, _ = with_two_running()
    engine.sleep()
    run(engine)
    engine.abort("0")
    engine.abort("2")
    ends = run(engine)
    assert {name: one[-1].finish_reason for name, one in ends.items()} == {
        "0": FinishReason.ABORT,
        "2": FinishReason.ABORT,
    }
    engine.pause("abort")
    assert run(engine)["1"][-1].finish_reason is FinishReason.ABORT
    engine.wake_up()
    engine.resume()
    assert not engine.has_work()


def test_one_tag_at_a_time_in_any_order_and_twice_is_once():
    for order in (TAGS, TAGS[::-1]):
        engine, _ = with_two_running()
        engine.sleep(order[:1])
        engine.sleep(order[:1], keep_weights=False)
        assert engine.sleeping == [order[0]]
        assert engine.stats()["sleeping_bytes"] == 10
        engine.sleep(order)
        assert engine.sleeping == list(TAGS) and memory_of(engine, "weights").kept == [True]
        for tag in order:
            assert tag in engine.sleeping
            engine.wake_up([tag])
            engine.wake_up([tag])
        assert engine.sleeping == [] and not engine.sleeper.weights_are_missing
        engine.wake_up()
        ends = run(engine)
        assert set(ends) == {"0", "1", "2"}


def test_with_the_caches_awake_running_requests_keep_what_they_have():
    engine, events = with_two_running()
    engine.sleep(["weights"])
    assert engine.scheduler.num_running == 2
    for name, more in run(engine).items():
        events.setdefault(name, []).extend(more)
    engine.wake_up()
    for name, more in run(engine).items():
        events.setdefault(name, []).extend(more)
    assert answer(events["0"]) == expected_answer(prompt(0), 20)
    assert engine.stats()["preemptions"] == 0


@A_THIRD
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", range(3, 12))
def test_states_that_were_to_be_written_later_are_forgotten(steps: int, packed: bool):
    """Of an answer that ends while the engine goes to sleep; the coming step would write them."""
    engine = sleepy(make_engine(exact_ends=True, packed=packed, write_interval=5))
    stop = expected_answer(prompt(0), 7)[-1]
    params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(stop,))
    engine.add_request("short", prompt(0), params)
    engine.add_request("long", prompt(1), greedy(40))
    for _ in range(steps):
        engine.step()
    engine.sleep()
    assert not engine.scheduler.decodes.owes_states
    engine.wake_up()
    assert answer(run(engine)["long"])[-5:] == expected_answer(prompt(1), 40)[-5:]


def test_weights_that_were_given_up_have_to_come_again():
    engine, _ = with_two_running()
    engine.sleep(keep_weights=False)
    assert memory_of(engine, "weights").kept == [False]
    run(engine)
    engine.wake_up()
    assert engine.sleeper.weights_are_missing and engine.is_paused and not engine.has_work()
    for call in (engine.step, engine.dummy_forward):
        with pytest.raises(SleepError, match="given up .*: update them"):
            call()
    engine.update_weights(frozenset({"a", "b"}), "v1")  # which are left out
    assert engine.sleeper.weights_are_missing
    engine.update_weights(frozenset({"c", "b"}), "v1")
    assert engine.sleeper.weights_are_missing
    engine.update_weights(frozenset({"c", "a"}), "v1")
    assert not engine.is_paused and not engine.sleeper.weights_are_missing
    assert set(run(engine)) == {"0", "1", "2"}


def test_what_does_not_fit_the_device_sleeps_on_and_can_be_tried_again():
    engine, events = with_two_running()
    engine.sleep()
    memory_of(engine, "kv_cache").has_room = False
    with pytest.raises(SleepError, match=r"no 0.0 GB left for kv_cache \(cuMemCreate failed"):
        engine.wake_up()
    assert engine.sleeping == ["kv_cache"]
    memory_of(engine, "kv_cache").has_room = True
    engine.wake_up()
    for name, more in run(engine).items():
        events.setdefault(name, []).extend(more)
    assert answer(events["1"]) == expected_answer(prompt(1), 20)


def test_a_rank_that_came_back_sleeps_on_with_another_one_that_did_not():
    engine, _ = with_two_running()
    agreed: list[int] = []
    engine.sleeper._minimum = lambda value: min(value, agreed.pop(0))
    agreed += [1]
    engine.sleep()
    agreed += [0]
    with pytest.raises(SleepError, match="another rank has too little"):
        engine.wake_up(["weights"])
    weights = memory_of(engine, "weights")
    assert engine.sleeping == list(TAGS) and weights.kept == [True, True]
    agreed += [1, 1]
    engine.wake_up()
    assert engine.sleeping == []


def test_wrong_calls_are_refused():
    engine = make_engine()
    with pytest.raises(SleepError, match="--enable-sleep-mode"):
        engine.sleep()
    sleepy(engine)
    for call in (engine.sleep, engine.wake_up):
        with pytest.raises(InvalidRequestError, match="tags has 'kv'; it can have weights and kv_"):
            call(["weights", "kv"])
    engine.weights.begin()
    with pytest.raises(SleepError, match="being updated"):
        engine.sleep()
    assert engine.sleeping == []
    with pytest.raises(WeightsError):
        engine.step()


def test_a_host_without_room_for_the_weights_is_told_before(monkeypatch: pytest.MonkeyPatch):
    engine, _ = with_two_running()
    weights = memory_of(engine, "weights")
    weights.device, weights.nbytes = torch.device("cuda"), 3 << 30  # type: ignore[misc]
    monkeypatch.setattr("megatron_hybrid.engine.sleep.available_memory", lambda: 2 << 30)
    with pytest.raises(SleepError, match=r"weights take 3.0 GB, and 2.0 GB of the host's memory"):
        engine.sleep()
    assert engine.sleeping == [] and engine.scheduler.num_running == 2


@pytest.mark.parametrize("slowest", [1, 5])
def test_prefixes_in_host_memory_outlive_the_devices(slowest: int):
    engine = sleepy(make_engine(host_pages=600, slowest_copy=slowest, exact_ends=True))
    text = random_tokens(3, 60)
    generate(engine, [text], 4)
    while engine.use_idle_time():
        pass
    longer = text + expected_answer(text, 4) + [5, 6]
    engine.add_request("now", random_tokens(4, 40), greedy(30))
    for _ in range(4):  # with copies under way
        engine.step()
    engine.sleep()
    engine.wake_up()
    engine.check_integrity()
    (event,) = generate(engine, [longer], 4)
    assert event.cached_tokens >= 60
    run(engine)
    engine.sleep(keep_weights=False)
    engine.wake_up()
    engine.update_weights("/a/folder")
    (event,) = generate(engine, [longer], 4)
    assert event.cached_tokens == 0, "it was computed with other weights"
