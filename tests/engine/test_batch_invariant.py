"""Batch-invariant mode: tokens and log-probabilities of a request have the very bits that it has
alone and without a cache, in whatever way it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_hybrid import LLM, RequestOutput
from tests.engine.bits import (
    BLOCK_SIZE,
    BUFFER,
    CACHING,
    DRAFTS,
    EXACT_ENDS,
    GRANULE,
    INTERVAL,
    LENGTHS,
    MODE,
    POLICY,
    REQUESTS,
    TOKENS,
    WRITES,
    Known,
    bits_of,
    params,
)
from tests.knowing_drafter import Knowing, with_drafts, without_clock
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES

# One family goes through every test, and some others through what their layers do by themselves:
# who shares what, who waits and who is sampled does not depend on the family. TESTS=all: all of
# them, everything.
OTHERS = ("qwen3_next", "jamba", "lfm2")
FULLY_TESTED = usually(("nemotron_h", *OTHERS), FAMILIES)
CASES: dict[str, tuple[dict[str, Any], ...]] = {  # that CI runs
    "test_in_a_batch_cold_and_warm": ({"block_size": 16}, {"block_size": 64}),
    "test_cached_at_other_places": (
        {"exact_ends": True, "policy": "replay_cost"}, {"exact_ends": False, "policy": "lru"},
    ),
    "test_chunks_of_one_request_at_a_time": (
        {"mode": "extract", "budget": 13}, {"mode": "break", "budget": 3},
    ),
    "test_chunks_beside_many_others": (
        {"mode": "extract", "budget": 10}, {"mode": "break", "budget": 41},
    ),
    "test_preempted_and_evicted": (
        {"asynchronous": True, "drafts": 3}, {"asynchronous": False, "drafts": 0},
    ),
    "test_drafts_that_hold_and_that_do_not": (
        {"number": 8, "asynchronous": True}, {"number": 3, "asynchronous": True},
        {"number": 1, "asynchronous": False},
    ),
    "test_write_intervals_kernels_and_a_step_in_flight": (
        {"kernels": "auto", "interval": 4}, {"kernels": "reference", "interval": 1},
    ),
    "test_sampled_in_n_answers": ({"case": "filters"}, {"case": "penalties"}, {"case": "biases"}),
}  # fmt: skip
OF_OTHERS = {"test_drafts_that_hold_and_that_do_not"}  # the first case


def is_thorough(test: str, known: str = "", **given: Any) -> bool:
    """Whether CI leaves out a case (tests/engine/conftest.py asks)."""
    if known in OTHERS and test not in OF_OTHERS:
        return True
    cases = CASES.get(test, ({},))
    cases = cases[:1] if known in OTHERS else cases
    return not any(all(given[name] == value for name, value in case.items()) for case in cases)


GREEDY = params()
SHORT = params(tokens=5)
# Of a prompt that is cached whole, the end of a chunk, one token more or less, ...
SOME = usually((1, 16, 17, 33, 48), LENGTHS)


# Whose layers neither the kinds above have nor nemotron_h_moe of test_check_exactness.py.
SOME_FAMILIES = (
    "qwen4_exp", "bailing_moe_linear", "lfm3", "inkling", "rwkv", "zaya", "glm5_next",
)  # fmt: skip


@pytest.fixture(scope="module", params=usually(SOME_FAMILIES, FAMILIES))
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known.of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=FULLY_TESTED)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known.of(request.param, tmp_path_factory.mktemp(request.param))


def of_lengths(known: Known, lengths: tuple[int, ...] = SOME) -> list[list[int]]:
    return [known.text[7 * n : 8 * n] for n in lengths]


def granule(llm: LLM) -> int:
    return llm.engine.context.geometry.granule


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids + output.token_ids for output in outputs]


def test_every_family_is_the_same_alone_in_batches_cached_and_with_drafts(each: Known) -> None:
    """One of all that the other tests do one by one."""
    prompts = of_lengths(each, usually((1, 16, 33), LENGTHS))
    wanted = params(tokens=usually(5, 21))
    llm = each.llm()
    outputs = each.generate(llm, prompts, wanted)
    for output in each.generate(llm, prompts[::-1], wanted):
        length = len(output.prompt_token_ids)
        assert output.cached_tokens >= (length - 1) // granule(llm) * granule(llm), length
    texts = texts_of(outputs)
    turns = [text + each.text[:3] for text in texts]
    each.generate(llm, turns[-2:], params(tokens=3))
    tight = {TOKENS: 9, REQUESTS: 5, DRAFTS: 3}
    each.asynchronous = True
    drafting = with_drafts(each.llm(**tight), Knowing(texts, 9))
    each.generate(drafting, prompts, wanted)
    each.asynchronous = None
    assert drafting.stats()["accepted_tokens"] > 0


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_in_a_batch_cold_and_warm(known: Known, block_size: int) -> None:
    llm = known.llm(**{BLOCK_SIZE: block_size, BUFFER: 0.08})  # room for all of Zamba2's keys
    others = [known.text[9 * i : 9 * i + 1 + 5 * i] for i in range(31 - len(SOME))]
    prompts = of_lengths(known)
    wanted = {True: GREEDY, False: SHORT}
    for turn in range(3):
        both = [*prompts, *others]
        outputs = llm.generate(
            both, [wanted[i < len(prompts)] for i in range(len(both))], progress=False
        )
        llm.engine.check_integrity()
        known.check(outputs[: len(prompts)], GREEDY)
        if turn == 0:
            known.check(outputs[len(prompts) :: usually(5, 1)], SHORT)
            continue
        for output in outputs:  # of whole prompts their logits are there
            length = len(output.prompt_token_ids)
            ends = length if length % granule(llm) == 0 else length - 1
            assert output.cached_tokens == ends - ends % granule(llm), length


def test_prompts_that_leave_each_other_off_the_grid(known: Known) -> None:
    llm, text, other = known.llm(), known.text, known.text[500:]
    for wanted, lengths in ((SHORT, (33, 40, 47)), (GREEDY, usually((49,), (48, 49, 80)))):
        prompts = [text[:n] + other[: 9 + i] for i, n in enumerate(lengths)]
        known.generate(llm, [text[:90], *prompts], wanted)
        known.generate(llm, prompts[::-1], wanted)


def test_the_next_turns_go_on_from_the_last_state_before_the_end(known: Known) -> None:
    llm = known.llm()
    outputs = known.generate(llm, of_lengths(known), GREEDY)
    turns = [text + known.text[:4] for text in texts_of(outputs)]
    for turn, output in zip(turns, outputs, strict=True):
        (found,) = known.generate(llm, [turn], SHORT)
        computed = len(output.prompt_token_ids) + len(output.token_ids) - 1
        assert found.cached_tokens == computed - computed % granule(llm)


@pytest.mark.parametrize("exact_ends", [True, False])
@pytest.mark.parametrize("policy", ["replay_cost", "lru", "ref_zero"])
def test_cached_at_other_places(known: Known, exact_ends: bool, policy: str) -> None:
    options = {INTERVAL: 32, EXACT_ENDS: exact_ends, POLICY: policy}
    llm = known.llm(**options, **{BLOCK_SIZE: 32})
    prompts = [known.text[:n] for n in (100, 64, 65, 40, 97)]
    for batch in (prompts[:1], prompts[1:], [known.text[:70] + known.text[200:220]], prompts):
        known.generate(llm, batch, SHORT, cache_checkpoints=(33, 39))
    assert llm.stats()["skipped_tokens"] > 100


@pytest.mark.parametrize("mode", ["extract", "break"])
@pytest.mark.parametrize("budget", [1, 3, 13])
def test_chunks_of_one_request_at_a_time(known: Known, mode: str, budget: int) -> None:
    llm = known.llm(**{TOKENS: budget, REQUESTS: 1, MODE: mode})
    prompts = of_lengths(known, usually((17, 33), LENGTHS))
    known.generate(llm, prompts, GREEDY)
    known.generate(llm, prompts, GREEDY)


@pytest.mark.parametrize("mode", ["extract", "break"])
@pytest.mark.parametrize("budget", [10, 41, 53])
def test_chunks_beside_many_others(known: Known, mode: str, budget: int) -> None:
    llm = known.llm(**{TOKENS: budget, REQUESTS: 10, MODE: mode})
    prompts = [*of_lengths(known), *(known.text[:n] for n in (90, 75))]
    known.generate(llm, prompts, GREEDY)
    known.generate(llm, prompts[::2], GREEDY)


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("policy", usually(["replay_cost"], ["replay_cost", "lru", "ref_zero"]))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_and_evicted(known: Known, policy: str, drafts: int, asynchronous: bool) -> None:
    prompts = [*of_lengths(known), *of_lengths(known, usually((31,), (31, 32, 50)))]
    wanted = params(tokens=usually(32, 40))
    known.asynchronous = asynchronous
    llm = known.small(**{POLICY: policy, DRAFTS: drafts})
    if drafts:
        known.learn(prompts, wanted)
        texts = [prompt + known.alone(prompt, wanted)[0] for prompt in prompts]
        with_drafts(llm, Knowing(texts))
    for _ in range(2):
        known.generate(llm, prompts, wanted)
    known.asynchronous = None
    stats = llm.stats()
    if llm.engine.context.geometry.has_attention:
        assert stats["preemptions"] > 0
    if drafts:
        assert stats["accepted_tokens"] > 20


def test_others_end_and_are_aborted_in_the_middle(known: Known) -> None:
    prompts = of_lengths(known)
    for asynchronous in usually((True,), (False, True)):
        known.asynchronous = asynchronous
        llm = known.llm(**{TOKENS: 30, REQUESTS: 9, DRAFTS: 2})
        pick = np.random.default_rng(5)
        engine, logprobs, tokens = llm.engine, {}, {}
        for i, prompt in enumerate(prompts):
            engine.add_request(f"own {i}", prompt, GREEDY)
            engine.add_request(f"other {i}", prompt + known.text[:i], GREEDY)
        step = 0
        while engine.has_work():
            step += 1
            for event in engine.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                logprobs.setdefault(event.request_id, []).extend(event.token_logprobs())
            if step % 4 == 0:
                engine.abort(f"other {pick.integers(len(prompts))}")
                engine.add_request(f"late {step}", known.text[step : 3 * step], params(tokens=3))
                if step > 60:
                    break
        while engine.has_work():
            for event in engine.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                logprobs.setdefault(event.request_id, []).extend(event.token_logprobs())
        engine.check_integrity()
        for i, prompt in enumerate(prompts):
            own = RequestOutput(
                "", prompt, token_ids=tokens[f"own {i}"], logprobs=logprobs[f"own {i}"]
            )
            assert bits_of(own) == known.alone(prompt, GREEDY)
    known.asynchronous = None


@A_THIRD
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [1, 3, 8])
def test_drafts_that_hold_and_that_do_not(known: Known, number: int, asynchronous: bool) -> None:
    prompts = [*of_lengths(known, usually((17, 33), LENGTHS)), known.text[:14], known.text[:30]]
    known.learn(prompts, GREEDY)
    texts = [prompt + known.alone(prompt, GREEDY)[0] for prompt in prompts]
    known.asynchronous = asynchronous
    for wrong_every in usually((5 + number,), (2, 5, 9, 1000)):
        llm = with_drafts(known.llm(**{DRAFTS: number}), Knowing(texts, wrong_every))
        before = llm.stats()["accepted_tokens"]
        outputs = known.generate(llm, prompts, GREEDY)
        known.generate(llm, prompts, GREEDY)
        # With a step in flight, where every second one is wrong, none can hold.
        if wrong_every > 2 or not asynchronous:
            assert llm.stats()["accepted_tokens"] - before > 20
        for output in outputs[1::3]:  # the next turns
            text = output.prompt_token_ids + output.token_ids
            (turn,) = known.generate(llm, [text + known.text[:3]], SHORT)
            computed = len(text) - 1
            assert turn.cached_tokens == computed - computed % granule(llm)
    known.asynchronous = None


def test_drafts_by_looking_up_the_prompt(known: Known) -> None:
    prompts = [(known.text[:n] * 5)[: 4 * n + 1] for n in usually((7, 12), (3, 7, 12, 60))]
    wanted = params(tokens=usually(48, 100))  # of which every family repeats some
    llm = without_clock(known.llm(**{DRAFTS: 4}))
    known.generate(llm, prompts, wanted)
    known.generate(llm, prompts[::-1], wanted)
    assert llm.stats()["draft_tokens"] > 0


ADJUSTED: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "hot": {"temperature": 3.0},
    "penalties": {
        "presence_penalty": 0.4, "frequency_penalty": 0.6, "repetition_penalty": 1.3,
        "top_p": 0.95,
    },
    "biases": {"logit_bias": {5: 4.0, 9: -3.0}, "bad_words": ((3, 4),)},
}  # fmt: skip


@pytest.mark.parametrize("case", ADJUSTED)
def test_sampled_in_n_answers(known: Known, case: str) -> None:
    wanted = params(17, tokens=10, n=3, **ADJUSTED[case])
    llm = known.llm(**{TOKENS: 45, REQUESTS: 12})
    prompts = of_lengths(known, usually((17, 32), LENGTHS))
    for _ in range(2):
        known.generate(llm, prompts, wanted)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("interval", [1, 4])
def test_write_intervals_kernels_and_a_step_in_flight(
    known: Known, kernels: str, interval: int
) -> None:
    known.asynchronous = kernels == "auto"
    llm = known.llm(**{WRITES: interval}, kernels=kernels)
    prompts = of_lengths(known)
    known.generate(llm, prompts, GREEDY)
    known.generate(llm, prompts, GREEDY)
    known.asynchronous = None


def scored(output: RequestOutput) -> Iterator[tuple[float, ...]]:
    for entry in output.prompt_logprobs or ():
        if entry is not None:
            yield entry.logprob, *(value for _, value in entry.top)


def test_an_answer_as_a_prompt_has_the_bits_that_it_was_sampled_with(known: Known) -> None:
    prompts = of_lengths(known)
    wanted = params(23, tokens=19)
    known.learn(prompts, wanted)
    answers = [known.alone(prompt, wanted) for prompt in prompts]
    wholes = [prompt + tokens for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    asking = params(tokens=1, prompt_logprobs=2)
    for options in ({}, {TOKENS: 11, REQUESTS: 5}, {CACHING: False}):
        llm = known.llm(**options)
        for _ in range(2):
            outputs = llm.generate(wholes, asking, progress=False)
            for output, (_, figures) in zip(outputs, answers, strict=True):
                assert list(scored(output))[-len(figures) :] == figures
    llm = known.llm(**{TOKENS: 41})
    known.generate(llm, prompts, wanted)
    for _ in range(2):
        given = [tokens for tokens, _ in answers]
        scores = llm.score(prompts, given, top_logprobs=2, progress=False)
        for prompt, (one,), (_, figures) in zip(prompts, scores, answers, strict=True):
            assert one.logprobs == [own for own, *_ in figures]
            assert [tuple(v for _, v in top) for top in one.top] == [tuple(f[1:]) for f in figures]
            last = len(prompt) - 1
            assert last - last % GRANULE <= one.cached_tokens <= last
