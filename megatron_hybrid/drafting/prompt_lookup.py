"""Prompt lookup: a text that repeats itself is guessed to go on as it did before.

Saxena, "Prompt Lookup Decoding", 2023: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hybrid.drafting.ngram_index import GrowingText, NgramIndex, Tokens

# How many of the last tokens have to have stood together before, the most telling first.
SIZES = (4, 2)
NOTHING: Tokens = np.zeros(0, dtype=np.int32)


class PromptLookup:
    """One request's text, and what is guessed to follow."""

    def __init__(self, prompt: Sequence[int] | Tokens, sizes: Sequence[int] = SIZES) -> None:
        self._text = GrowingText(prompt)
        self._sizes = sizes
        self._indices: list[NgramIndex] = []  # made at the first guess
        self._source: int | None = None  # position that the text is guessed to go on from

    def extend(self, tokens: Sequence[int]) -> None:
        """The request has written these."""
        self._text.extend(tokens)
        if self._source is not None:
            # While it goes on as it did before, nothing needs to be looked up.
            before = self._text.tokens[self._source : self._source + len(tokens)]
            follows = before.tolist() == list(tokens)
            self._source = self._source + len(tokens) if follows else None

    def guess(self, count: int) -> Tokens:
        """`count` tokens that may come next; none where nothing is known."""
        if self._source is None:
            self._source = self._find()
        if self._source is None:
            return NOTHING
        # What is repeated may end where the text does: then it begins anew.
        return np.resize(self._text.tokens[self._source :], count)

    def _find(self) -> int | None:
        if not self._indices:
            self._indices = [NgramIndex(self._text, size) for size in self._sizes]
        return next((end for index in self._indices if (end := index.find()) is not None), None)
