"""Log-probabilities of the end of a prompt: what is skipped before it, which chunks compute them,
and that a request may want nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hybrid.request import FinishReason, RequestEvent, SamplingParams
from megatron_hybrid.scoring import kept_at, params_behind
from tests.engine.symbolic import answer, expected_answer, generate, make_engine, random_tokens, run
from tests.thorough import A_THIRD

T = random_tokens(43, 2000)
PROMPT = T[:101]
pytestmark = pytest.mark.usefixtures("asynchronous")


def score(engine: Any, *answers: list[int], prompt: list[int] = PROMPT) -> list[RequestEvent]:
    """The only event of each."""
    for i, tokens in enumerate(answers):
        engine.add_request(
            f"s{i}", prompt + tokens, params_behind(len(prompt)), message_ends=kept_at(len(prompt))
        )
    events = run(engine)
    engine.check_integrity()
    for i, tokens in enumerate(answers):
        (event,) = events[f"s{i}"]
        assert event.finish_reason is FinishReason.LENGTH and event.token_ids == []
        assert [entry.token_id for entry in event.prompt_logprobs] == tokens
        assert event.logprobs is None and event.error is None
    return [events[f"s{i}"][0] for i in range(len(answers))]


@A_THIRD
@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("exact_ends", [True, False])
@pytest.mark.parametrize("max_tokens", [5, 16, 64, 256])
@pytest.mark.parametrize("length", [1, 30])
def test_nothing_behind_the_last_token_but_one_is_skipped(kind, exact_ends, max_tokens, length):
    engine = make_engine(
        attention=kind != "recurrent", recurrent=kind != "attention", exact_ends=exact_ends,
        max_tokens=max_tokens, num_blocks=200,
    )  # fmt: skip
    grid = engine.context.geometry.grid
    (first,) = score(engine, T[500 : 500 + length])
    assert first.cached_tokens == 0
    for i in (0, 1):  # the same once more, whose end is cached with its logits, and another
        (event,) = score(engine, T[500 + i : 500 + i + length])
        assert 100 // grid * grid <= event.cached_tokens <= 100
        counters = event.counters or {}
        assert counters["computed_tokens"] + event.cached_tokens == 101 + length
        if kind != "attention" and exact_ends and length > grid:
            assert event.cached_tokens == 100  # it is kept there where that is worth a step
    generate(engine, [PROMPT])  # whose end is cached with its logits
    (event,) = score(engine, T[600 : 600 + length])
    assert event.cached_tokens <= 100
    stats = engine.stats()
    assert stats["computed_tokens"] + stats["skipped_tokens"] == stats["prompt_tokens"]
    assert stats["generated_tokens"] == 4  # of the one request that wanted some


@pytest.mark.parametrize("max_tokens", [64, 256])
def test_answers_behind_one_prompt_wait_for_the_first_to_compute_it(max_tokens):
    engine = make_engine(exact_ends=True, max_tokens=max_tokens, num_blocks=200)
    first, *others = score(engine, *(T[600 + 10 * i : 604 + 10 * i] for i in range(8)))
    assert first.cached_tokens == 0
    assert [event.cached_tokens for event in others] == [100] * 7


def test_answers_that_begin_alike_part_where_all_of_them_may_go_on():
    engine = make_engine(exact_ends=True, max_tokens=256, num_blocks=200, kernel_chunk=16)
    answers = [T[500:505] + T[600 + i : 603 + i] for i in range(8)]
    first, *others = score(engine, *answers, prompt=T[:103])
    assert first.cached_tokens == 0
    assert [event.cached_tokens for event in others] == [102] * 7


def test_nobody_waits_for_what_it_may_not_skip():
    engine = make_engine(exact_ends=True, max_tokens=256, num_blocks=200, kernel_chunk=16)
    _, second = score(engine, T[500:600], T[500:600], prompt=T[:103])
    assert second.cached_tokens == 102
    assert (second.counters or {})["twin_deferrals"] == 1  # not until the first one's end is there


def test_others_use_what_scores_leave_and_the_other_way_round():
    engine = make_engine(exact_ends=True, num_blocks=200)
    (told,) = score(engine, T[700:730])
    engine.add_request("chat", PROMPT + T[700:730] + T[800:805], SamplingParams(temperature=0.0))
    events = run(engine)["chat"]
    assert events[-1].cached_tokens == 131 and told.cached_tokens == 0
    assert answer(events) == expected_answer(PROMPT + T[700:730] + T[800:805], len(answer(events)))
    (again,) = score(engine, T[800:805], prompt=PROMPT + T[700:730] + [9])
    assert again.cached_tokens == 131


def test_only_chunks_that_come_to_the_answer_compute_logprobs():
    engine = make_engine(max_tokens=16, exact_ends=False)
    asked: list[tuple[int, int, int, int]] = []
    execute = engine.runner._execute

    def spy(plan):  # type: ignore[no-untyped-def]
        for chunk in plan.prefills:
            if chunk.logprob_targets is not None:
                asked.append(
                    (chunk.start, chunk.end, chunk.logprobs_from, len(chunk.logprob_targets))
                )
        return execute(plan)

    engine.runner._execute = spy
    score(engine, T[500:520], prompt=T[:50])
    starts = [start + first for start, _, first, _ in asked]
    assert starts[0] == 49  # whose logits are those of the first token
    assert sum(count for *_, count in asked) == 20
    assert all(start + first + count <= end for start, end, first, count in asked)


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_preempted_score_is_the_same(steps):
    engine = make_engine(max_tokens=16, exact_ends=True)
    engine.add_request("a", PROMPT[:40] + T[500:560], params_behind(40), message_ends=kept_at(40))
    events = [event for _ in range(steps) for event in engine.step()]
    running = list(engine.context.running())
    if running:
        engine.preempt(running[0])
    events += run(engine)["a"] if not events else []
    (event,) = events
    assert [entry.token_id for entry in event.prompt_logprobs or [] if entry] == T[500:560]
    stats = engine.stats()
    assert stats["computed_tokens"] + stats["skipped_tokens"] == 100


@pytest.mark.parametrize("start", [0, 1, 2, 39])
def test_logprobs_begin_where_they_are_wanted(start):
    engine = make_engine(max_tokens=9)
    params = SamplingParams(
        temperature=0.0, max_tokens=3, prompt_logprobs=0, prompt_logprobs_start=start, n=2
    )
    engine.add_request("a", T[:40], params)
    events = run(engine)["a"]
    ((first, known),) = [(e.index, e.prompt_logprobs) for e in events if e.prompt_logprobs]
    assert first == 0
    ids = [None if entry is None else entry.token_id for entry in known or []]
    assert ids == [None, *T[1:40]][start:]


@pytest.mark.parametrize("cached", [False, True])
def test_a_request_for_no_tokens_ends_with_its_prompt(cached):
    engine = make_engine(exact_ends=True)
    if cached:
        generate(engine, [T[:40]])
    before = engine.stats()
    engine.add_request("a", T[:40], SamplingParams(max_tokens=0, logprobs=2, n=2))
    events = run(engine)["a"]
    assert [(e.index, e.token_ids, e.finish_reason) for e in events] == [
        (0, [], FinishReason.LENGTH),
        (1, [], FinishReason.LENGTH),
    ]
    assert all(e.logprobs is None and e.prompt_tokens == 40 for e in events)
    assert events[0].cached_tokens == (40 if cached else 0)
    after = engine.stats()
    assert after["generated_tokens"] == before["generated_tokens"]
    first = "time_to_first_token_seconds"
    assert after["latency"][first]["count"] == before["latency"][first]["count"]
    (output,) = generate(engine, [T[:40]])  # goes on from what it left
    assert engine.stats()["computed_tokens"] == 40 and output


def test_a_failed_score_says_so_and_the_next_one_is_right():
    engine = make_engine()
    engine.runner.fail_next = True
    engine.add_request("a", T[:40], params_behind(20))
    (event,) = run(engine)["a"]
    assert event.finish_reason is FinishReason.ERROR and event.error
    score(engine, T[500:520], prompt=T[:20])
