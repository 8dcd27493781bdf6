"""How many drafts each decoding request gets, and which: as many as have paid for it so far."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_hybrid.execution.plan import MOST_STOP_IDS, NO_DRAFT, DraftPlan
from megatron_hybrid.execution.rows import RowTable

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

LONGEST_PAUSE = 6  # 2^6 steps, after as many steps without an accepted draft


class Drafter(Protocol):
    """What guesses the next tokens of running requests on the host, for the model to verify. (A
    model's own head does so on the device: execution/head_drafts.py.) Keeps the texts of the
    requests, each by a row of its own."""

    def begin(self, row: int, text: Tokens, cache_salt: str) -> None:
        """The row has a new request, with this text [tokens]. Requests with different salts must
        learn nothing of one another, and be it by how fast they are answered."""

    def extend(self, rows: Ints, tokens: Tokens, counts: Ints) -> None:
        """rows [n], each once, go on with counts [n] tokens each; tokens [sum(counts)]."""

    def guess(self, rows: Ints, width: int) -> Ints:
        """[n, width]: what follows in each of these rows [n]; where there is no guess, and behind
        that, NO_DRAFT."""


class Speculation:
    """Between the scheduler and a drafter. All figures are by row of the row table. Without a
    drafter the device makes the drafts, by the model's head, and here is decided how many.

    A request's drafts double in number while all are accepted, up to num_tokens; where some are
    not, the next ones are one more than were. After a step without an accepted one it goes without
    for a while, and twice as long each time; and until some are accepted again it has no drafts
    while the last ones are in flight, which most likely are not accepted either.
    """

    def __init__(self, rows: RowTable, drafter: Drafter | None, num_tokens: int) -> None:
        """num_tokens: the most drafts of a request in a step."""
        self.num_tokens = num_tokens
        self._rows = rows
        self.drafter = drafter
        count = len(rows.decoding)
        self._can_draft = np.zeros(count, dtype=bool)
        self._stop_ids = np.full((count, MOST_STOP_IDS), NO_DRAFT, dtype=np.int64)
        self._known = np.zeros(count, dtype=np.int64)  # tokens of its text
        self._next = np.zeros(count, dtype=np.int64)  # drafts in its next step
        self._pause = np.zeros(count, dtype=np.int64)  # steps until then
        self._failures = np.zeros(count, dtype=np.int64)  # steps without an accepted one, on end
        self._is_proven = np.zeros(count, dtype=bool)  # some of its last drafts were accepted

    def begin(self, row: int, text: Tokens, stop_ids: Sequence[int], cache_salt: str) -> None:
        """A request with this text, prompt and answer so far, has the row from now on."""
        self._can_draft[row] = len(stop_ids) <= MOST_STOP_IDS
        if not self._can_draft[row]:
            return
        self._stop_ids[row] = NO_DRAFT
        self._stop_ids[row, : len(stop_ids)] = stop_ids
        self._known[row] = len(text)
        self._next[row] = self.num_tokens
        self._pause[row] = self._failures[row] = 0
        self._is_proven[row] = False
        if self.drafter is not None:
            try:
                self.drafter.begin(row, text, cache_salt)
            except Exception:  # of this request: it can do without
                logger.exception("A request goes on without drafts.")
                self._can_draft[row] = False

    def extend(self, who: Ints, tokens: Sequence[list[int]]) -> None:
        """The requests of the rows `who` [n], each once, have written these tokens."""
        if self.drafter is None:
            return
        counts = np.asarray([len(part) for part in tokens], dtype=np.int64)
        flat = np.asarray([token for part in tokens for token in part], dtype=np.int32)
        drafts = self._can_draft[who]
        if not drafts.all():
            who, flat, counts = who[drafts], flat[np.repeat(drafts, counts)], counts[drafts]
        self._known[who] += counts
        self.drafter.extend(who, flat, counts)

    def choose(self, decodes: Ints, most: Ints) -> DraftPlan | None:
        """Drafts for the coming step: at most so many for each of its decode rows. None: for no
        row. Called once a step."""
        rows = self._rows
        waits = self._pause[decodes] > 0
        self._pause[decodes[waits]] -= 1
        most = np.minimum(most, self._next[decodes])
        is_own = rows.adjusted[decodes] | (rows.generated[decodes] < rows.min_tokens[decodes])
        tries = self._can_draft[decodes] & ~waits & ~is_own & (most > 0)
        tries &= self._is_proven[decodes] | (rows.unknown[decodes] == 0)
        if not tries.any():
            return None
        if self.drafter is None:
            return self._on_device(decodes, np.where(tries, most, 0))
        # Tokens between the known text and the drafts: the step in flight adds one at least.
        between = rows.next_position(decodes) + 1 - self._known[decodes]
        width = self.num_tokens + int(between[tries].max())
        windows = np.full((len(decodes), width), NO_DRAFT, dtype=np.int64)
        guesses = self.drafter.guess(decodes[tries], width)
        ends = (guesses[:, :, None] == self._stop_ids[decodes[tries], None, :]).any(2)
        ends |= guesses == NO_DRAFT
        found = np.where(ends.any(1), ends.argmax(1), width)
        num_drafts = np.zeros(len(decodes), dtype=np.int64)
        num_drafts[tries] = np.minimum(most[tries], (found - between[tries]).clip(min=0))
        windows[tries] = np.where(np.arange(width) < found[:, None], guesses, NO_DRAFT)
        if not num_drafts.any():
            return None
        return DraftPlan(num_drafts, windows, self._known[decodes])

    def _on_device(self, decodes: Ints, num_drafts: Ints) -> DraftPlan:
        no_window = np.zeros((len(decodes), 0), dtype=np.int64)
        return DraftPlan(num_drafts, no_window, self._known[decodes], self._stop_ids[decodes])

    def note(self, decodes: Ints, drafted: Ints, accepted: Ints) -> None:
        """What has become of a step's drafts, for the rows that still have their requests."""
        tried = drafted > 0
        who, drafted, accepted = decodes[tried], drafted[tried], accepted[tried]
        some = accepted > 0
        self._is_proven[who] = some
        self._next[who] = np.where(accepted == drafted, 2 * drafted, accepted + 1)
        self._next[who] = np.minimum(self._next[who], self.num_tokens)
        self._failures[who] = np.where(some, 0, np.minimum(self._failures[who] + 1, LONGEST_PAUSE))
        self._pause[who] = np.where(some, 0, 2 ** self._failures[who] - 1)
