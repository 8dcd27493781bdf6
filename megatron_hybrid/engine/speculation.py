"""How many drafts each decoding request gets, and which: as many as are worth what they cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_hybrid.engine.draft_policy import Acceptance, DraftPolicy
from megatron_hybrid.engine.step_costs import AssumedCosts, StepTimer
from megatron_hybrid.execution.plan import (
    MOST_STOP_IDS,
    NO_DRAFT,
    DraftPlan,
    StepDemand,
    StepPlan,
    StepResult,
)
from megatron_hybrid.execution.rows import RowTable

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]


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

    How likely a row's drafts hold is learned from those before. What steps take is known of the
    timer; the policy chooses by both.
    """

    def __init__(
        self,
        rows: RowTable,
        drafter: Drafter | None,
        num_tokens: int,
        policy: DraftPolicy | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        """num_tokens: the most drafts of a request in a step. policy: None for one that assumes
        what steps take."""
        self.num_tokens = num_tokens
        self._rows = rows
        self.drafter = drafter
        self.policy = policy or DraftPolicy(AssumedCosts(num_tokens), row_by_row=drafter is None)
        self._timer = timer or StepTimer()
        count = len(rows.decoding)
        self._acceptance = Acceptance(count)
        self._can_draft = np.zeros(count, dtype=bool)
        self._stop_ids = np.full((count, MOST_STOP_IDS), NO_DRAFT, dtype=np.int64)
        self._known = np.zeros(count, dtype=np.int64)  # tokens of its text
        self._drafted = np.zeros(count, dtype=np.int64)  # in the last step whose result is here
        self._is_proven = np.zeros(count, dtype=bool)  # some of its last drafts were accepted
        self._is_ahead = False  # drafts are chosen while a step is in flight

    def begin(self, row: int, text: Tokens, stop_ids: Sequence[int], cache_salt: str) -> None:
        """A request with this text, prompt and answer so far, has the row from now on."""
        self._can_draft[row] = len(stop_ids) <= MOST_STOP_IDS
        if not self._can_draft[row]:
            return
        self._stop_ids[row] = NO_DRAFT
        self._stop_ids[row, : len(stop_ids)] = stop_ids
        self._known[row] = len(text)
        self._drafted[row] = 0
        self._is_proven[row] = False
        self._acceptance.begin(row)
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
        plan = self._choose(decodes, most)
        if plan is not None and self.policy.has_paused:
            self._acceptance.age(decodes)
        self.policy.planned(plan is not None)
        return plan

    def _choose(self, decodes: Ints, most: Ints) -> DraftPlan | None:
        rows = self._rows
        is_own = rows.adjusted[decodes] | (rows.generated[decodes] < rows.min_tokens[decodes])
        most = np.where(self._can_draft[decodes] & ~is_own, most, 0).clip(max=self.num_tokens)
        chance = self._acceptance.chance(decodes)
        if self.drafter is None:
            num_drafts = self.policy.choose(chance, np.zeros_like(most), most)
            return None if num_drafts is None else self._on_device(decodes, num_drafts)
        # Guesses behind drafts in flight count only if all of those are right.
        most[(rows.unknown[decodes] > 0) & ~self._is_proven[decodes]] = 0
        # Tokens between the known text and the drafts: the step in flight adds one at least.
        between = np.where(most > 0, rows.next_position(decodes) + 1 - self._known[decodes], 0)
        wanted = self.policy.choose(chance, between, most)
        if wanted is None:
            return None
        self._is_ahead = bool((between > rows.unknown[decodes]).any())
        tries = wanted > 0
        width = self.num_tokens + int(between[tries].max())
        windows = np.full((len(decodes), width), NO_DRAFT, dtype=np.int64)
        guesses = self.drafter.guess(decodes[tries], width)
        ends = (guesses[:, :, None] == self._stop_ids[decodes[tries], None, :]).any(2)
        ends |= guesses == NO_DRAFT
        found = np.where(ends.any(1), ends.argmax(1), width)
        most[~tries] = 0
        most[tries] = np.minimum(most[tries], (found - between[tries]).clip(min=0))
        windows[tries] = np.where(np.arange(width) < found[:, None], guesses, NO_DRAFT)
        num_drafts = self.policy.choose(chance, between, most)  # of what was found
        if num_drafts is None:
            return None
        return DraftPlan(num_drafts, windows, self._known[decodes])

    def _on_device(self, decodes: Ints, num_drafts: Ints) -> DraftPlan:
        no_window = np.zeros((len(decodes), 0), dtype=np.int64)
        return DraftPlan(num_drafts, no_window, self._known[decodes], self._stop_ids[decodes])

    def note(self, decodes: Ints, drafted: Ints, accepted: Ints) -> None:
        """What has become of a step's drafts, for the rows that still have their requests."""
        between = np.zeros_like(drafted)
        if self.drafter is not None and self._is_ahead:
            between = 1 + self._drafted[decodes]  # it was planned with those unknown
        self._drafted[decodes] = drafted
        tried = drafted > 0
        self._is_proven[decodes[tried]] = accepted[tried] > 0
        if tried.any():
            figures = decodes, drafted, accepted, between
            self._acceptance.note(*(column[tried] for column in figures))

    # ------------------------------------------------------------------- time

    def was_planned(self, plan: StepPlan) -> None:
        """A step that computes something; its drafts are chosen."""
        self._timer.begin(plan.step)

    def was_received(self, plan: StepPlan, result: StepResult) -> None:
        """Its result is here. Every rank of a replica calls this for the same steps."""
        timed = None
        if len(plan.decode_rows) and not plan.ended and not plan.prefills:
            timed = StepDemand.of(plan), len(result.tokens)
        for step in self._timer.end(plan.step, timed):
            self.policy.note(step)
