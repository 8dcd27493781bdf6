"""What a step holds, who waits, and how requests end."""

from __future__ import annotations

import pytest

from megatron_hybrid.errors import DeviceLostError, InvalidRequestError
from megatron_hybrid.request import FinishReason, SamplingParams
from tests.engine.symbolic import (
    SymbolicRunner,
    answer,
    expected_answer,
    generate,
    make_engine,
    random_tokens,
    run,
)

T = random_tokens(11, 500)
pytestmark = pytest.mark.usefixtures("asynchronous")


def greedy(max_tokens: int | None = 4, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    options.setdefault("ignore_eos", True)
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def plans(engine):  # type: ignore[no-untyped-def]
    assert isinstance(engine.runner, SymbolicRunner)
    return engine.runner.plans


def chunks(engine) -> list[list[tuple[int, int]]]:  # type: ignore[no-untyped-def]
    return [[(c.start, c.end) for c in plan.prefills] for plan in plans(engine)]


def test_a_step_holds_decodes_and_several_prefill_chunks():
    engine = make_engine(max_tokens=32)
    engine.add_request("a", T[:5], greedy(9))
    engine.step()
    for i, name in enumerate("bc"):
        engine.add_request(name, T[100 + i * 50 : 107 + i * 50], greedy())
    engine.step()
    plan = plans(engine)[-1]
    assert len(plan.decode_rows) == 1 and [c.length for c in plan.prefills] == [7, 7]


def test_a_long_prompt_is_cut_on_the_grid_and_uses_the_whole_budget():
    engine = make_engine(max_tokens=10, kernel_chunk=4)
    generate(engine, [T[:27]], max_tokens=1)
    assert chunks(engine) == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 27)]]


def test_a_budget_smaller_than_the_grid_still_makes_progress():
    engine = make_engine(max_tokens=5, kernel_chunk=16, max_requests=2)
    generate(engine, [T[:40]], max_tokens=1)
    assert chunks(engine)[0] == [(0, 5)]
    assert engine.stats()["checkpoints_published"] == {"last_aligned": 1}
    assert generate(engine, [T[:40]])[0].cached_tokens == 32


@pytest.mark.parametrize("length", range(30, 50))
def test_chunk_end_on_the_grid_is_captured(length):
    engine = make_engine(max_tokens=8, kernel_chunk=8)
    generate(engine, [T[:length]])
    cached = generate(engine, [T[: length + 1]])[0].cached_tokens
    assert cached == length // 8 * 8


def test_break_mode_ends_chunks_at_checkpoints_and_extract_mode_does_not():
    for mode, expected in (("extract", [[(0, 27)]]), ("break", [[(0, 24)], [(24, 27)]])):
        engine = make_engine(mode=mode)
        generate(engine, [T[:27]], max_tokens=1)
        assert chunks(engine) == expected


def test_a_cached_prefix_longer_than_the_budget_is_skipped_in_one_step():
    engine = make_engine(max_tokens=8, num_blocks=100)
    generate(engine, [T[:200]])
    first = len(plans(engine))
    assert generate(engine, [T[:203]], max_tokens=1)[0].cached_tokens == 200
    assert len(plans(engine)) == first + 1


def test_prefills_continue_in_order_before_anyone_is_admitted():
    engine = make_engine(max_tokens=16, num_blocks=100)
    engine.add_request("long", T[:40], greedy(2))
    engine.add_request("short", T[300:305], greedy(2))
    run(engine)
    starts = [[(c.owner.request_id, c.start) for c in plan.prefills] for plan in plans(engine)]
    assert starts[0] == [("long", 0)] and starts[1] == [("long", 16)]
    assert starts[2] == [("long", 32), ("short", 0)]


def test_requests_wait_for_rows_and_run_in_order():
    engine = make_engine(max_requests=2)
    for i in range(5):
        engine.add_request(f"r{i}", T[i * 20 : i * 20 + 10], greedy())
    engine.step()
    stats = engine.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (2, 3)
    assert list(run(engine)) == [f"r{i}" for i in range(5)]
    stats = engine.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (0, 0)


def test_a_request_waits_until_its_prompt_and_a_block_for_each_that_runs_have_room():
    engine = make_engine(num_blocks=9, max_seq_length=64)
    engine.add_request("a", T[:16], greedy(9))  # 4 blocks, 6 at its end
    engine.add_request("b", T[100:120], greedy(9))  # 5 blocks, and one to spare for a: too many
    engine.step()
    assert engine.stats()["requests_waiting"] == 1
    events = run(engine)
    assert answer(events["b"]) == expected_answer(T[100:120], 9)
    assert engine.stats()["preemptions"] == 0


def test_a_request_that_can_never_fit_is_refused_when_it_arrives():
    engine = make_engine(num_blocks=10, max_seq_length=64)
    with pytest.raises(InvalidRequestError, match="buffer-size-gb") as error:
        engine.add_request("a", T[:30], greedy(20))
    assert error.value.field == "max_tokens"
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request("a", T[:50], greedy(2))
    assert error.value.field == "prompt"
    assert not engine.has_work()


def test_the_exact_capacity_is_accepted_and_served():
    engine = make_engine(num_blocks=10, max_seq_length=64)
    engine.add_request("a", T[:30], greedy(11))
    assert answer(run(engine)["a"]) == expected_answer(T[:30], 11)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([1, 97], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1] * 250, {"max_tokens": 7}, "max_tokens"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"prompt_logprobs_start": 1, "prompt_logprobs": 0}, "prompt_logprobs_start"),
        ([1, 2], {"prompt_logprobs_start": 1}, "prompt_logprobs_start"),
        ([1], {"max_tokens": True}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"min_p": 2}, "min_p"),
        ([1], {"seed": "x"}, "seed"),
        ([1], {"stop": ("",)}, "stop"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([1], {"logprobs": 21}, "logprobs"),
        ([1], {"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_bad_requests_are_refused_by_field_and_the_next_one_is_served(prompt, params, field):
    engine = make_engine()
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert error.value.field == field and field in str(error.value)
    assert not engine.has_work()
    generate(engine, [T[:9]])


def test_a_request_id_in_use_is_refused():
    engine = make_engine()
    engine.add_request("a", T[:9], greedy())
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        engine.add_request("a", T[:9], greedy())
    run(engine)
    engine.add_request("a", T[:9], greedy())
    run(engine)


def test_stop_ids_end_a_request_with_the_id_as_its_last_token():
    expected = expected_answer(T[:9], 8)
    stop = expected[3]
    engine = make_engine()
    engine.add_request("a", T[:9], greedy(8, stop_token_ids=(stop,)))
    events = run(engine)["a"]
    assert answer(events) == expected[: expected.index(stop) + 1]
    assert events[-1].finish_reason is FinishReason.STOP and events[-1].stop_token_id == stop


def test_the_models_eos_ends_a_request_unless_it_is_ignored():
    expected = expected_answer(T[:9], 8)
    engine = make_engine(eos=(expected[2], 96))
    engine.add_request("a", T[:9], greedy(8, ignore_eos=False))
    engine.add_request("b", T[:9], greedy(8, ignore_eos=True))
    events = run(engine)
    assert answer(events["a"]) == expected[: expected.index(expected[2]) + 1]
    assert answer(events["b"]) == expected


def test_without_max_tokens_an_answer_fills_the_context():
    engine = make_engine(max_seq_length=50)
    engine.add_request("a", T[:9], greedy(None))
    assert len(answer(run(engine)["a"])) == 41


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_aborting_at_any_point_gives_one_last_event_and_frees_everything(steps):
    engine = make_engine(max_tokens=16, max_requests=1)
    engine.add_request("a", T[:40], greedy(9))
    engine.add_request("b", T[:40], greedy(2))
    events = [event for _ in range(steps) for event in engine.step()]
    engine.abort("a")
    engine.abort("nobody")
    for more in run(engine).values():
        events += more
    of_a = [event for event in events if event.request_id == "a"]
    assert answer(of_a) == expected_answer(T[:40], len(answer(of_a)))
    assert of_a[-1].finish_reason is FinishReason.ABORT
    assert answer([e for e in events if e.request_id == "b"]) == expected_answer(T[:40], 2)
    use = engine.context.cache.occupancy()
    assert use.kv_used == use.state_used == 0


def test_a_failing_step_ends_its_requests_with_the_reason_and_publishes_nothing():
    engine = make_engine(max_tokens=16)
    engine.add_request("a", T[:12], greedy(9))
    engine.step()
    engine.add_request("b", T[100:112], greedy(9))
    published = dict(engine.context.kv_hash_to_block_id)
    assert isinstance(engine.runner, SymbolicRunner)
    engine.runner.fail_next = True
    events = engine.step()
    last = {event.request_id: event for event in events}
    assert last.keys() == {"a", "b"}
    assert all(event.finish_reason is FinishReason.ERROR for event in last.values())
    assert all("the step was made to fail" in (event.error or "") for event in last.values())
    assert engine.context.kv_hash_to_block_id == published
    engine.check_integrity()
    generate(engine, [T[:12], T[100:112]])


def test_a_lost_device_is_not_survived():
    engine = make_engine()

    def launch(plan, agreed=None):  # type: ignore[no-untyped-def]
        raise DeviceLostError("gone")

    engine.runner.launch = launch  # type: ignore[method-assign]
    engine.add_request("a", T[:12], greedy())
    with pytest.raises(DeviceLostError):
        engine.step()


def test_every_token_comes_with_its_logprob_and_to_whom_wants_one():
    engine = make_engine(max_requests=2)
    for i in range(6):  # the rows change hands
        engine.add_request(f"r{i}", T[20 * i :][:9], greedy(3 + i, logprobs=0 if i % 2 else None))
    for i, events in enumerate(run(engine).values()):
        found = [entry.token_id for event in events for entry in event.logprobs or ()]
        assert found == (answer(events) if i % 2 else [])


def test_prompt_logprobs_come_once_with_the_first_token():
    engine = make_engine(max_tokens=16)
    engine.add_request("a", T[:40], greedy(3, prompt_logprobs=0))
    events = run(engine)["a"]
    first = events[0].prompt_logprobs
    assert first is not None and first[0] is None and len(first) == 40
    assert [e.token_id for e in first[1:]] == T[1:40]
    assert all(event.prompt_logprobs is None for event in events[1:])


def test_computed_and_skipped_tokens_add_up_to_the_prompts():
    engine = make_engine(num_blocks=200, max_tokens=40)
    for _ in range(3):
        generate(engine, [T[:50], T[:80], T[:33] + T[200:220]])
    stats = engine.stats()
    assert stats["computed_tokens"] + stats["skipped_tokens"] == stats["prompt_tokens"] == 3 * 183
    assert stats["matched_tokens"] == stats["skipped_tokens"] + sum(stats["lost_tokens"].values())
    assert stats["generated_tokens"] == 36
    assert stats["requests_finished"] == {"length": 9}
    line = engine.statistics.log_line()
    assert f"computed {stats['computed_tokens']}, skipped {stats['skipped_tokens']} (" in line
    assert "prefix cache util: KV" in line and "evictable), mamba" in line


def test_resetting_empties_the_cache_and_preserving_keeps_it():
    engine = make_engine()
    generate(engine, [T[:40]])
    engine.reset(preserve_prefix_cache=True)
    assert generate(engine, [T[:41]])[0].cached_tokens == 40
    engine.reset()
    assert generate(engine, [T[:41]])[0].cached_tokens == 0


def test_a_request_that_waited_while_the_weights_changed_uses_the_new_epoch():
    engine = make_engine(max_requests=1)
    generate(engine, [T[:40]])
    engine.add_request("first", T[200:210], greedy(2))
    engine.add_request("waits", T[:40], greedy(2))
    engine.step()  # "waits" has been matched by now
    engine.context.match(next(iter(engine.scheduler._waiting)))
    engine.context.cache.set_epoch(1)
    assert run(engine)["waits"][-1].cached_tokens == 0
    engine.add_request("again", T[:40], greedy(2))
    assert run(engine)["again"][-1].cached_tokens == 36


def test_without_chunking_a_prompt_runs_whole_or_waits():
    engine = make_engine(recurrent=False, max_tokens=20)
    engine.scheduler._chunked_prefill = engine.incoming._chunked_prefill = False
    with pytest.raises(InvalidRequestError, match="chunked-prefill"):
        engine.add_request("a", T[:21], greedy())
    engine.add_request("a", T[:15], greedy())
    engine.add_request("b", T[50:65], greedy())
    events = run(engine)
    assert answer(events["b"]) == expected_answer(T[50:65], 4)
    assert all(len(c) <= 1 for c in chunks(engine))
