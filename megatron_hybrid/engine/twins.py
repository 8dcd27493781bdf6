"""Twins: requests that wait because a running prefill is about to leave what they need.

n samples of one prompt, a burst behind one system prompt: the first one computes what is shared,
the others skip it. A request waits only for a planned checkpoint of a running prefill, not yet
published, that would let it skip more than it can now. That is decided anew in every step, so
whatever ends the producer frees those that wait for it.

And only if it is worth it. A step takes a fixed time, in which so many tokens could be computed
(STEP_TOKENS, or two blocks if that is less). So a request waits

    if nothing will be left to compute (it has the same prompt),
    if its prompt is computed no later for that,
    or if otherwise the step would have computed more tokens that waiting spares, together with
        what others in it have not waited for, than these for each step of delay.

The last is the rule of whoever rents skis until the rent comes to their price. Where each prompt
extends the one before by a few tokens, a step takes in as many as cost about as much as a step,
and the next ones go on from the longest of these.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lease import Lease, Pin, StepCheckpoint
from megatron_hybrid.engine.tracked_request import TrackedRequest

MOST_DEFERRALS = 64  # steps; then a request computes for itself
# Tokens that are computed in the time in which the weights are read once. A GPU can do 150 to 300
# operations for each byte that it reads, and does about half: one for each byte and token.
STEP_TOKENS = 128
STEP_BLOCKS = 2  # small ones are chosen where less is worth sharing
MOST_PROMISES = 16  # of a prefill in a step: its next states, and the one at its end
MOST_TAILS = 16  # promises that end inside a block and are compared with a request, in a step


class Promise(NamedTuple):
    """A prefix whose state a running prefill is about to leave."""

    key: BlockKey
    position: int
    has_logits: bool
    steps: int  # until it is there


class Promises:
    """What running prefills are about to leave: found by keys."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # by the key of the full blocks, then by position and by the key itself
        self._behind: dict[BlockKey, dict[int, dict[BlockKey, Promise]]] = {}
        self._counts: list[int] = []  # of those blocks; ascending, each once

    def add(self, keys: SequenceKeys, position: int, *, has_logits: bool, steps: int = 1) -> None:
        """The first `position` tokens of the sequence with these keys."""
        key, count = keys.at(position), position // self._block_size
        at = self._behind.setdefault(keys.of_block(count), {}).setdefault(position, {})
        known = at.get(key)
        if known is None or (has_logits, -steps) > (known.has_logits, -known.steps):
            at[key] = Promise(key, position, has_logits, steps)
        place = bisect_left(self._counts, count)
        if self._counts[place : place + 1] != [count]:
            self._counts.insert(place, count)

    def has(self, keys: SequenceKeys, position: int) -> bool:
        """Whether the first `position` tokens of a sequence are promised."""
        at = self._behind.get(keys.of_block(position // self._block_size), {}).get(position, ())
        return bool(at) and keys.at(position) in at

    def to(self, request: TrackedRequest, skip: int) -> Iterator[Promise]:
        """What would let a waiting request skip more than `skip`, the longest first."""
        length, keys, size = request.num_tokens, request.keys, self._block_size
        most = request.most_skipped
        if keys is None:
            return
        tails = MOST_TAILS
        low = bisect_left(self._counts, skip // size)
        high = bisect_right(self._counts, most // size)
        for count in reversed(self._counts[low:high]):
            behind = self._behind.get(keys.of_block(count), {})
            for position in sorted(behind, reverse=True):
                if not skip < position <= most:
                    continue
                if position % size:  # then the key has to be computed
                    tails -= 1
                    if tails < 0:
                        continue
                promise = behind[position].get(keys.at(position))
                if promise is not None and (promise.has_logits or position < length):
                    yield promise


class Twins:
    """Who waits for whom, and what is kept for them until they were tried."""

    def __init__(self, cache: HybridCache, *, break_at_checkpoints: bool = False) -> None:
        """`break_at_checkpoints`: chunks end where a state is kept, for kernels that store none
        inside a chunk."""
        self._cache = cache
        self.break_at_checkpoints = break_at_checkpoints
        self.promises = Promises(cache.geometry.block_size)  # of this step
        self._budget = 1  # tokens that a step like this one computes of prompts
        self._unspared = 0  # tokens that this step computes because somebody does not wait
        self._step_tokens = min(STEP_TOKENS, STEP_BLOCKS * cache.geometry.block_size)
        self._awaited: dict[BlockKey, set[TrackedRequest]] = {}
        self._pins: dict[BlockKey, Pin] = {}

    @property
    def pins(self) -> Iterable[Pin]:
        """What is kept for requests that wait."""
        return self._pins.values()

    def begin_step(self, budget: int) -> None:
        """A step is planned, which may compute so many tokens of prompts."""
        self.promises = Promises(self._cache.geometry.block_size)
        self._budget, self._unspared = max(1, budget), 0

    def promise(self, lease: Lease, end: int, reserved: Sequence[StepCheckpoint]) -> None:
        """A prefill runs, in this step up to `end`: note what it will leave. `reserved`: in this
        step."""
        promises, cache = self.promises, self._cache
        if not cache.publishes(lease):
            return
        for checkpoint in reserved:
            logits = checkpoint.state.has_logits
            promises.add(lease.keys, checkpoint.position, has_logits=logits)
        steps, planned = 1, lease.planned(end)
        if len(planned) > MOST_PROMISES:
            planned[MOST_PROMISES - 1 : -1] = []
        for position, kind in planned:
            needed = steps + _steps(position - end, self._budget)
            logits = kind == placement.PROMPT_END
            promises.add(lease.keys, position, has_logits=logits, steps=needed)
            if self.break_at_checkpoints or cache.placement.needs_break(position):
                end, steps = position, needed

    def must_wait(self, request: TrackedRequest, skip: int, budget: int) -> bool:
        """Whether a waiting request, which could skip `skip` tokens now, had better wait, if the
        step has room for `budget` more. If not, call `was_tried` once it was."""
        if request.deferrals >= MOST_DEFERRALS:
            return False
        spares = 0
        for promise in self.promises.to(request, skip):
            is_awaited = promise.key == request.awaits  # worth it from when it began to wait
            if is_awaited or self._is_worth_it(request, skip, budget, promise):
                self._defer(request, skip, promise)
                return True
            spares = max(spares, promise.position - skip)
        self._unspared += spares
        return False

    def _is_worth_it(
        self, request: TrackedRequest, skip: int, budget: int, promise: Promise
    ) -> bool:
        length, position = request.num_tokens, promise.position
        if position == length:
            return True
        at_once = 1 + _steps(length - skip - budget, self._budget)
        delay = promise.steps + _steps(length - position, self._budget) - at_once
        return self._unspared + position - skip >= self._step_tokens * delay

    def _defer(self, request: TrackedRequest, skip: int, promise: Promise) -> None:
        if not request.deferrals:
            request.skip_at_first_deferral = skip
        request.deferrals += 1
        self.was_tried(request)
        request.awaits, request.awaited_tokens = promise.key, promise.position
        self._awaited.setdefault(promise.key, set()).add(request)

    def was_published(self, lease: Lease, position: int) -> None:
        """A promise came true: keep it until all who wait for it were tried."""
        key = lease.keys.at(position)
        if key in self._awaited and key not in self._pins:
            pin = self._cache.pin(lease, position)
            if pin is not None:
                self._pins[key] = pin

    def was_tried(self, request: TrackedRequest) -> None:
        """The request was admitted, could not be, or waits no more: nothing is kept for it."""
        key, request.awaits, request.awaited_tokens = request.awaits, None, 0
        if key is None:
            return
        waiting = self._awaited[key]
        waiting.discard(request)
        if not waiting:
            del self._awaited[key]
            if (pin := self._pins.pop(key, None)) is not None:
                self._cache.store.unpin(pin)

    def release_pins(self) -> bool:
        """Let everything be evicted; whether anything was kept."""
        pins = list(self._pins.values())
        self._pins.clear()
        for pin in pins:
            self._cache.store.unpin(pin)
        return bool(pins)


def _steps(tokens: int, budget: int) -> int:
    """In which so many tokens are computed."""
    return -(-max(0, tokens) // budget)
