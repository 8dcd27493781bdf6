"""Thoughts that have come to their budget are ended: the next tokens are the mark that does it.

Nothing is looked at before an answer is as long as its budget, so that until then it is computed
like any other, with drafts and with a step in flight. Then a step waits for its tokens: they say
whether it still thinks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_hybrid.engine.context import DynamicInferenceContext


class Thoughts:
    """Of the requests that have rows."""

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self._rows = context.rows

    @property
    def need_tokens(self) -> bool:
        """Whether tokens in flight have to be known before the coming step can be planned."""
        return bool(self._rows.limited) and bool(self._rows.decoding[self._due()].any())

    def plan(self) -> None:
        """Say which tokens the coming step has to sample; all those before it are known where that
        is needed."""
        rows = self._rows
        for row in list(rows.forced):
            rows.let_choose(row, self._context.running_in(row).request.params)
        for row in self._due().tolist() if rows.limited else ():
            request = self._context.running_in(row).request
            assert request.thoughts is not None
            token = request.thoughts.force(request.output)
            rows.look_at[row] = request.thoughts.look_at
            if token is not None:
                rows.force(row, token)

    def _due(self) -> npt.NDArray[np.int64]:
        """Rows whose answers, with all that is in flight, may be long enough to be looked at."""
        rows = self._rows
        who = np.fromiter(rows.limited, dtype=np.int64)
        return who[rows.most_written(who) >= rows.look_at[who]]
