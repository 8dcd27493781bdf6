"""Prompt lookup: a text that repeats itself is guessed to go on as it did before.

Saxena, "Prompt Lookup Decoding", 2023: https://github.com/apoorvumang/prompt-lookup-decoding.

The texts of all requests that run lie in one array, a row each. For each of some sizes, a table
says of every run of so many tokens where it stood last: by its hash alone, so that a place may be
another run's, which is seen when the tokens are compared. What a step asks for is looked up for all
its rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_hybrid.drafting.drafter import NO_GUESS, Ints, Tokens

# How many of the last tokens have to have stood together before, the most telling first.
SIZES = (4, 2)
TABLE_BITS = 22  # entries of 8 bytes, which take memory when they are written
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with its bits in no order


class PromptLookup:
    """A Drafter. Takes microseconds a step, whatever the number of rows, and a few nanoseconds for
    each token of a prompt."""

    def __init__(
        self,
        max_requests: int,
        max_length: int,
        sizes: Sequence[int] = SIZES,
        table_bits: int = TABLE_BITS,
    ) -> None:
        """max_length: the most tokens of a text."""
        self._width = max_length
        # Memory is taken where something is written.
        self._texts = np.zeros(max_requests * max_length, dtype=np.int32)
        self._lengths = np.zeros(max_requests, dtype=np.int64)
        self._tables = [_Table(size, table_bits) for size in sizes]

    def begin(self, row: int, text: Tokens, cache_salt: str) -> None:
        self._lengths[row] = 0
        self.extend(np.asarray([row]), text, np.asarray([len(text)]))

    def extend(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        number = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = np.repeat(self._lengths[rows], counts) + number  # in each one's text
        begin = np.repeat(rows * self._width, counts)
        self._texts[begin + offset] = tokens
        self._lengths[rows] += counts
        for table in self._tables:
            # runs that one of the new tokens follows
            known = offset >= table.size
            table.note(self._texts, begin[known], (begin + offset)[known])

    def guess(self, rows: Ints, width: int) -> Ints:
        begin = rows * self._width
        end = begin + self._lengths[rows]
        source = np.full(len(rows), -1, dtype=np.int64)
        for table in self._tables:
            missing = np.flatnonzero((source < 0) & (end - begin >= table.size))
            if len(missing):
                source[missing] = table.find(self._texts, begin[missing], end[missing])
        found = source >= 0
        # What is repeated may end where the text does: then it begins anew.
        period = np.where(found, end - source, 1)
        places = source[:, None] + np.arange(width) % period[:, None]
        return np.where(found[:, None], self._texts[places.clip(min=0)], NO_GUESS).astype(np.int64)


class _Table:
    """Where runs of `size` tokens stood last: the place of the token behind them."""

    def __init__(self, size: int, bits: int) -> None:
        self.size = size
        self._shift = np.uint64(64 - bits)
        self._behind = np.zeros(1 << bits, dtype=np.int64)

    def note(self, texts: Tokens, begin: Ints, behind: Ints) -> None:
        """Runs that end before the places behind [n], of texts that begin at begin [n]. Of those
        with the same hash the last one stays."""
        self._behind[self._hash(texts, begin, behind)] = behind

    def find(self, texts: Tokens, begin: Ints, end: Ints) -> Ints:
        """[n]: the place behind the last earlier run that is the same as the one before end [n], in
        the same text; -1 where there is none."""
        behind = self._behind[self._hash(texts, begin, end)]
        same = (behind >= begin + self.size) & (behind < end)
        for back in range(1, self.size + 1):
            same &= texts[behind - back] == texts[end - back]
        return np.where(same, behind, -1)

    def _hash(self, texts: Tokens, begin: Ints, end: Ints) -> npt.NDArray[np.int64]:
        """Of the texts' beginnings and their `size` tokens before end [n]."""
        with np.errstate(over="ignore"):
            mixed = begin.astype(np.uint64) + np.uint64(1)
            for back in range(self.size, 0, -1):
                mixed = (mixed * _MULTIPLIER) ^ (mixed >> np.uint64(29))
                mixed += texts[end - back].astype(np.uint64)
            return ((mixed * _MULTIPLIER) >> self._shift).astype(np.int64)
