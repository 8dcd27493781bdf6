"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from megatron_hybrid.engine.prompt_lookup import SIZES, PromptLookup
from megatron_hybrid.execution.plan import NO_DRAFT
from tests.thorough import usually

WORDS = st.lists(st.integers(0, 3), max_size=40)
# rows and what each of them goes on with
STEP = st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=6), min_size=1)


def last_place(tokens: list[int], size: int) -> int | None:
    """Behind the last earlier run of the last `size` tokens."""
    if len(tokens) < size:
        return None
    tail = tokens[-size:]
    ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tail]
    return max(ends, default=None)


def by_hand(tokens: list[int], count: int) -> list[int]:
    source = next((e for size in SIZES if (e := last_place(tokens, size)) is not None), None)
    if source is None:
        return [NO_DRAFT] * count
    longer = list(tokens)
    for place in range(source, source + count):  # what it has guessed itself counts, too
        longer.append(longer[place])
    return longer[len(tokens) :]


def extend(lookup: PromptLookup, step: dict[int, list[int]]) -> None:
    tokens = [token for part in step.values() for token in part]
    counts = np.asarray([len(part) for part in step.values()])
    lookup.extend(np.asarray(list(step)), np.asarray(tokens, dtype=np.int32), counts)


def test_a_step_in_which_no_text_grows_changes_no_guess():
    lookup, text = PromptLookup(3, 150, table_bits=16), [1, 2, 3, 4, 1, 2, 3]
    lookup.begin(0, np.asarray(text, dtype=np.int32), "")
    nothing = np.zeros(0, dtype=np.int64)
    lookup.extend(nothing, nothing.astype(np.int32), nothing)
    assert lookup.guess(np.asarray([0]), 2).tolist() == [[4, 1]]
    assert lookup.guess(nothing, 2).shape == (0, 2)


@given(st.lists(WORDS, min_size=3, max_size=3), st.lists(STEP, max_size=12), st.integers(1, 9))
@settings(max_examples=usually(100, 300), deadline=None)
def test_a_guess_goes_on_from_where_the_text_was_last(
    first: list[list[int]], steps: list[dict[int, list[int]]], count: int
):
    lookup, texts = PromptLookup(3, 150, table_bits=16), [list(text) for text in first]
    for row, text in enumerate(texts):
        lookup.begin(row, np.asarray(text, dtype=np.int32), "")
    for step in [{}, *steps]:
        if step:
            extend(lookup, step)
        for row, part in step.items():
            texts[row] += part
        rows = np.asarray([2, 0, 1])
        found = lookup.guess(rows, count).tolist()
        assert found == [by_hand(texts[row], count) for row in rows]


@given(st.lists(WORDS, min_size=2, max_size=6), st.integers(1, 9))
@settings(max_examples=usually(100, 200), deadline=None)
def test_neither_runs_with_the_same_hash_nor_former_texts_are_mistaken(
    texts: list[list[int]], count: int
):
    """A table of two entries: what it finds is right, or nothing is found."""
    lookup = PromptLookup(1, 150, table_bits=1)
    for text in texts:
        lookup.begin(0, np.asarray(text, dtype=np.int32), "")
        (found,) = lookup.guess(np.asarray([0]), count).tolist()
        sources = [
            e
            for size in SIZES
            for e in range(size, len(text))
            if text[e - size : e] == text[-size:]
        ]
        possible = [(text[e:] * (count + 1))[:count] for e in sources]
        assert found in [[NO_DRAFT] * count, *possible]


TEXTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["", "a"]), WORDS), min_size=1, max_size=8
)


@given(TEXTS, st.integers(1, 9))
@settings(max_examples=usually(100, 300), deadline=None)
def test_texts_of_the_same_salt_are_shared_and_no_others(
    begun: list[tuple[int, str, list[int]]], count: int
):
    lookup = PromptLookup(3, 150, shares=True, table_bits=16)
    texts: dict[int, tuple[str, list[int]]] = {}
    for row, salt, text in begun:
        lookup.begin(row, np.asarray(text, dtype=np.int32), salt)
        texts[row] = salt, text
        (found,) = lookup.guess(np.asarray([row]), count).tolist()
        if (own := by_hand(text, count))[0] != NO_DRAFT:
            assert found == own
            continue
        others = [other for whose, other in texts.values() if whose == salt and other is not text]
        tail = text[-4:]
        possible = [
            (other[e:] + [NO_DRAFT] * count)[:count]
            for other in others
            for e in range(4, len(other))
            if len(text) >= 4 and other[e - 4 : e] == tail
        ]
        # a place may have been forgotten for another text's
        assert found in [[NO_DRAFT] * count, *possible]
        if len(begun) == len(texts) and possible and all(salt == s for s, _ in texts.values()):
            assert found != [NO_DRAFT] * count


def test_a_text_that_repeats_is_guessed_to_repeat_on():
    lookup = PromptLookup(1, 100)

    def guess(text: list[int], count: int) -> list[int]:
        lookup.begin(0, np.asarray(text, dtype=np.int32), "")
        return lookup.guess(np.asarray([0]), count)[0].tolist()

    assert guess([7, 1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert guess([5, 6, 7, 8, 9, 5, 6], 3) == [7, 8, 9]
    assert guess([5, 6, 7, 8], 3) == [NO_DRAFT] * 3
    assert guess([], 3) == [NO_DRAFT] * 3
