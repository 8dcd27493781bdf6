"""What the scheduler decided for one step, what came out of it, and who computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.lease import StateMove, TailCopy
from megatron_hybrid.request import TokenLogprob

WeightsSource = Any  # opaque down here: of models.checkpoints.updates


class PrefillChunk(NamedTuple):
    """Prompt tokens [start, end) of one request."""

    row: int
    owner: Any  # the scheduler's request; opaque down here
    tokens: npt.NDArray[np.int32]  # [end - start]
    start: int
    end: int
    write_from: int  # KV below this position is shared and not written
    read_slot: int
    write_slot: int
    checkpoints: tuple[tuple[int, int], ...]  # (position, slot) inside the chunk, before its end
    samples: bool  # ends the prompt: its last logits give a token
    # the prompt token after each of `tokens` from `logprobs_from` on, if the request wants their
    # log-probabilities; None: of none of them
    logprob_targets: npt.NDArray[np.int32] | None
    num_top_logprobs: int
    logits_slot: int = 0  # where the logits of the chunk's last token are kept; 0: nowhere
    logprobs_from: int = 0  # which of `tokens` the first of `logprob_targets` comes behind

    @property
    def length(self) -> int:
        """Tokens that it computes."""
        return self.end - self.start


class ResumedRow(NamedTuple):
    """A request whose whole prompt was found in the cache: it computes nothing in this step and
    samples from the logits that were kept in `logits_slot`."""

    row: int
    owner: Any  # as in PrefillChunk
    logits_slot: int


NO_DRAFT = -1  # in the place of a draft: no token is equal to it
MOST_STOP_IDS = 16  # a request with more has no drafts


@dataclass(slots=True)
class DraftPlan:
    """How the decodes of a step take up the accepted drafts of the last step, and which drafts they
    have themselves; by decode row. See docs/speculative_decoding.md."""

    num_drafts: npt.NDArray[np.int64]  # [decodes], behind the next token of each
    # Guesses of each row's tokens from position window_start on, filled up with NO_DRAFT. Since the
    # step in flight adds to the text, the drafts stand anywhere in them.
    windows: npt.NDArray[np.int64]  # [decodes, width]
    window_start: npt.NDArray[np.int64]  # [decodes]
    # [decodes, MOST_STOP_IDS] tokens that end each row's answer, filled up with NO_DRAFT, where the
    # device makes the drafts: none of them is one
    stop_ids: npt.NDArray[np.int64] | None = None
    # [decodes] The state after so many tokens is stored as well, if the step passes it; slot 0:
    # nothing is.
    checkpoint_position: npt.NDArray[np.int64] = field(init=False)
    checkpoint_slot: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint_position, self.checkpoint_slot = np.zeros(
            (2, len(self.num_drafts)), dtype=np.int64
        )

    @classmethod
    def nothing(cls, decodes: int) -> DraftPlan:
        """Of so many decodes, none of which has drafts."""
        none = np.zeros(decodes, dtype=np.int64)
        return cls(none, np.zeros((decodes, 0), dtype=np.int64), none)

    @property
    def widest(self) -> int:
        """How many drafts the device has to make for each row; 0: they are in the windows."""
        return 0 if self.stop_ids is None else int(self.num_drafts.max(initial=0))


class CatchUp(NamedTuple):
    """The unfolded tokens go into the state of a row that computes nothing more: the state is to be
    the one after `position` tokens. Comes before all else in a step."""

    row: int
    position: int
    unfolded: int
    slot: int  # of the state, which is read and written
    checkpoint_position: int  # as in DraftPlan
    checkpoint_slot: int


@dataclass(slots=True)
class StepPlan:
    """One step: the rows that decode, the chunks that prefill, and the rows that only sample, in
    the order of the batch."""

    step: int
    decode_rows: npt.NDArray[np.int64]
    decode_owners: list[Any] = field(default_factory=list)  # of decode_rows; as in PrefillChunk
    prefills: list[PrefillChunk] = field(default_factory=list)
    resumed: list[ResumedRow] = field(default_factory=list)
    copies: list[TailCopy] = field(default_factory=list)
    window_copies: list[TailCopy] = field(default_factory=list)  # of window blocks
    # [decodes] whose states are written; those of the others keep what they take in, for a later
    # step. None: all. With drafts all are written, too.
    writes: npt.NDArray[np.bool_] | None = None
    drafts: DraftPlan | None = None  # None: decodes are of one token, and none is to be taken up
    catch_ups: list[CatchUp] = field(default_factory=list)
    packs: list[StateMove] = field(default_factory=list)  # from full slots to packed ones
    unpacks: list[StateMove] = field(default_factory=list)  # and back; after these
    adapters: bool = False  # whether any running row has one

    @property
    def num_drafts(self) -> int:
        """Drafts of all decodes together."""
        return 0 if self.drafts is None else int(self.drafts.num_drafts.sum())

    @property
    def is_empty(self) -> bool:
        """Nobody computes or samples; there may be states to catch up."""
        return len(self.decode_rows) == 0 and not self.prefills and not self.resumed

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all chunks of prompts."""
        return sum(chunk.length for chunk in self.prefills)

    @property
    def num_pairs(self) -> int:
        """Of a token of a chunk and one that it may see: about what attention has to do for it."""
        return sum(chunk.length * chunk.end for chunk in self.prefills)

    @property
    def ended(self) -> list[PrefillChunk | ResumedRow]:
        """Whose prompts are computed with this step."""
        ended: list[PrefillChunk | ResumedRow] = [c for c in self.prefills if c.samples]
        return [*ended, *self.resumed] if self.resumed else ended

    @property
    def sampled_rows(self) -> npt.NDArray[np.int64]:
        """Rows that get tokens: decodes, prompts that end, resumed rows."""
        ended = self.ended
        if not ended:
            return self.decode_rows
        return np.append(self.decode_rows, [one.row for one in ended])

    @property
    def sampled_owners(self) -> list[Any]:
        """Whose the `sampled_rows` are. A row may have another owner by the time of the result."""
        return self.decode_owners + [one.owner for one in self.ended]

    @property
    def owners(self) -> list[Any]:
        """Everybody in the step."""
        chunks = [chunk.owner for chunk in self.prefills]
        return self.decode_owners + chunks + [resumed.owner for resumed in self.resumed]


class StepDemand(NamedTuple):
    """What a step needs room for; of several replicas, the most that any of them needs."""

    tokens: int = 0  # that the model computes; 0: it is not run
    rows: int = 0  # of logits
    decodes: int = 0
    prefill_tokens: int = 0
    prompts: int = 0
    checkpoints: int = 0  # stored in the middle of prompts
    eager: int = 0  # 1: no graph fits, because prompts want log-probabilities
    drafts: int = 0
    runs: int = 0  # 1: decodes take up accepted drafts, or have some
    widest: int = 0  # drafts of the row that has most, where the device makes them row by row
    pairs: int = 0  # of a prompt's token and one that it may see
    adapters: int = 0  # 1: some token has one

    @classmethod
    def of(cls, plan: StepPlan) -> StepDemand:
        """What a plan asks of the ranks that compute it."""
        decodes, chunks = len(plan.decode_rows), plan.prefills
        drafts, prefill_tokens = plan.num_drafts, plan.num_prefill_tokens
        targets = [c.logprob_targets for c in chunks if c.logprob_targets is not None]
        ended = sum(chunk.samples for chunk in chunks)
        return cls(
            tokens=decodes + drafts + prefill_tokens,
            rows=decodes + drafts + ended + sum(len(target) for target in targets),
            decodes=decodes,
            prefill_tokens=prefill_tokens,
            prompts=len(chunks),
            checkpoints=sum(len(chunk.checkpoints) for chunk in chunks),
            eager=int(bool(targets)),
            drafts=drafts,
            runs=int(plan.drafts is not None),
            widest=0 if plan.drafts is None else plan.drafts.widest,
            pairs=plan.num_pairs,
            adapters=int(plan.adapters),
        )


class StepResult(NamedTuple):
    """What the device returned."""

    tokens: npt.NDArray[np.int64]  # of StepPlan.sampled_rows, one after the other
    logprobs: dict[int, list[TokenLogprob | float]]  # by row, as RequestEvent has them
    prompt_logprobs: dict[int, list[TokenLogprob]]  # by row, one for each of its logprob_targets
    accepted: npt.NDArray[np.int64] | None = None  # [decodes] drafts; None: there were none

    def tokens_by_row(self) -> list[list[int]]:
        """Of each of StepPlan.sampled_rows: one, and one for each accepted draft."""
        tokens: list[int] = self.tokens.tolist()
        if self.accepted is None:
            return [[token] for token in tokens]
        counts = [1] * (len(tokens) - int(self.accepted.sum()))
        counts[: len(self.accepted)] = (self.accepted + 1).tolist()
        ends = list(accumulate(counts, initial=0))
        return [tokens[begin:end] for begin, end in pairwise(ends)]


class Launched(Protocol):
    """A step that was given to the device."""

    def result(self) -> StepResult:
        """Wait for the step and return its tokens; called once. Raises DeviceLostError if nothing
        that the device holds can be trusted any more."""


class Runner(Protocol):
    """What the engine asks of whatever computes its steps."""

    # Whether `launch` returns before the step is done. Then the engine launches a step before it
    # asks for the result of the one before, so tokens have to reach the next step on the device.
    asynchronous: bool

    def launch(self, plan: StepPlan, agreed: StepDemand | None = None) -> Launched:
        """Begin a step; steps take effect in the order of their launches. What the plan and the
        row table say is read before this returns: the engine changes the table right after.

        `agreed`: of the lockstep group; the others' dummies or steps belong to this one.

        Raises on failure; caches of the step's own requests may be spoiled then.
        """

    def dummy_forward(self, agreed: StepDemand | None = None) -> None:
        """Run the model for nobody: join the collectives of a step for which the lockstep group's
        demand is `agreed`, change nothing."""

    def capture_next(self) -> bool:
        """There is no work: capture one of the CUDA graphs that are left for later; whether there
        was one. Every rank calls it between the same steps."""

    def catch_up(self, catch_ups: Sequence[CatchUp]) -> None:
        """These alone: a step that computes nothing."""

    def update_weights(self, source: WeightsSource) -> frozenset[str]:
        """Overwrite the model's weights in place; names of those that stay as they are. Raises
        WeightsError, without any effect, for weights that do not fit; after another error nothing
        can be computed any more."""

    def load_adapter(
        self, slot: int | None, source: WeightsSource, config: Mapping[str, Any] | None
    ) -> str:
        """Put an adapter into a slot that nobody uses; the digest of its weights. Raises
        WeightsError for one that does not fit, and for no slot (None), on every rank."""
