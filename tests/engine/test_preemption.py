"""Out of KV blocks: who makes room, who goes on, and that nothing is lost."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.waiting_queue import STEPS_PER_PRIORITY
from megatron_hybrid.request import SamplingParams
from tests.engine.symbolic import answer, expected_answer, make_engine, random_tokens, run
from tests.thorough import A_THIRD

T = random_tokens(41, 2000)
pytestmark = pytest.mark.usefixtures("asynchronous")


def greedy(max_tokens: int, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompt(i: int, length: int = 10) -> list[int]:
    return T[i * 50 : i * 50 + length]


@A_THIRD
@pytest.mark.parametrize("exact_ends", [True, False])
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
@pytest.mark.parametrize("cached_slots", [1, 6])
def test_requests_that_outgrow_the_cache_all_get_their_answers(exact_ends, kind, cached_slots):
    engine = make_engine(
        num_blocks=24, max_requests=6, exact_ends=exact_ends, recurrent=kind == "hybrid",
        cached_slots=cached_slots,
    )  # fmt: skip
    for i in range(12):
        engine.add_request(f"r{i}", prompt(i), greedy(60))
    events = run(engine)
    for i in range(12):
        assert answer(events[f"r{i}"]) == expected_answer(prompt(i), 60)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["computed_tokens"] + stats["skipped_tokens"] == stats["prompt_tokens"] == 120
    # an answer's tokens are not part of a prompt, even when they are computed as one
    assert stats["recomputed_tokens"] > 0


def test_the_last_one_admitted_makes_room_and_goes_on_where_it_was():
    engine = make_engine(num_blocks=12, max_requests=2, exact_ends=True, max_seq_length=48)
    engine.add_request("first", prompt(0, 8), greedy(24))
    engine.add_request("second", prompt(1, 8), greedy(24))
    events: dict[str, list] = {"first": [], "second": []}
    while engine.stats()["preemptions"] == 0:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
    (waiting,) = engine.scheduler._waiting
    assert waiting.request_id == "second"
    for name, more in run(engine).items():
        events[name] += more
    for i, name in enumerate(events):
        assert answer(events[name]) == expected_answer(prompt(i, 8), 24)
    assert events["second"][-1].counters["preemptions"] >= 1
    assert "preemptions" not in events["first"][-1].counters


def test_with_room_for_its_state_a_preempted_request_computes_next_to_nothing_again():
    engine = make_engine(num_blocks=64, max_requests=2, exact_ends=True)
    engine.add_request("a", prompt(0, 30), greedy(20))
    events = [event for _ in range(8) for event in engine.step()]
    (running,) = engine.context.running()
    engine.preempt(running)
    engine.check_integrity()
    assert answer(events + run(engine)["a"]) == expected_answer(prompt(0, 30), 20)
    stats = engine.stats()
    assert stats["recomputed_tokens"] == 1  # the last token was sampled, but not fed
    assert stats["reskipped_tokens"] == 37 and stats["skipped_tokens"] == 0
    assert stats["checkpoints_read"]["preempted"] == 1


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_prompt_that_is_preempted_half_way_goes_on(steps):
    engine = make_engine(max_tokens=9, exact_ends=True)
    engine.add_request("a", prompt(0, 40), greedy(5, prompt_logprobs=0))
    for _ in range(steps):
        engine.step()
    (running,) = engine.context.running()
    engine.preempt(running)
    events = run(engine)["a"]
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == expected_answer(prompt(0, 40), 5)[-len(tokens) :]
    logprobs = [event.prompt_logprobs for event in events if event.prompt_logprobs]
    if len(tokens) == 5:  # not handed out before
        assert len(logprobs) == 1 and len(logprobs[0]) == 40
    stats = engine.stats()
    assert stats["computed_tokens"] == 40 and stats["skipped_tokens"] == 0


def test_less_important_requests_wait_longer_and_make_room_first():
    engine = make_engine(num_blocks=12, max_requests=2, max_seq_length=48)
    engine.add_request("unimportant", prompt(0, 8), greedy(24), priority=5)
    engine.step()
    engine.add_request("important", prompt(1, 8), greedy(24), priority=-5)
    while engine.stats()["preemptions"] == 0:
        engine.step()
    (waiting,) = engine.scheduler._waiting
    assert waiting.request_id == "unimportant"
    run(engine)


def test_a_smaller_priority_number_runs_first_and_equals_run_in_order():
    engine = make_engine(max_requests=1)
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0)):
        engine.add_request(name, prompt(ord(name) - 90), greedy(2), priority=priority)
    assert list(run(engine)) == ["c", "a", "d", "b"]


def test_who_waits_long_enough_overtakes_more_important_requests():
    engine = make_engine(max_requests=1)
    engine.add_request("patient", prompt(0), greedy(2), priority=1)
    first_step = engine.scheduler._step
    for i in range(2 * STEPS_PER_PRIORITY):
        engine.add_request(f"r{i}", [i % 97, i // 97], greedy(1))
        if any(event.request_id == "patient" for event in engine.step()):
            break
    else:
        raise AssertionError("the patient request starves")
    assert engine.scheduler._step - first_step >= STEPS_PER_PRIORITY
    run(engine)


@pytest.mark.parametrize("priority", [1001, -1001, 0.5, True, "high"])
def test_a_priority_out_of_range_is_refused(priority):
    from megatron_hybrid.errors import InvalidRequestError

    engine = make_engine()
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request("a", prompt(0), greedy(2), priority=priority)
    assert error.value.field == "priority" and not engine.has_work()


def test_a_request_that_fills_the_whole_cache_is_served_whatever_is_cached():
    engine = make_engine(num_blocks=16, max_seq_length=65, exact_ends=True)
    for i in range(4):
        engine.add_request(f"small {i}", prompt(0, 10 + i), greedy(3))
    run(engine)
    engine.add_request("large", prompt(0, 13) + prompt(3, 40), greedy(12))
    assert answer(run(engine)["large"]) == expected_answer(prompt(0, 13) + prompt(3, 40), 12)
