"""What guesses the next tokens of running requests on the host, for the model to verify. (A model's
own head does so on the device: execution/head_drafts.py.)"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
NO_GUESS = -1


class Drafter(Protocol):
    """Keeps the texts of the requests that run, each by a row of its own."""

    def begin(self, row: int, text: Tokens, cache_salt: str) -> None:
        """The row has a new request, with this text [tokens]. Requests with different salts must
        learn nothing of one another, and be it by how fast they are answered."""

    def extend(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        """rows [n], each once, go on with counts [n] tokens each; tokens [sum(counts)]."""

    def guess(self, rows: Ints, width: int) -> Ints:
        """[n, width]: what follows in each of these rows [n]; where there is no guess, and behind
        that, NO_GUESS."""
