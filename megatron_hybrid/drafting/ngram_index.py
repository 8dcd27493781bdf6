"""Where a text has been before: the last place at which its last few tokens stood already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with its bits in no order


class GrowingText:
    """A text that gets longer; `tokens` is all of it so far."""

    def __init__(self, tokens: Sequence[int] | Tokens) -> None:
        self._buffer: Tokens = np.array(tokens, dtype=np.int32)
        self._length = len(self._buffer)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        return self._buffer[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes time that does not depend on the length so far, on average."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        self._length = end


class NgramIndex:
    """Of all runs of `size` tokens of a text, where each stood last.

    The text's first part is sorted by hashes at once; what is appended goes into a dict.
    """

    def __init__(self, text: GrowingText, size: int) -> None:
        self._text = text
        self._size = size
        self._added: dict[tuple[int, ...], int] = {}  # a run -> where it ended last
        self._next_end = max(len(text), size)  # of the first run that is not indexed
        # All runs that something follows, by hash, then by place: [runs].
        hashes = _hashes(text.tokens[:-1], size)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._ends = hashes[order], order + size

    def find(self) -> int | None:
        """The position behind the last earlier place of the text's last `size` tokens; None: they
        never stood anywhere else."""
        tokens, size = self._text.tokens, self._size
        if len(tokens) < size:
            return None
        self._add(tokens)
        tail = tokens[-size:]
        end = self._added.get(tuple(tail.tolist()))
        return self._find_in_first_part(tokens, tail) if end is None else end

    def _add(self, tokens: Tokens) -> None:
        """Index the runs that something follows by now."""
        size = self._size
        recent = tokens[self._next_end - size :].tolist()
        for end in range(self._next_end, len(tokens)):
            begin = end - self._next_end
            self._added[tuple(recent[begin : begin + size])] = end
        self._next_end = max(self._next_end, len(tokens))

    def _find_in_first_part(self, tokens: Tokens, tail: Tokens) -> int | None:
        (wanted,) = _hashes(tail, self._size)
        place = int(np.searchsorted(self._hashes, wanted, side="right")) - 1
        while place >= 0 and self._hashes[place] == wanted:
            end = int(self._ends[place])
            if np.array_equal(tokens[end - self._size : end], tail):
                return end
            place -= 1  # another run with the same hash
        return None


def _hashes(tokens: Tokens, size: int) -> npt.NDArray[np.uint64]:
    """[len(tokens) - size + 1]: of each run of `size` tokens, a polynomial modulo 2^64."""
    count = max(len(tokens) - size + 1, 0)
    found = np.zeros(count, dtype=np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        for ahead in range(size):
            found = found * _MULTIPLIER + values[ahead : ahead + count]
    return found
