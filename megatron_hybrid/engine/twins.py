"""Twins: requests that wait because a running prefill is about to leave what they need.

n samples of one prompt, a burst behind one system prompt: the first one computes what is shared,
the others skip it. A request waits if and only if some running prefill has a planned checkpoint,
not yet published, that would let it skip more than it can now. That is decided anew in every step,
so whatever ends the producer frees those that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.lease import Hold, Lease, StepCheckpoint
from megatron_hybrid.engine.tracked_request import TrackedRequest

MOST_DEFERRALS = 64  # steps; then a request computes for itself


class Promises:
    """Prefixes whose states running prefills are about to leave: found by their keys."""

    def __init__(self) -> None:
        self._has_logits: dict[BlockKey, bool] = {}
        self._positions: set[int] = set()

    def add(self, key: BlockKey, position: int, *, has_logits: bool) -> None:
        self._has_logits[key] = has_logits or self._has_logits.get(key, False)
        self._positions.add(position)

    def awaited_by(self, request: TrackedRequest, skip: int) -> BlockKey | None:
        """The longest promised prefix that would let a waiting request skip more than `skip`."""
        length, keys = request.num_tokens, request.keys
        if keys is None:
            return None
        for position in sorted(self._positions, reverse=True):
            if skip < position <= length:
                has_logits = self._has_logits.get(key := keys.at(position))
                if has_logits or (has_logits is not None and position < length):
                    return key
        return None


class Twins:
    """Who waits for whom, and what is kept for them until they were tried."""

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._promises: Promises | None = None
        self._awaited: dict[BlockKey, set[TrackedRequest]] = {}
        self._holds: dict[BlockKey, Hold] = {}

    @property
    def holds(self) -> Iterable[Hold]:
        return self._holds.values()

    def collect_promises(
        self,
        prefilling: Iterable[TrackedRequest],
        reserved: dict[int, list[StepCheckpoint]],
    ) -> None:
        """Begin a step's admissions. `reserved`: by row, what the step itself will leave."""
        self._promises = Promises()
        for request in prefilling:
            self.promise(request, reserved.get(request.row))

    def promise(self, request: TrackedRequest, reserved: list[StepCheckpoint] | None) -> None:
        """A prefill runs: note what it will leave. `reserved`: by the chunk of this step, None if
        it has none."""
        lease, promises = request.lease, self._promises
        if lease is None or promises is None or not self._cache.publishes(lease):
            return
        for checkpoint in reserved or ():
            position, logits = checkpoint.position, checkpoint.state.has_logits
            promises.add(lease.keys.at(position), position, has_logits=logits)
        for position, kind in lease.planned(request.position):
            logits = kind == placement.PROMPT_END
            promises.add(lease.keys.at(position), position, has_logits=logits)

    def must_wait(self, request: TrackedRequest, skip: int) -> bool:
        """Whether a waiting request, which could skip `skip` tokens now, had better wait. If not,
        call `was_tried` once it was."""
        if self._promises is None or not request.may_skip or request.deferrals >= MOST_DEFERRALS:
            return False
        key = self._promises.awaited_by(request, skip)
        if key is None:
            return False
        if not request.deferrals:
            request.skip_at_first_deferral = skip
        request.deferrals += 1
        self.was_tried(request)
        request.awaits = key
        self._awaited.setdefault(key, set()).add(request)
        return True

    def was_published(self, lease: Lease, position: int) -> None:
        """A promise came true: keep it until all who wait for it were tried."""
        key = lease.keys.at(position)
        if key in self._awaited and key not in self._holds:
            hold = self._cache.hold(lease, position)
            if hold is not None:
                self._holds[key] = hold

    def was_tried(self, request: TrackedRequest) -> None:
        """The request was admitted, could not be, or waits no more: nothing is held for it."""
        key, request.awaits = request.awaits, None
        if key is None:
            return
        waiting = self._awaited[key]
        waiting.discard(request)
        if not waiting:
            del self._awaited[key]
            if (hold := self._holds.pop(key, None)) is not None:
                self._cache.unhold(hold)

    def release_holds(self) -> bool:
        """Let everything be evicted; whether anything was held."""
        held = bool(self._holds)
        for hold in self._holds.values():
            self._cache.unhold(hold)
        self._holds.clear()
        return held
