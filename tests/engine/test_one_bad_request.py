"""What is wrong with one request never ends the others. Where each kind of exception goes:

    names, times and numbers of a request   refused at the door, by their field, so that hashing,
                                            prompt lookup and adjustments of logits can rely on them
    whatever else raises at the door        to the caller; nothing of the request is left
    its grammar, asked in a step            its answer ends with an error
    the drafter, given its text             it goes on without drafts
    its text, in LLM                        its answer ends with an error

What raises in the launch of a step ends those in the step: see test_scheduler.py. For the server's
loop and its front end see tests/server/http/test_one_bad_request.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hybrid import LLM
from megatron_hybrid.engine.prompt_lookup import PromptLookup
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.execution.logit_adjustments import LogitAdjustments
from megatron_hybrid.request import FinishReason, Grammar, RequestEvent, SamplingParams
from megatron_hybrid.text.answer_text import AnswerText
from megatron_hybrid.text.grammar import AnswerMatcher
from tests.engine.symbolic import (
    VOCAB,
    CheckedEngine,
    GoodGuesses,
    answer,
    expected_answer,
    make_engine,
    random_tokens,
    run,
)
from tests.text.make_tokenizers import byte_level, save

T = random_tokens(61, 400)
LONE = "\ud800"  # half of a surrogate pair
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
GRAMMAR = SamplingParams(max_tokens=9, ignore_eos=True, grammar=Grammar("regex", "a*"))
pytestmark = pytest.mark.usefixtures("asynchronous")


def add_others(engine: CheckedEngine) -> None:
    for i in range(2):
        engine.add_request(f"r{i}", T[50 * i : 50 * i + 20], PARAMS)


def check_others(events: dict[str, list[RequestEvent]]) -> None:
    for i in range(2):
        assert answer(events[f"r{i}"]) == expected_answer(T[50 * i : 50 * i + 20], 9)
        assert events[f"r{i}"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("value", [LONE, "x" * 1025, 5, None, b"a"])
@pytest.mark.parametrize("field", ["request_id", "cache_salt", "adapter"])
def test_names_are_checked_at_the_door(field: str, value: Any):
    engine = make_engine(drafts=3)
    assert engine.scheduler.decodes.speculation is not None
    engine.scheduler.decodes.speculation.drafter = PromptLookup(4, 256, table_bits=10)
    add_others(engine)
    options = {"request_id": "bad", field: value}
    with pytest.raises(InvalidRequestError, match=field) as refused:
        engine.add_request(prompt_token_ids=T[:9], params=PARAMS, **options)
    assert refused.value.field == field
    longest = {"request_id": "long", field: "é" * 1024}
    engine.unload_adapter("a")
    engine.load_adapter("é" * 1024, "")
    engine.add_request(prompt_token_ids=T[:9], params=PARAMS, **longest)
    events = run(engine)
    check_others(events)
    assert answer(events[longest["request_id"]]) == expected_answer(T[:9], 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("params", {"max_tokens": 5}),
        ("message_ends", [1.5]),
        ("message_ends", None),
        ("arrived", "now"),
        ("arrived", float("nan")),
    ],
)
def test_so_is_everything_else_that_a_step_reads(field: str, value: Any):
    engine = make_engine()
    options = {"params": PARAMS, field: value}
    with pytest.raises(InvalidRequestError, match=field) as refused:
        engine.add_request("bad", T[:9], **options)
    assert refused.value.field == field and not engine.has_work()


def test_of_a_request_that_fails_at_the_door_nothing_is_left(monkeypatch):
    engine = make_engine()
    add_others(engine)

    def fail(seed: int, index: int) -> int:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("megatron_hybrid.engine.incoming.stream_seed", fail)
        with pytest.raises(MemoryError):
            engine.add_request("bad", T[:9], SamplingParams(n=2))
    engine.add_request("bad", T[:9], PARAMS)
    events = run(engine)
    check_others(events)
    assert answer(events["bad"]) == expected_answer(T[:9], 9)


class BadMatcher:
    """llguidance's, of which one method raises when it is called for the `at`-th time."""

    def __init__(self, name: str, at: int) -> None:
        self._name, self._at, self._calls = name, at, 0

    def _answer(self, name: str, value: Any) -> Any:
        self._calls += name == self._name
        if name == self._name and self._calls == self._at:
            raise RuntimeError("the parser is lost")
        return value

    def compute_bitmask(self) -> bytes:
        return bytes(self._answer("compute_bitmask", [0xFF] * 13))

    def consume_token(self, token: int) -> bool:
        return bool(self._answer("consume_token", True))

    def is_stopped(self) -> bool:
        return bool(self._answer("is_stopped", False))

    def is_error(self) -> bool:
        return bool(self._answer("is_error", False))


class BadGrammars:
    def __init__(self, name: str, at: int = 3) -> None:
        self._name, self._at = name, at

    def compile(self, grammar: Grammar, *, ignore_eos: bool = False) -> AnswerMatcher:
        matcher: Any = BadMatcher(self._name if grammar is GRAMMAR.grammar else "", self._at)
        return AnswerMatcher(matcher, np.zeros(0, dtype=np.int64), VOCAB)


@pytest.mark.parametrize("name", ["compute_bitmask", "consume_token", "is_stopped", "is_error"])
def test_a_grammar_that_raises_ends_its_answer_with_an_error(name, monkeypatch):
    engine = make_engine()
    engine.incoming.grammars = BadGrammars(name)
    adjustments, launch = LogitAdjustments(engine.context.rows, None), engine.runner.launch

    def ask_and_launch(plan, agreed=None):
        adjustments.ask_grammars(plan.sampled_rows)  # as a stage without logits does
        return launch(plan, agreed)

    monkeypatch.setattr(engine.runner, "launch", ask_and_launch)
    add_others(engine)
    engine.add_request("bad", T[200:220], GRAMMAR)
    good = SamplingParams(max_tokens=9, ignore_eos=True, grammar=Grammar("regex", "a*"), n=2)
    engine.add_request("good", T[300:320], good)
    events = run(engine)
    check_others(events)
    *_, last = events["bad"]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and "the parser is lost" in last.error
    assert sum(len(event.token_ids) for event in events["bad"]) == 3
    for index in range(2):
        own = [event for event in events["good"] if event.index == index]
        assert answer(own) == expected_answer(T[300:320], 9)


def test_no_end_of_the_answer_hides_that_its_grammar_has_failed():
    engine = make_engine(eos=tuple(range(VOCAB)))
    engine.incoming.grammars = BadGrammars("consume_token", at=1)
    engine.add_request("bad", T[:9], replace(GRAMMAR, ignore_eos=False))
    (event,) = run(engine)["bad"]
    assert event.finish_reason is FinishReason.ERROR and event.stop_token_id is None


def test_a_drafter_that_raises_leaves_its_request_without_drafts():
    class Picky(GoodGuesses):
        def begin(self, row: int, text: np.ndarray, cache_salt: str) -> None:
            if cache_salt == "bad":
                raise ValueError("no such salt")
            super().begin(row, text, cache_salt)

        def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
            assert len(rows) == len(counts)
            if len(rows):
                super().extend(rows, tokens, counts)

    engine = make_engine(drafts=3)
    assert engine.scheduler.decodes.speculation is not None
    engine.scheduler.decodes.speculation.drafter = Picky(4, right=1.0)
    add_others(engine)
    engine.add_request("bad", T[200:220], PARAMS, cache_salt="bad")
    events = run(engine)
    check_others(events)
    assert answer(events["bad"]) == expected_answer(T[200:220], 9)
    assert max(len(event.token_ids) for event in events["bad"]) == 1
    assert max(len(event.token_ids) for event in events["r0"]) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("at", [3, 9])  # in between, and with the last token
def test_an_answer_whose_text_raises_ends_with_an_error(folder, monkeypatch, at):
    take = AnswerText.take

    def picky(self: AnswerText, event: RequestEvent):
        if event.request_id == "llm-1" and self.completion_tokens == at - 1:
            raise KeyError("no such token")
        return take(self, event)

    engine = make_engine()
    monkeypatch.setattr("megatron_hybrid.llm.build_engine", lambda config: engine)
    monkeypatch.setattr(AnswerText, "take", picky)
    prompts = [T[50 * i : 50 * i + 20] for i in range(3)]
    outputs = LLM(tokenizer_model=str(folder)).generate(prompts, PARAMS, progress=False)
    for i, output in enumerate(outputs):
        expected = expected_answer(prompts[i], at - 1 if i == 1 else 9)
        assert output.token_ids == expected
        reason = FinishReason.ERROR if i == 1 else FinishReason.LENGTH
        assert output.finish_reason is reason and output.counters is not None
    assert "no such token" in (outputs[1].error or "") and outputs[0].error is None
    assert not engine.has_work()
