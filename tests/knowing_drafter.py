"""A drafter for tests, whose drafts hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hybrid import LLM
from megatron_hybrid.engine.draft_policy import DraftPolicy
from megatron_hybrid.engine.step_costs import AssumedCosts
from megatron_hybrid.execution.plan import NO_DRAFT


class Knowing:
    """Has seen the answers, and is wrong at every place that `wrong_every` divides."""

    def __init__(self, texts: Sequence[list[int]], wrong_every: int = 5) -> None:
        """texts: prompts and their answers."""
        self._known = texts
        self._wrong_every = wrong_every
        self._texts: dict[int, list[int]] = {}

    def begin(self, row: int, text: np.ndarray, cache_salt: str) -> None:
        self._texts[row] = text.tolist()

    def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        for row, part in zip(rows.tolist(), np.split(tokens, counts.cumsum())[:-1], strict=True):
            self._texts[row] += part.tolist()

    def guess(self, rows: np.ndarray, width: int) -> np.ndarray:
        found = np.full((len(rows), width), NO_DRAFT, dtype=np.int64)
        for guesses, row in zip(found, rows.tolist(), strict=True):
            text = self._texts[row]
            whole = next((known for known in self._known if known[: len(text)] == text), [])
            following = whole[len(text) : len(text) + width]
            guesses[: len(following)] = following
            wrong = (len(text) + np.arange(width)) % self._wrong_every == 0
            guesses[wrong] = (guesses[wrong] + 1) % 100
        return found


def with_drafts(llm: LLM, drafter: Knowing) -> LLM:
    """The same, which has its drafts from this drafter now."""
    assert llm.engine.scheduler.decodes.speculation is not None
    llm.engine.scheduler.decodes.speculation.drafter = drafter
    return without_clock(llm)


def without_clock(llm: LLM) -> LLM:
    """The same, whose drafts do not depend on what steps take."""
    speculation = llm.engine.scheduler.decodes.speculation
    assert speculation is not None
    costs = AssumedCosts(speculation.num_tokens)
    speculation.policy = DraftPolicy(costs, row_by_row=speculation.drafter is None)
    return llm
