"""Texts of bad words as token ids."""

from __future__ import annotations

import pytest

from megatron_hybrid import reference_model
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.text.bad_words import with_token_ids
from megatron_hybrid.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(reference_model.path())


def words(tokenizer: Tokenizer, *texts: str | tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(with_token_ids(SamplingParams(bad_words=texts), tokenizer).bad_words)


def ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def test_a_word_is_meant_at_the_beginning_and_behind_a_space(tokenizer):
    own, within = ids(tokenizer, "don't"), ids(tokenizer, " don't")
    assert len(own) != len(within), "they differ in more than their first token"
    assert words(tokenizer, "don't") == words(tokenizer, " don't") == [own, within]


def test_what_says_no_more_is_left_out(tokenizer):
    for text in ("\n", " ", "."):
        (only,) = words(tokenizer, text)[:1]
        assert only == ids(tokenizer, text)
    assert words(tokenizer, " ") == [ids(tokenizer, " ")]


def test_ids_stay_as_they_are(tokenizer):
    assert words(tokenizer, (5, 6), "don't")[0] == (5, 6)
    params = SamplingParams(bad_words=())
    assert with_token_ids(params, tokenizer) is params


def test_a_word_of_too_many_tokens_is_refused(tokenizer):
    text = "x y " * 17
    with pytest.raises(
        InvalidRequestError, match="which is 51 tokens; it must be 1 to 32"
    ) as caught:
        words(tokenizer, text)
    assert caught.value.field == "bad_words"
