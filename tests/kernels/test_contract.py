"""The bounds of kernel chunks against a walk over all positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hybrid.kernels.contract import chunk_bounds

# (start, length) of a sequence's tokens.
SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def walked(sequences: list[tuple[int, int]], chunk: int) -> list[int]:
    """A chunk begins with each sequence's first token and at each multiple of `chunk`."""
    bounds, token = [], 0
    for start, length in sequences:
        for position in range(start, start + length):
            if position == start or position % chunk == 0:
                bounds.append(token)
            token += 1
    return [*bounds, token]


def bounds_of(sequences: list[tuple[int, int]], chunk: int) -> list[int]:
    starts, lengths = np.array(sequences, dtype=np.int64).reshape(-1, 2).T
    bounds: list[int] = chunk_bounds(starts, lengths, chunk).tolist()
    return bounds


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, st.integers(1, 16))
@example([], 4)
@example([(0, 0), (3, 0)], 4)  # nothing but empty sequences
@example([(5, 0), (4, 8), (7, 0), (8, 4), (9, 0)], 4)  # empty ones before, between and behind
@example([(4, 1), (5, 1), (7, 1), (8, 1)], 4)  # single tokens: on the grid, off it, before it
@example([(3, 2), (2, 2), (0, 4), (0, 5)], 4)  # over the grid, up to it, one chunk, one token more
def test_bounds_are_those_of_a_walk(sequences: list[tuple[int, int]], chunk: int) -> None:
    assert bounds_of(sequences, chunk) == walked(sequences, chunk)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_long_sequences_and_other_integers(dtype: type[np.integer]) -> None:
    """As the engine has them: positions up to a million, chunks of 256."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 2**20, 40).astype(dtype)
    lengths = rng.integers(0, 600, 40).astype(dtype)
    bounds = chunk_bounds(starts, lengths, 256)
    assert bounds.dtype == np.int64
    expected = walked(list(zip(starts.tolist(), lengths.tolist(), strict=True)), 256)
    assert bounds.tolist() == expected


def test_a_cut_on_the_grid_changes_no_bound() -> None:
    """Hence a state at a grid position is computed from the same chunks."""
    whole = bounds_of([(5, 60)], 8)
    for position in range(8, 65, 8):
        assert bounds_of([(5, position - 5), (position, 65 - position)], 8) == whole
