"""Penalties, biases, min_tokens, grammars and budgets of thoughts through the whole engine: the
same answer in every way that it can be computed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from megatron_hybrid import LLM, FinishReason, InvalidRequestError, RequestOutput
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.request import Grammar
from tests.engine.adjusted_cases import (
    CASES,
    CHAT,
    CLOSE,
    DOT,
    JSON,
    OPTIONS,
    THOUGHTS,
    WORDS,
    A,
    drawn,
    greedy,
)
from tests.tiny_models import make_tiny_model


def is_thorough(test: str, llm: bool = False, every: int | None = None, **others: object) -> bool:
    """Whether CI leaves this case out: often with a step in flight, now and then without."""
    return every is not None and llm != (every == 2)


@pytest.fixture(scope="module", params=[False, True], ids=["one_by_one", "in_flight"])
def llm(request: pytest.FixtureRequest) -> LLM:
    llm = LLM(**OPTIONS)
    llm.engine.runner.asynchronous = request.param
    return llm


@pytest.fixture(scope="module")
def alone() -> dict[str, RequestOutput]:
    """Each answer with nothing beside it, nothing in the cache and no step in flight."""
    llm = LLM(**OPTIONS)
    answers = {}
    for name, params in CASES.items():
        llm.engine.reset()
        (answers[name],) = llm.chat(CHAT, params)
    return answers


def check(outputs: Sequence[RequestOutput], alone: dict[str, RequestOutput]) -> None:
    for name, output in zip(CASES, outputs, strict=True):
        assert output.token_ids == alone[name].token_ids, name
        assert output.finish_reason is alone[name].finish_reason, name


def test_answers_do_what_was_asked(alone):
    plain = alone["plain"]
    assert plain.finish_reason is FinishReason.STOP and len(plain.token_ids) < 15
    assert len(alone["min_tokens"].token_ids) >= 15
    assert alone["min_tokens"].token_ids[: len(plain.token_ids) - 1] == plain.token_ids[:-1]
    for name in ("repetition", "frequency", "penalties", "bias"):
        assert alone[name].token_ids != plain.token_ids
    assert DOT not in alone["bias"].token_ids
    assert "don't know" in plain.text and "lighthouse" in plain.text
    assert "don't know" not in alone["bad_words"].text
    assert "lighthouse" not in alone["bad_words"].text
    assert alone["bad_words"].text.startswith(plain.text[:7])
    assert set(alone["allowed"].token_ids) <= set(range(60, 90))
    for name, budget in (("thoughts", 3), ("own_thoughts", 6), ("words_after_thoughts", 7)):
        ids = alone[name].token_ids
        assert tuple(ids[budget : budget + len(CLOSE)]) == CLOSE
        assert alone[name].text.count("</think>") == 1
    assert alone["thoughts"].token_ids[:3] == plain.token_ids[:3]
    thoughts, _, words = alone["words_after_thoughts"].text.partition("</think>")
    assert re.fullmatch(WORDS.text, words) and not re.fullmatch(WORDS.text, thoughts)
    person = json.loads(alone["json"].text)
    assert set(person) == {"name", "age", "tags"} and 0 <= person["age"] <= 150
    assert alone["json"].finish_reason is FinishReason.STOP
    for name in ("words", "everything"):
        assert re.fullmatch(WORDS.text, alone[name].text), alone[name].text
        assert alone[name].finish_reason is FinishReason.STOP


def test_a_grammar_that_fails_ends_its_answer_alone(llm, alone, monkeypatch):
    """What may come next is asked while a step is launched."""
    compile_grammar, asked = llm.engine.incoming.grammars.compile, []

    def fail_later(grammar, **options):
        matcher = compile_grammar(grammar, **options)
        if grammar is JSON:
            mask = matcher._matcher.compute_bitmask

            class Failing:
                def __getattr__(self, name):
                    return getattr(parser, name)

                def compute_bitmask(self):
                    asked.append(1)
                    return mask() if len(asked) < 5 else mask(1, 2, 3)

            parser, matcher._matcher = matcher._matcher, Failing()
        return matcher

    monkeypatch.setattr(llm.engine.incoming.grammars, "compile", fail_later)
    llm.engine.reset()
    outputs = llm.chat([CHAT] * len(CASES), list(CASES.values()), progress=False)
    for name, output in zip(CASES, outputs, strict=True):
        if name == "json":
            assert output.finish_reason is FinishReason.ERROR and len(output.token_ids) == 5
            assert output.token_ids[:4] == alone[name].token_ids[:4]
            assert "can't go on in its grammar: TypeError" in (output.error or "")
        else:
            assert output.token_ids == alone[name].token_ids, name


def test_answers_are_the_same_in_one_batch(llm, alone):
    llm.engine.reset()
    check(llm.chat([CHAT] * len(CASES), list(CASES.values()), progress=False), alone)


def test_answers_are_the_same_when_the_whole_prompt_is_cached(llm, alone):
    llm.engine.reset()
    llm.chat(CHAT, greedy(max_tokens=1))
    outputs = llm.chat([CHAT] * len(CASES), list(CASES.values()), progress=False)
    assert all(output.cached_tokens == len(output.prompt_token_ids) for output in outputs)
    check(outputs, alone)


@pytest.mark.parametrize("every", [2, 5])
def test_answers_are_the_same_after_preemptions(llm, alone, every):
    llm.engine.reset()
    engine = llm.engine
    step, steps = engine.step, 0

    def step_and_preempt():
        nonlocal steps
        events, steps = step(), steps + 1
        if steps % every == 0:
            if engine._in_flight is not None:
                engine.scheduler.settle(engine._receive())
            running = list(engine.context.running())
            for one in running[:3]:
                engine.scheduler._preempt(one)
        return events

    engine.step = step_and_preempt  # type: ignore[method-assign]
    try:
        outputs = llm.chat([CHAT] * len(CASES), list(CASES.values()), progress=False)
    finally:
        del engine.step  # type: ignore[method-assign]
    preempted = [
        name for name, o in zip(CASES, outputs, strict=True) if o.counters.get("preemptions")
    ]
    assert len(preempted) > 5
    check(outputs, alone)


def test_several_answers_to_one_prompt_follow_the_grammar_each(llm):
    llm.engine.reset()
    (output,) = llm.chat(CHAT, drawn(grammar=WORDS, n=4, max_tokens=60))
    texts = [choice.text for choice in output.choices]
    assert all(re.fullmatch(WORDS.text, text) for text in texts) and len(set(texts)) > 1
    assert not llm.engine.context.rows.grammars


def test_a_bias_of_100_forces_a_token_also_in_draws(llm):
    for params in (greedy(logit_bias=((A, 100.0),)), drawn(logit_bias=((A, 100.0),))):
        (output,) = llm.chat(CHAT, replace(params, max_tokens=5))
        assert output.token_ids == [A] * 5


def test_a_grammar_goes_on_without_end_ids_until_it_is_complete(llm):
    grammar = Grammar("regex", "a{5,20}")
    (output,) = llm.chat(CHAT, greedy(grammar=grammar, ignore_eos=True, max_tokens=60))
    assert output.text == "a" * 20 and output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None


def test_max_tokens_cuts_a_grammar_short(llm):
    (output,) = llm.chat(CHAT, greedy(grammar=JSON, max_tokens=3))
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 3


def test_an_answer_that_leaves_its_grammar_ends_with_an_error_and_the_others_go_on(llm, alone):
    llm.engine.reset()
    sample = llm.engine.runner._sampler._adjustments
    keep, sample._keep_to_grammars = sample._keep_to_grammars, lambda logits, who: None
    try:
        broken, plain = llm.chat([CHAT, CHAT], [greedy(grammar=JSON), greedy()], progress=False)
    finally:
        sample._keep_to_grammars = keep
    assert broken.finish_reason is FinishReason.ERROR and "grammar" in broken.error
    assert plain.token_ids == alone["plain"].token_ids


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": ((2048, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (2048,)}, "allowed_token_ids"),
        ({"bad_words": ((2048, 1),)}, "bad_words"),
        ({"bad_words": ("a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7",)},
         "bad_words"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": replace(THOUGHTS, close=(2048,))}, "thinking_token_budget"),
        ({"min_tokens": 9000, "max_tokens": None}, "min_tokens"),
        ({"grammar": Grammar("regex", "(")}, "response_format"),
        ({"grammar": Grammar("json_schema", '{"type": "array", "uniqueItems": true}')},
         "response_format"),
    ],
)  # fmt: skip
def test_what_the_model_can_not_do_is_refused(llm, options, field):
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(CHAT, greedy(**options))
    assert caught.value.field == field
    assert llm.engine.scheduler.num_waiting == 0


def test_a_budget_is_a_number_where_the_template_shows_thoughts(llm, monkeypatch):
    with pytest.raises(InvalidRequestError, match="shows no marks"):
        llm.chat(CHAT, greedy(thinking_token_budget=3))
    template = llm.tokenizer.chat_template
    for end, forced in (("<think>", True), ("<think></think>", False)):
        monkeypatch.setattr(llm.tokenizer._hf, "chat_template", f"{template}{end}{{# </think> #}}")
        outputs = llm.chat([CHAT] * 2, [greedy(thinking_token_budget=3), greedy()])
        ids, plain = (output.token_ids for output in outputs)
        close = llm.tokenizer.encode("\n</think>", add_special_tokens=False)
        assert ids == plain or forced
        assert (ids[3 : 3 + len(close)] == close) == forced and ids[:3] == plain[:3]
    with pytest.raises(InvalidRequestError, match="token id -1"):
        llm.generate([5, -1], greedy(thinking_token_budget=3))


def test_stop_ids_that_the_model_does_not_know_are_no_obstacle(llm):
    (output,) = llm.chat(CHAT, greedy(stop_token_ids=(999_999,), min_tokens=15))
    assert len(output.token_ids) >= 15


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bamba")
    return folder, make_tiny_model("bamba", folder)


def test_answers_are_those_of_transformers_with_the_same_penalties(tiny: tuple[Path, object]):
    folder, model = tiny
    llm = LLM(str(folder), **OPTIONS)
    prompt = [5, 9, 5, 33, 100, 101]
    params = greedy(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    (output,) = llm.generate(prompt, params)
    answer: list[int] = []
    for _ in range(24):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1].float()
        logits = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)[0]
        for token in set(answer):
            logits[token] -= 0.2 * answer.count(token) + 0.1
        answer.append(int(logits.argmax()))
    assert output.token_ids == answer


def test_a_model_without_a_tokenizer_refuses_what_has_to_be_read(tiny: tuple[Path, object]):
    llm = LLM(str(tiny[0]), **OPTIONS)
    budget = replace(THOUGHTS, close=(1,))
    for options in ({"grammar": WORDS}, {"thinking_token_budget": budget}):
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            llm.generate([1, 2], greedy(**options))


def test_every_id_ending_the_answer_leaves_nothing_to_write(tiny: tuple[Path, object]):
    engine = build_engine(LLM(str(tiny[0]), **OPTIONS).config)
    engine.incoming.vocab_size = 3
    params = greedy(stop_token_ids=(0, 1, 2), min_tokens=2)
    with pytest.raises(InvalidRequestError, match="every token id"):
        engine.add_request("a", [1, 2], params)
