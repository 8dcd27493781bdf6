"""The longest prompt and answer together: the context or the KV pool, whichever ends first. What
has no `max_tokens` ends there, and what asks for more is refused with the flag."""

from __future__ import annotations

import pytest

from megatron_hybrid.engine.sizing import describe
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import BUFFER_FLAG, CONTEXT_FLAG, FinishReason, SamplingParams
from tests.engine.symbolic import answer, expected_answer, make_engine, random_tokens, run
from tests.thorough import A_THIRD

T = random_tokens(51, 2000)
LIMIT = 41  # of 10 blocks of 4 tokens, and the last token, which is never fed
POOL = {"num_blocks": 10, "max_seq_length": 200}
pytestmark = pytest.mark.usefixtures("asynchronous")


def endless(**options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": None, "ignore_eos": True, **options})


@A_THIRD
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
@pytest.mark.parametrize("exact_ends", [True, False])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("length", [1, LIMIT - 2, LIMIT - 1])
def test_an_answer_fills_the_pool_alone_and_beside_others_cold_and_warm(
    kind, exact_ends, drafts, length
):
    engine = make_engine(
        **POOL, recurrent=kind == "hybrid", exact_ends=exact_ends, drafts=drafts, right=0.9
    )
    prompt = T[:length]
    for name in ("cold", "warm"):
        engine.add_request(name, prompt, endless())
        events = run(engine)[name]
        assert answer(events) == expected_answer(prompt, LIMIT - length)
        assert events[-1].finish_reason is FinishReason.LENGTH
    prompts = [prompt, *(T[100 * i : 100 * i + 3 * i] for i in range(1, 5)), prompt]
    for i, one in enumerate(prompts):
        engine.add_request(f"r{i}", one, endless())
    events = run(engine)
    for i, one in enumerate(prompts):
        assert answer(events[f"r{i}"]) == expected_answer(one, LIMIT - len(one))


def test_prompts_around_the_limit():
    engine = make_engine(**POOL)
    for length in (LIMIT, LIMIT + 1):
        with pytest.raises(InvalidRequestError, match=f"is {LIMIT} .{BUFFER_FLAG}") as refused:
            engine.add_request("a", T[:length], endless())
        assert (refused.value.field, refused.value.status) == ("prompt", 413)
    engine.add_request("a", T[: LIMIT - 1], endless())
    assert answer(run(engine)["a"]) == expected_answer(T[: LIMIT - 1], 1)


@pytest.mark.parametrize(
    ("options", "flag"), [(POOL, BUFFER_FLAG), ({"max_seq_length": LIMIT}, CONTEXT_FLAG)]
)
def test_only_what_was_asked_for_and_can_not_fit_is_refused(options, flag):
    engine = make_engine(**options)
    assert engine.max_seq_length == LIMIT
    asked = [
        ("max_tokens", {"max_tokens": 12}),
        ("min_tokens", {"min_tokens": 12}),
        ("min_tokens", {"min_tokens": 12, "max_tokens": SamplingParams().max_tokens}),
    ]
    for field, lengths in asked:
        with pytest.raises(
            InvalidRequestError, match=f"{field} is 12, .* {LIMIT} .{flag}"
        ) as caught:
            engine.add_request("a", T[:30], endless(**lengths))
        assert caught.value.field == field
    engine.add_request("a", T[:30], endless(max_tokens=11, min_tokens=11))
    # nobody has asked for the default's 128
    engine.add_request("b", T[:30], SamplingParams(temperature=0.0, ignore_eos=True))
    for events in run(engine).values():
        assert answer(events) == expected_answer(T[:30], 11)


def test_a_pool_that_holds_the_context_changes_nothing():
    for num_blocks in (10, 11):
        engine = make_engine(num_blocks=num_blocks, max_seq_length=LIMIT)
        assert (engine.max_seq_length, engine.max_seq_length_flag) == (LIMIT, CONTEXT_FLAG)


def test_without_attention_only_the_context_ends_an_answer():
    engine = make_engine(num_blocks=1, max_seq_length=50, attention=False)
    assert (engine.max_seq_length, engine.max_seq_length_flag) == (50, CONTEXT_FLAG)
    engine.add_request("a", T[:9], endless())
    assert answer(run(engine)["a"]) == expected_answer(T[:9], 41)


def test_the_start_log_says_the_real_limit():
    engine = make_engine(**POOL)
    said = describe(engine.cache_geometry, engine.context)
    assert f"up to {LIMIT} tokens each ({BUFFER_FLAG})" in said
