"""Answers with drafts are those without, and so is all that the cache does."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from megatron_hybrid.execution.plan import MOST_STOP_IDS
from megatron_hybrid.request import FinishReason, SamplingParams
from tests.engine.symbolic import (
    VOCAB,
    CheckedEngine,
    answer,
    expected_answer,
    generate,
    make_engine,
    random_tokens,
    run,
)
from tests.thorough import A_THIRD, usually

T = random_tokens(71, 2000)
GRID = 16
MODES = pytest.mark.parametrize("asynchronous", [False, True])
KINDS = ("hybrid", "attention", "recurrent")
# What depends on how many steps there are, or on drafts themselves.
OF_STEPS = {
    "steps", "last_step", "latency", "iteration_tokens", "started", "kv_cached_by_age",
    "state_cached_by_age", "drafts", "draft_tokens", "accepted_tokens", "accepted_by_position",
    "twin_deferrals",
}  # fmt: skip


def engine_with(drafts: int, kind: str = "hybrid", **options: Any) -> CheckedEngine:
    defaults: dict[str, Any] = {
        "kernel_chunk": GRID,
        "num_blocks": 100,
        "exact_ends": True,
        "right": 0.85,
        "attention": kind != "recurrent",
        "recurrent": kind != "attention",
    }
    return make_engine(drafts=drafts, **(defaults | options))


def converse(engine: CheckedEngine, seed: int = 0, stop_ids: tuple[int, ...] = ()) -> list[Any]:
    """Conversations one after the other, some of which come back: what each event's counters say
    at the end, and the engine's."""
    pick = np.random.default_rng(seed)
    texts: list[list[int]] = []
    seen: list[Any] = []
    for number in range(25):
        if texts and pick.random() < 0.6:
            prompt = texts[int(pick.integers(len(texts)))]
            if pick.random() < 0.3:
                prompt = prompt[: int(pick.integers(1, len(prompt)))]
            prompt = prompt[:120] + T[number : number + 1 + int(pick.integers(5))]
        else:
            begin = int(pick.integers(1500))
            prompt = T[begin : begin + int(pick.integers(1, 60))]
        params = SamplingParams(
            temperature=0.0, max_tokens=int(pick.integers(1, 50)), stop_token_ids=stop_ids
        )
        engine.add_request(str(number), prompt, params)
        events = run(engine)[str(number)]
        said = answer(events)
        assert said == expected_answer(prompt, len(said))
        texts.append(prompt + said)
        last = events[-1]
        assert last.finish_reason is not FinishReason.ERROR
        seen.append((last.finish_reason, last.cached_tokens, len(said), last.counters))
    stats = engine.stats()
    return [*seen, {name: value for name, value in stats.items() if name not in OF_STEPS}]


# Every pair of two of the parameters; TESTS=all: all.
SKIPPING = usually(
    [
        (kind, asynchronous, *((8, True) if asynchronous == (kind == "hybrid") else (3, False)))
        for kind, asynchronous in product(KINDS, (False, True))
    ],
    [
        (kind, asynchronous, *drafts)
        for kind, asynchronous, drafts in product(
            KINDS,
            (False, True),
            ((1, True), (3, False), (8, True)),
        )
    ],
)


@A_THIRD
@pytest.mark.parametrize(("kind", "asynchronous", "drafts", "exact_ends"), SKIPPING)
def test_the_cache_skips_what_it_skips_without_drafts(
    asynchronous: bool, kind: str, exact_ends: bool, drafts: int
):
    options = {"asynchronous": asynchronous, "exact_ends": exact_ends, "cached_slots": 200}
    options["num_blocks"] = 1500
    plain = converse(engine_with(0, kind, **options), stop_ids=(3, 5))
    engine = engine_with(drafts, kind, **options)
    assert converse(engine, stop_ids=(3, 5)) == plain
    assert engine.stats()["accepted_tokens"] > 20


POLICIES = ("replay_cost", "lru", "ref_zero")
# Every pair of a kind and a policy; TESTS=all: each with all numbers of drafts.
EVICTING = usually(
    [
        (kind, policy, (1, 8)[(i + j) % 2])
        for (i, kind), (j, policy) in product(enumerate(KINDS), enumerate(POLICIES))
    ],
    list(product(KINDS, POLICIES, (1, 2, 8))),
)


@A_THIRD
@pytest.mark.parametrize(("kind", "policy", "drafts"), EVICTING)
def test_what_is_evicted_is_what_would_be_without_drafts(kind: str, policy: str, drafts: int):
    """With a step at a time, where it is known which drafts hold before anything is reserved."""
    options = {"asynchronous": False, "policy": policy, "num_blocks": 60, "cached_slots": 5}
    plain_engine = engine_with(0, kind, **options)
    *plain, plain_stats = converse(plain_engine, 1, (3,))
    *found, stats = converse(engine_with(drafts, kind, **options), 1, (3,))
    assert found == plain
    if (
        policy != "replay_cost"
    ):  # which weighs ages, and those are exact to a step of several tokens
        assert stats == plain_stats
    evicted = "state_evictions" if kind == "recurrent" else "kv_evictions"
    assert policy == "ref_zero" or plain_stats[evicted] > 10


def test_a_run_that_passes_the_grid_leaves_its_state_there():
    """Whether the step goes on behind it, or the answer ends behind it."""
    prompt = T[:10]
    for count in range(4, 30):
        engine = engine_with(8, right=1.0, asynchronous=False, exact_ends=False)
        stop = expected_answer(prompt, count)[-1]
        if stop in expected_answer(prompt, count - 1):
            continue
        params = SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=(stop,))
        engine.add_request("a", prompt, params)
        said = answer(run(engine)["a"])
        assert said == expected_answer(prompt, count)
        fed = len(prompt) + count - 1  # the stop is not
        kept = {state.position for state in engine.context.cache.states.cached()}
        assert max(kept, default=0) == fed // GRID * GRID
        (event,) = generate(engine, [prompt + said + [1, 2]])
        assert event.cached_tokens == fed // GRID * GRID


def test_requests_that_choose_by_what_they_have_written_have_no_drafts():
    engine = engine_with(4, right=1.0, asynchronous=False)
    for number, options in enumerate(
        ({"presence_penalty": 0.5}, {"logit_bias": ((5, 1.0),)}, {"min_tokens": 30})
    ):
        params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(1,), **options)
        engine.add_request(str(number), T[:20], params)
    run(engine)
    assert engine.stats()["draft_tokens"] == 0
    engine.add_request("a", T[:20], SamplingParams(max_tokens=30, ignore_eos=True))
    run(engine)
    assert engine.stats()["draft_tokens"] > 0


@MODES
def test_a_step_whose_rows_all_have_too_many_stop_ids_for_drafts(asynchronous: bool):
    """The drafter is told of nobody's tokens then."""
    engine = engine_with(4, asynchronous=asynchronous)
    prompts = [T[:20], T[100:130]]
    answers = [expected_answer(prompt, 25) for prompt in prompts]
    others = sorted(set(range(VOCAB)) - set(sum(answers, [])))
    assert len(others) > MOST_STOP_IDS
    params = SamplingParams(temperature=0.0, max_tokens=25, stop_token_ids=tuple(others))
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params)
    events = run(engine)
    assert [answer(events[f"r{i}"]) for i in range(2)] == answers
    assert engine.stats()["draft_tokens"] == 0


def test_guesses_that_never_hold_are_made_less_and_less():
    engine = engine_with(4, right=0.0, asynchronous=False, max_seq_length=1100, num_blocks=400)
    generate(engine, [T[:20]], max_tokens=1000)
    stats = engine.stats()
    assert stats["accepted_tokens"] == 0 and stats["drafts"] < 40


def test_as_many_drafts_as_hold():
    engine = engine_with(8, right=1.0, asynchronous=False, kernel_chunk=32, num_blocks=400)
    generate(engine, [T[:20]], max_tokens=200)
    stats = engine.stats()
    assert stats["steps"] < 80 and stats["decode_tokens"] == 199
    held = list(stats["accepted_by_position"].values())
    assert len(held) == 8 and held == sorted(held, reverse=True) and held[-1] > 5
    assert sum(held) == stats["accepted_tokens"]
