"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from megatron_hybrid.drafting import ngram_index
from megatron_hybrid.drafting.ngram_index import GrowingText, NgramIndex
from megatron_hybrid.drafting.prompt_lookup import SIZES, PromptLookup

WORDS = st.lists(st.integers(0, 3), max_size=40)
PIECES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=12)


def last_place(tokens: list[int], size: int) -> int | None:
    """Behind the last earlier run of the last `size` tokens."""
    if len(tokens) < size:
        return None
    tail = tokens[-size:]
    ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tail]
    return max(ends, default=None)


def by_hand(tokens: list[int]) -> int | None:
    return next((e for size in SIZES if (e := last_place(tokens, size)) is not None), None)


@given(WORDS, PIECES, st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_the_last_earlier_place_is_found(first: list[int], pieces: list[list[int]], size: int):
    text = GrowingText(first)
    index = NgramIndex(text, size)
    tokens = list(first)
    assert index.find() == last_place(tokens, size)
    for piece in pieces:
        text.extend(piece)
        tokens += piece
        assert text.tokens.tolist() == tokens
        assert index.find() == last_place(tokens, size)


@given(WORDS, PIECES)
@settings(max_examples=100, deadline=None)
def test_runs_with_the_same_hash_are_told_apart(first: list[int], pieces: list[list[int]]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "_MULTIPLIER", np.uint64(0))  # only the last token counts
        text = GrowingText(first)
        index, tokens = NgramIndex(text, 3), list(first)
        for piece in pieces:
            text.extend(piece)
            tokens += piece
            assert index.find() == last_place(tokens, 3)


@given(WORDS, PIECES, st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_a_guess_goes_on_from_where_the_text_was_before(
    first: list[int], pieces: list[list[int]], count: int
):
    """From the place where it was found first, while it goes on as it did there."""
    lookup, tokens, source = PromptLookup(first), list(first), None
    for piece in [[], *pieces]:
        lookup.extend(piece)
        tokens += piece
        if source is not None:
            went_on = tokens[source : source + len(piece)] == piece
            source = source + len(piece) if went_on else None
        source = by_hand(tokens) if source is None else source
        expected = []
        if source is not None:
            longer = list(tokens)
            for place in range(source, source + count):  # what it has guessed itself counts, too
                longer.append(longer[place])
            expected = longer[len(tokens) :]
        assert lookup.guess(count).tolist() == expected


def test_a_text_that_repeats_is_guessed_to_repeat_on():
    assert PromptLookup([7, 1, 2, 1, 2, 1]).guess(5).tolist() == [2, 1, 2, 1, 2]
    assert PromptLookup([5, 6, 7, 8, 9, 5, 6]).guess(3).tolist() == [7, 8, 9]
    assert PromptLookup([5, 6, 7, 8]).guess(3).tolist() == []
    assert PromptLookup([]).guess(3).tolist() == []
