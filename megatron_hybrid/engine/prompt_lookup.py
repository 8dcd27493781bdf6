"""Prompt lookup: a text that repeats itself is guessed to go on as it did before.

Saxena, "Prompt Lookup Decoding", 2023: https://github.com/apoorvumang/prompt-lookup-decoding.

The texts of all requests that run lie in one array, a row each. For each of some sizes, a table
says of every run of so many tokens where it stood last: by its hash alone, so that a place may be
another run's, which is seen when the tokens are compared. What a step asks for is looked up for all
its rows at once.

Texts of the same cache_salt may be shared: then a row that does not repeat itself is guessed to go
on as another one did, which runs, or ran in a row that nobody has taken since.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from megatron_hybrid.engine.speculation import Drafter, Ints, Tokens
from megatron_hybrid.execution.plan import NO_DRAFT

# How many of the last tokens have to have stood together before, the most telling first.
SIZES = (4, 2)
SHARED_SIZES = (4,)
TABLE_BITS = 22  # entries of 8 bytes, which take memory when they are written
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with its bits in no order


class PromptLookup(Drafter):
    """A Drafter. Takes microseconds a step, whatever the number of rows, and a few nanoseconds for
    each token of a prompt."""

    def __init__(
        self,
        max_requests: int,
        max_length: int,
        *,
        shares: bool = False,
        table_bits: int = TABLE_BITS,
    ) -> None:
        """max_length: the most tokens of a text. shares: those of the same salt."""
        self._width = max_length
        # Memory is taken where something is written.
        self._texts = np.zeros(max_requests * max_length, dtype=np.int32)
        self._lengths = np.zeros(max_requests, dtype=np.int64)
        self._scopes = np.zeros(max_requests, dtype=np.uint64)  # of the texts' salts
        self._own = [_Table(size, table_bits) for size in SIZES]
        self._shared = [_Table(size, table_bits) for size in SHARED_SIZES] if shares else []

    def begin(self, row: int, text: Tokens, cache_salt: str) -> None:
        self._lengths[row] = 0
        digest = blake2b(cache_salt.encode(), digest_size=8).digest()
        self._scopes[row] = int.from_bytes(digest, "little")
        self.extend(np.asarray([row]), text, np.asarray([len(text)]))

    def extend(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        number = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = np.repeat(self._lengths[rows], counts) + number  # in each one's text
        row = np.repeat(rows, counts)
        place = row * self._width + offset
        self._texts[place] = tokens
        self._lengths[rows] += counts
        for tables, scopes in ((self._own, row), (self._shared, self._scopes[row])):
            for table in tables:
                # runs that one of the new tokens follows
                known = offset >= table.size
                table.note(self._texts, scopes[known], place[known])

    def guess(self, rows: Ints, width: int) -> Ints:
        lengths = self._lengths[rows]
        end = rows * self._width + lengths
        source = np.full(len(rows), -1, dtype=np.int64)  # the place to go on from
        for tables, scopes in ((self._own, rows), (self._shared, self._scopes[rows])):
            for table in tables:
                missing = np.flatnonzero((source < 0) & (lengths >= table.size))
                if len(missing):
                    found = table.find(self._texts, scopes[missing], end[missing])
                    is_valid = self._may_read(rows[missing], found, table.size, tables is self._own)
                    source[missing] = np.where(is_valid, found, -1)
        whose = source // self._width
        is_own = whose == rows
        # What is repeated may end where the text does: then it begins anew, if it is the row's own.
        steps = np.arange(width)
        steps = np.where(is_own[:, None], steps % np.maximum(end - source, 1)[:, None], steps)
        places = source[:, None] + steps
        ends = whose * self._width + self._lengths[whose]
        has_guess = (source >= 0)[:, None] & (places < ends[:, None])
        guesses = self._texts[np.where(has_guess, places, 0)]
        return np.where(has_guess, guesses, NO_DRAFT).astype(np.int64)

    def _may_read(
        self, rows: Ints, found: Ints, size: int, only_own: bool
    ) -> npt.NDArray[np.bool_]:
        """Whether what stands at the places `found` (-1: nowhere) is of a text that each of the
        rows [n] may know, and behind `size` tokens of it."""
        whose, offset = found // self._width, found % self._width
        is_inside = (found >= 0) & (offset >= size) & (offset < self._lengths[whose])
        if only_own:
            return is_inside & (whose == rows)
        return is_inside & (self._scopes[whose] == self._scopes[rows])


class _Table:
    """Where runs of `size` tokens stood last: the place of the token behind them."""

    def __init__(self, size: int, bits: int) -> None:
        self.size = size
        self._shift = np.uint64(64 - bits)
        self._behind = np.zeros(1 << bits, dtype=np.int64)

    def note(self, texts: Tokens, scopes: npt.NDArray[np.integer], behind: Ints) -> None:
        """Runs before the places behind [n], in these scopes [n]. Of those with the same hash the
        last one stays."""
        self._behind[self._hash(texts, scopes, behind)] = behind

    def find(self, texts: Tokens, scopes: npt.NDArray[np.integer], end: Ints) -> Ints:
        """[n]: the place behind the last run that is the same as the one before end [n] and was
        noted in its scope, or in another one with the same hash; -1 where there is none."""
        behind = self._behind[self._hash(texts, scopes, end)]
        same = (behind >= self.size) & (behind != end)
        for back in range(1, self.size + 1):
            same &= texts[behind - back] == texts[end - back]
        return np.where(same, behind, -1)

    def _hash(
        self, texts: Tokens, scopes: npt.NDArray[np.integer], end: Ints
    ) -> npt.NDArray[np.int64]:
        """Of the scopes and the `size` tokens before end [n]."""
        with np.errstate(over="ignore"):
            mixed = scopes.astype(np.uint64) + np.uint64(1)
            for back in range(self.size, 0, -1):
                mixed = (mixed * _MULTIPLIER) ^ (mixed >> np.uint64(29))
                mixed += texts[end - back].astype(np.uint64)
            return ((mixed * _MULTIPLIER) >> self._shift).astype(np.int64)
