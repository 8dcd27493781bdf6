"""Where rows are that are copied by themselves between a GPU's caches and pages of host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_hybrid.execution.batch_copies import Copies, Numbers, Place, copies_of
from megatron_hybrid.execution.page_parts import Part, RoundedPart

# Bytes of a row, on average, from which copying each by itself is as quick as gathering them.
LONG_ROW = 2**17


def addresses(rows: Tensor, numbers: npt.ArrayLike) -> Numbers:
    """Where rows begin of a contiguous tensor."""
    row = np.uint64(rows.stride(0) * rows.itemsize)
    return np.uint64(rows.data_ptr()) + np.asarray(numbers, dtype=np.uint64) * row


def runs(*numbers: Sequence[int]) -> tuple[npt.NDArray[np.int64], Numbers]:
    """Where each begins of the longest runs in which all of them go up by one, and how long it is.
    There is one number of each at least."""
    is_next = np.logical_and.reduce([np.diff(some) == 1 for some in numbers])
    begins = np.append(0, np.flatnonzero(~is_next) + 1)
    return begins, np.diff(begins, append=len(numbers[0])).astype(np.uint64)


class LongRows:
    """Of parts of a KV block, or of a state."""

    def __init__(self, parts: Sequence[Part], pages: Tensor) -> None:
        self._pages, word = pages, pages.itemsize
        self._page_bytes = page = pages.shape[1] * word
        self._rows = np.array([part.rows.data_ptr() for part in parts], dtype=np.uint64)
        self._sizes = np.array([part.row_bytes for part in parts], dtype=np.uint64)
        self._places = np.array([part.start * word for part in parts], dtype=np.uint64)
        self._firsts = np.array([part.first for part in parts], dtype=np.uint64)
        # One row of each, one behind the other: where a part or a page begins.
        end = int(self._places[-1] + self._sizes[-1])
        inner = np.arange(page, end, page, dtype=np.uint64)
        self._begins = np.union1d(self._places, inner)
        self._cut_sizes: Numbers = np.append(self._begins[1:], np.uint64(end)) - self._begins
        self._part_of = np.searchsorted(self._places, self._begins, side="right") - 1

    @classmethod
    def of(cls, parts: Sequence[Part], pages: Tensor) -> LongRows | None:
        """None where they are too short, or something else in pages."""
        if not parts or any(isinstance(part, RoundedPart) for part in parts):
            return None
        is_long = sum(part.row_bytes for part in parts) >= LONG_ROW * len(parts)
        return cls(parts, pages) if is_long else None

    def of_blocks(self, blocks: Sequence[int], pages: Sequence[int], *, to_host: bool) -> Copies:
        """One row of each part for each page; those of a run at once."""
        begins, counts = runs(blocks, pages)
        first = np.asarray(blocks, dtype=np.uint64)[begins, None]
        here = (self._rows + first * self._sizes).ravel()
        there = addresses(self._pages, np.asarray(pages)[begins])[:, None] + self._places
        sizes = np.tile(self._sizes, len(begins))
        pitches = np.full_like(sizes, self._page_bytes)
        rows = np.repeat(counts, len(self._sizes))
        at = Place(here, sizes), Place(there.ravel(), pitches)
        return copies_of(*at, sizes, rows, to_host=to_host)

    def of_state(self, slot: int, pages: Sequence[int], *, to_host: bool) -> Copies:
        """One row of each part, one behind the other over the pages."""
        page, begins, part = self._page_bytes, self._begins, self._part_of
        rows = self._rows + (np.uint64(slot) - self._firsts) * self._sizes
        here = rows[part] + (begins - self._places[part])
        there = addresses(self._pages, pages)[begins // page] + begins % page
        # What is cut by the end of a page, and goes on behind it, is of one piece.
        (is_next_here, is_next_there) = (
            one[1:] == (one + self._cut_sizes)[:-1] for one in (here, there)
        )
        first = np.append(0, np.flatnonzero(~(is_next_here & is_next_there)) + 1)
        sizes = np.add.reduceat(self._cut_sizes, first)
        return copies_of(
            Place(here[first], sizes), Place(there[first], sizes), sizes, to_host=to_host
        )
