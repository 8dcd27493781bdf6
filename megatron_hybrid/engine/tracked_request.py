"""TrackedRequest: a request inside the engine, from submission to its last event; and Running: what
it has while it is computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.checkpoint_placement import NO_HINTS, CheckpointHints
from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.engine.adapters import NO_ADAPTER, Adapter
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import RequestEvent, RequestStatus, SamplingParams, TokenLogprob
from megatron_hybrid.text.grammar import AnswerMatcher
from megatron_hybrid.text.thought_limit import ThoughtLimit

if TYPE_CHECKING:
    from megatron_hybrid.execution.routed_reader import RoutedReader, RoutedReading


def stop_ids_of(
    params: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    """What ends a request, each once; ids that the model does not know never come. Raises
    InvalidRequestError where every token does, and there are to be some."""
    wanted = params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
    stop_ids = tuple(dict.fromkeys(t for t in wanted if t < vocab_size))
    if params.min_tokens and len(stop_ids) == vocab_size:
        raise InvalidRequestError(
            "min_tokens",
            f"min_tokens is {params.min_tokens}, but every token id ends the answer "
            "(stop_token_ids).",
        )
    return stop_ids


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """Whoever asks for n answers makes n of these, with one `request_id` and an `index` each.

    A preempted one waits again, with the tokens that it has generated behind its prompt.
    """

    request_id: str
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    seed: int  # unsigned, 64 bits
    max_tokens: int
    stop_ids: tuple[int, ...]
    index: int = 0  # among those with its request_id
    cache_salt: str = ""
    adapter: Adapter = NO_ADAPTER
    prefilled_by: str = ""  # a peer that has computed its prompt
    priority: int = 0  # a smaller number runs first
    hints: CheckpointHints = NO_HINTS
    arrived: float = 0.0  # times are the engine's clock's, in seconds; nobody decides by them
    admitted: float | None = None  # for the first time
    last_token: float | None = None  # when its last token came, if it was preempted after that
    status: RequestStatus = RequestStatus.WAITING
    rank: tuple[int, int] = (0, 0)  # in the waiting queue
    output: list[int] = field(default_factory=list)  # without what is in flight
    seen: int = 0  # the most tokens that it ever had computed or skipped
    running: Running | None = None
    keys: SequenceKeys | None = None  # maybe not of all its tokens yet
    keys_epoch: int = -1
    first: TrackedRequest | None = None  # of its request_id, if that is another one
    awaits: BlockKey | None = None  # the prefix that a running twin is about to leave
    awaited_tokens: int = 0  # in it
    fetched: BlockKey | None = None  # the prefix that comes from host memory for it
    fetches: int = 0
    asked: bool = False  # whether a store below host memory has anything for it
    deferrals: int = 0
    skip_at_first_deferral: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    grammar: AnswerMatcher | None = None  # has taken all of `output`
    thoughts: ThoughtLimit | None = None
    routed: RoutedReading | None = None  # its experts, as of when it stopped
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> tuple[str, int]:
        """What it is known by."""
        return self.request_id, self.index

    @property
    def is_open(self) -> bool:
        """Whether its last event is still to come."""
        return self.status is not RequestStatus.FINISHED

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt, as it came."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose computation was skipped."""
        return self.counters["skipped_tokens"]

    @property
    def first_logits(self) -> int | None:
        """The first token whose logits are wanted for log-probabilities of the prompt, which come
        with the first token of the first of its request_id; None: nobody waits for any."""
        if self.params.prompt_logprobs is None or self.index or self.output:
            return None
        return max(0, self.params.prompt_logprobs_start - 1)

    @property
    def most_skipped(self) -> int:
        """How many of its tokens need no computing, if they are all cached."""
        first = self.first_logits
        return self.num_tokens if first is None else first

    @property
    def queue_seconds(self) -> float | None:
        """That it waited until it ran for the first time; None: it never did."""
        return None if self.admitted is None else self.admitted - self.arrived

    def event(self, weight_version: str, token_ids: list[int] | None = None) -> RequestEvent:
        """That these are new."""
        # by position: this runs once for every token
        return RequestEvent(
            self.request_id,
            self.index,
            [] if token_ids is None else token_ids,
            None,
            None,
            len(self.prompt),
            self.cached_tokens,
            weight_version,
        )

    def read_experts(self, reader: RoutedReader, blocks: list[int], computed: int) -> None:
        """It stops: begin to read its experts from its blocks, if it wants them and so many
        computed tokens are all that have any. Else those of an earlier stop stay."""
        if self.params.return_routed_experts is not False and computed >= self.num_tokens - 1:
            self.routed = reader.read(blocks, self.params.routed_experts_prompt_start)

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens [start, end) of prompt and answer."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        answer = np.asarray(self.output[max(0, start - length) : end - length], dtype=np.int32)
        return np.concatenate([self.prompt[start:], answer]) if start < length else answer


@dataclass(eq=False, slots=True)
class Running:
    """A request that was admitted: from then on until the step that samples its last token is
    launched, or until it has to stop, it has a row and a lease. How far it is computed, its row
    says."""

    request: TrackedRequest
    row: int
    lease: Lease
    prefill_tokens: int  # to compute before it can decode: its tokens at admission
    admission: int  # counts admissions

    @property
    def importance(self) -> tuple[int, int]:
        """The largest is preempted first: the lowest priority, then the last one admitted."""
        return self.request.priority, self.admission
