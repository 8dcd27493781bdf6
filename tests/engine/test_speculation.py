"""How many drafts a step gets of the guesses that there are."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hybrid.engine.speculation import Speculation
from megatron_hybrid.execution.plan import NO_DRAFT
from megatron_hybrid.execution.rows import RowTable

STOP = 9


class Guesses:
    """The same of every row."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def begin(self, row: int, text: np.ndarray, cache_salt: str) -> None:
        pass

    def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        pass

    def guess(self, rows: np.ndarray, width: int) -> np.ndarray:
        found = np.full((len(rows), width), NO_DRAFT)
        found[:, : len(self._tokens)] = self._tokens[:width]
        return found


@pytest.mark.parametrize(
    ("guesses", "in_flight", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6], 0, 4),  # as many as a step takes
        ([1, 2, 3], 0, 3),
        ([1, 2, STOP, 4], 0, 2),  # a token that ends an answer is none
        ([1, 2, 3], 1, 2),  # the first stands for the token that the step in flight gives
        ([1, 2, 3, 4, 5, 6], 1, 4),
        ([1], 1, 0),
        ([STOP, 2, 3], 0, 0),
        ([], 0, 0),
    ],
)
def test_drafts_stand_behind_what_the_step_in_flight_adds(
    guesses: list[int], in_flight: int, drafts: int
) -> None:
    """A row with a text of 20 tokens, the last of which is the next to be fed; or with the token
    after it in flight."""
    rows = RowTable(2, 4)
    row = np.array([1])
    speculation = Speculation(rows, Guesses(guesses), num_tokens=4)
    rows.position[row] = 19 + in_flight
    speculation.begin(1, np.arange(20, dtype=np.int32), [STOP], "")
    plan = speculation.choose(row, np.array([8]))
    if not drafts:
        assert plan is None
        return
    assert plan is not None
    assert plan.num_drafts.tolist() == [drafts]
    assert plan.windows[0, : in_flight + drafts].tolist() == guesses[: in_flight + drafts]
    assert STOP not in plan.windows
