"""Which states are packed, where cached ones are smaller than those that kernels work on.

    slots   1 to R               live: of running requests, in full
            R + 1 to R + S       staged: checkpoints from the middle of a step, in full
            behind these         cached: packed

A live state is never packed in place of itself: its request goes on from what it is, and what is
cached is a copy, rounded once. Copies are made at the beginning of the next step that computes
anything, so a checkpoint may be found as soon as it is published:

    catch up (CatchUp)  |  pack what was published  |  unpack what is read  |  the step
"""

from __future__ import annotations

from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.lease import StateMove, StepCheckpoint
from megatron_hybrid.cache.state_pool import NULL_SLOT, FreeSlots, StatePool
from megatron_hybrid.errors import StatePoolExhausted


class Packing:
    """Of one engine; where nothing is packed it has nothing to do."""

    def __init__(self, geometry: CacheGeometry, states: StatePool) -> None:
        self._states = states
        num_live = geometry.max_requests
        self._free = FreeSlots(num_live + 1, num_live + geometry.num_staged_slots)
        self._published: list[int] = []  # staged ones that wait
        self._pending: dict[int, int] = {}  # by the slot that is packed into: the full one

    @property
    def num_free(self) -> int:
        """Staged slots that nobody has reserved, and that hold nothing."""
        return len(self._free)

    @property
    def is_pending(self) -> bool:
        """Whether anything is to be packed before the next step."""
        return bool(self._pending)

    def stage(self) -> int:
        """A slot for a checkpoint until it is packed. Raises StatePoolExhausted when all are in
        use."""
        if not self._free:
            raise StatePoolExhausted("All staged slots are in use.")
        return self._free.take(highest=False)

    def unstage(self, slot: int) -> None:
        """What was staged is not needed; NULL_SLOT: nothing was."""
        if slot != NULL_SLOT:
            self._free.add(slot)

    def pack(self, checkpoint: StepCheckpoint, source: int) -> None:
        """The checkpoint is in the full slot `source`, and belongs in its own."""
        self._pending[checkpoint.slot] = source
        if source == checkpoint.staged:
            self._published.append(source)
        else:
            self.unstage(checkpoint.staged)

    def forget(self, slot: int) -> None:
        """What was to be packed into this slot is wanted no more."""
        self._pending.pop(slot, None)

    def begin_step(self) -> None:
        """A step is planned, before which all that is pending is packed: it may stage others in
        the same slots."""
        for slot in self._published:
            self.unstage(slot)
        self._published.clear()

    def take(self) -> list[StateMove]:
        """What is packed before the step that was planned."""
        moves = [StateMove(source, slot) for slot, source in self._pending.items()]
        self._states.touch(self._pending)
        self._pending.clear()
        return moves
