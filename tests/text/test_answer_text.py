"""Events into an answer: text, tokens that count, log-probabilities, and why it ended."""

from __future__ import annotations

import pytest

from megatron_hybrid.request import FinishReason, RequestEvent, TokenLogprob
from megatron_hybrid.text.answer_text import AnswerText
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level

LETTERS = "x!abcdefgh"  # a token each


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def event(ids: list[int], reason: FinishReason | None = None, **options) -> RequestEvent:
    logprobs = [TokenLogprob(token, -0.5) for token in ids]
    return RequestEvent(
        "r", token_ids=ids, finish_reason=reason, logprobs=logprobs, prompt_tokens=3, **options
    )


def test_an_id_that_ends_an_answer_counts_but_is_no_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("abc")
    answer = AnswerText(tokenizer)
    new = answer.take(event(ids, FinishReason.STOP, stop_token_id=ids[-1]))
    assert (new.text, new.token_ids, new.num_shown) == ("ab", ids, 2)
    assert [entry.token_id for entry in new.logprobs] == ids
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, ids[-1])
    assert (answer.stop_hit, answer.completion_tokens) == (None, 3)


def test_nothing_behind_a_stop_string_counts(tokenizer: Tokenizer):
    """An event may hold several tokens, and the end that the engine saw."""
    ids = tokenizer.encode(LETTERS)
    answer = AnswerText(tokenizer, ("bc",))
    assert answer.take(event(ids[:4])).text == "x!a"
    new = answer.take(event(ids[4:], FinishReason.STOP, stop_token_id=ids[-1]))
    assert (new.text, new.token_ids, new.num_shown) == ("", ids[4:5], 1)
    assert len(new.logprobs) == 1
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "bc")
    assert (answer.stop_hit, answer.completion_tokens) == ("bc", 5)


def test_what_was_held_back_comes_with_the_end(tokenizer: Tokenizer):
    answer = AnswerText(tokenizer, ("bcd",))
    assert answer.take(event(tokenizer.encode("abc"))).text == "a"
    assert answer.finish_reason is None
    assert answer.take(event([], FinishReason.ABORT)).text == "bc"
    assert answer.finish_reason is FinishReason.ABORT


def test_without_a_tokenizer_there_are_token_ids_alone():
    answer = AnswerText(None)
    new = answer.take(event([5, 6, 7], FinishReason.STOP, stop_token_id=7))
    assert (new.text, new.token_ids, new.num_shown) == ("", [5, 6, 7], 2)
    assert answer.completion_tokens == 3


def test_an_event_that_says_nothing_of_the_prompt_changes_nothing(tokenizer: Tokenizer):
    answer = AnswerText(tokenizer)
    answer.take(event(tokenizer.encode("a"), cached_tokens=2))
    answer.take(RequestEvent("r", finish_reason=FinishReason.ERROR))
    assert (answer.prompt_tokens, answer.cached_tokens) == (3, 2)


def test_a_text_may_end_with_the_stop_string_that_ended_it(tokenizer: Tokenizer):
    ids = tokenizer.encode(LETTERS)
    answer = AnswerText(tokenizer, ("bcd", "b!"), show_stop=True)
    assert answer.take(event(ids[:4])).text == "x!a"
    new = answer.take(event(ids[4:], FinishReason.STOP, stop_token_id=ids[-1]))
    assert (new.text, new.token_ids, new.num_shown) == ("bcd", ids[4:6], 2)
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "bcd")
    assert (answer.stop_hit, answer.completion_tokens) == ("bcd", 6)


@pytest.mark.parametrize("visible", [False, True])
def test_a_text_may_end_with_the_id_that_ended_it(tokenizer: Tokenizer, visible: bool):
    ids = tokenizer.encode("abc")
    answer = AnswerText(tokenizer, show_stop=True)
    new = answer.take(event(ids, FinishReason.STOP, stop_token_id=ids[-1]))
    assert (new.text, new.token_ids, new.num_shown) == ("abc", ids, 3)
    eos = tokenizer.eos_token_ids[0]
    shown = tokenizer.special_ids if visible else frozenset()
    answer = AnswerText(tokenizer, visible_ids=shown, show_stop=True)
    new = answer.take(event([ids[0], eos], FinishReason.STOP, stop_token_id=eos))
    assert (new.text, new.num_shown) == (("a<eos>", 2) if visible else ("a", 1))
    assert answer.completion_tokens == 2
