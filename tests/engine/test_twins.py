"""Who waits for whom, for how long, and what frees them."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.twins import MOST_DEFERRALS
from megatron_hybrid.request import FinishReason, SamplingParams
from tests.engine.symbolic import (
    SymbolicRunner,
    answer,
    expected_answer,
    make_engine,
    random_tokens,
)
from tests.engine.symbolic import run as run_all

T = random_tokens(31, 1000)
U = random_tokens(32, 1000)
pytestmark = pytest.mark.usefixtures("asynchronous")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def small_engine(**options):  # type: ignore[no-untyped-def]
    defaults = {"num_blocks": 300, "max_tokens": 16, "cached_slots": 40, "exact_ends": True}
    return make_engine(**(defaults | options))


def admitted(engine) -> set[str]:  # type: ignore[no-untyped-def]
    return {running.request.request_id for running in engine.context.running()}


def finish(engine, **prompts: list[int]) -> None:  # type: ignore[no-untyped-def]
    events = run_all(engine)
    for name, prompt in prompts.items():
        tokens = answer(events[name])
        assert tokens == expected_answer(prompt, 4)[-len(tokens) :], name


def test_an_identical_prompt_waits_until_the_first_one_is_computed():
    engine = small_engine()
    engine.add_request("first", T[:50], GREEDY)
    engine.add_request("twin", T[:50], GREEDY)
    for _ in range(4):  # 16 tokens a step
        engine.step()
        assert admitted(engine) == {"first"}
    engine.step()
    assert admitted(engine) == {"first", "twin"}
    finish(engine, first=T[:50], twin=T[:50])
    assert engine.stats()["computed_tokens"] == 50


def test_those_behind_a_waiting_twin_are_not_held_up():
    engine = small_engine(max_tokens=40)
    engine.add_request("first", T[:100], GREEDY)
    engine.add_request("twin", T[:100], GREEDY)
    engine.step()
    engine.add_request("other", U[:20], GREEDY)
    for _ in range(2):
        engine.step()
    assert admitted(engine) == {"first", "other"}
    finish(engine, twin=T[:100], other=U[:20])


def test_a_waiting_twin_keeps_its_row_against_later_arrivals():
    engine = small_engine(max_requests=2)
    engine.add_request("first", T[:50], GREEDY)
    engine.add_request("twin", T[:50], GREEDY)
    engine.add_request("other", U[:10], GREEDY)
    engine.step()
    assert admitted(engine) == {"first"}
    finish(engine, first=T[:50], twin=T[:50], other=U[:10])


def test_nobody_waits_for_what_it_could_not_use():
    engine = small_engine(max_tokens=32)
    engine.add_request("first", T[:60], GREEDY)
    engine.step()
    engine.add_request("other salt", T[:60], GREEDY, cache_salt="s")
    engine.add_request("other adapter", T[:60], GREEDY, adapter="a")
    engine.add_request("barely shared", T[:3] + U[:5], GREEDY)
    engine.add_request("own logits", T[:60], SamplingParams(max_tokens=1, prompt_logprobs=0))
    engine.step()
    engine.step()
    assert admitted(engine) >= {"other salt"}
    events = run_all(engine)
    assert engine.stats()["twins_waited"] == 0
    assert events["other adapter"][-1].cached_tokens == 0
    assert events["own logits"][-1].cached_tokens == 0


@pytest.mark.parametrize("end", ["abort", "fail", "preempt"])
def test_the_end_of_the_producer_frees_those_that_wait(end):
    engine = small_engine()
    engine.add_request("first", T[:200], GREEDY)
    engine.add_request("twin", T[:200], GREEDY)
    engine.step()
    engine.step()
    assert admitted(engine) == {"first"}
    if end == "abort":
        engine.abort("first")
    elif end == "fail":
        assert isinstance(engine.runner, SymbolicRunner)
        engine.runner.fail_next = True
        assert [e.finish_reason for e in engine.step()] == [FinishReason.ERROR]
    else:
        (producer,) = engine.context.running()
        engine.preempt(producer)
    engine.step()
    assert admitted(engine) == {"twin"} if end != "preempt" else {"first"}
    finish(engine, twin=T[:200])


def test_a_twin_waits_only_so_long():
    engine = small_engine(max_tokens=8, max_requests=3, max_seq_length=1000)
    engine.add_request("first", T[:900], GREEDY)
    engine.add_request("twin", T[:900], GREEDY)
    for _ in range(MOST_DEFERRALS):
        engine.step()
    assert admitted(engine) == {"first"}
    engine.add_request("short", U[:4], GREEDY)
    for _ in range(20):
        engine.step()
    assert "short" not in admitted(engine)  # ended long ago: nobody was held up for ever
    finish(engine, first=T[:900], twin=T[:900])


def test_what_a_twin_waits_for_is_not_evicted_before_it_was_tried():
    # one cached slot, and a decoding request that takes every block it can get
    engine = small_engine(num_blocks=24, max_tokens=16, cached_slots=1, max_seq_length=96)
    engine.add_request("first", T[:30], SamplingParams(temperature=0.0, max_tokens=1))
    engine.add_request("twin", T[:30], GREEDY)
    run_all(engine)
    assert engine.stats()["computed_tokens"] == 30


def test_a_waiting_twin_that_is_aborted_leaves_nothing_behind():
    engine = small_engine()
    engine.add_request("first", T[:50], GREEDY)
    engine.add_request("twin", T[:50], GREEDY)
    engine.step()
    engine.abort("twin")
    finish(engine, first=T[:50])
    assert not list(engine.scheduler.twins.pins)
    assert engine.context.cache.occupancy().kv_used == 0


def test_a_reset_lets_those_that_wait_compute_for_themselves():
    engine = small_engine()
    engine.add_request("first", T[:100], GREEDY)
    engine.add_request("twin", T[:100], GREEDY)
    engine.step()
    engine.reset()
    engine.step()
    finish(engine, first=T[:100], twin=T[:100])
    assert engine.stats()["computed_tokens"] == 200
