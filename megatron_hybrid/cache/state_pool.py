"""Slots for recurrent states: live ones of running requests and cached ones, from one pool.

    free --allocate--> owned (live, or a checkpoint being written) --publish--> cached
     ^                    |                                                       |
     +------release-------+----------------------evict / drop---------------------+

A slot changes owner, never place: publishing and reading a state cost no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.eviction import EvictionQueue, LeastRecentlyUsed
from megatron_hybrid.cache.free_slots import FreeSlots
from megatron_hybrid.errors import StatePoolExhausted

NULL_SLOT = 0  # reads as zeros, writes to it are dropped; never allocated, counted or freed


class Checkpoint(NamedTuple):
    """A cached recurrent state."""

    key: BlockKey  # of the last block that the state has seen
    position: int  # tokens that the state has seen
    kind: str  # why it was placed there: see checkpoint_placement


class StatePool:
    """Slots 1 to num_slots. `on_evict(key)` is called when a state is dropped to make room."""

    def __init__(
        self,
        num_slots: int,
        on_evict: Callable[[BlockKey], None] = lambda key: None,
        queue: EvictionQueue | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.mamba_hash_to_slot_id: dict[BlockKey, int] = {}
        self.evictions = 0
        self._on_evict = on_evict
        self._evictable: EvictionQueue = LeastRecentlyUsed() if queue is None else queue
        # Live slots are taken from the low end, checkpoints' from the high one: the states of a
        # batch then tend to lie side by side, where kernels can update them in place.
        self._free = FreeSlots(num_slots)
        self._checkpoint: list[Checkpoint | None] = [None] * (num_slots + 1)
        self._pins = [0] * (num_slots + 1)
        self._last_use = [0] * (num_slots + 1)
        self._owned = [False] * (num_slots + 1)
        self._clock = 0

    @property
    def num_cached(self) -> int:
        return len(self.mamba_hash_to_slot_id)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def checkpoint(self, slot: int) -> Checkpoint | None:
        """What is cached in `slot`, if anything is."""
        return self._checkpoint[slot]

    # ------------------------------------------------------------------ verbs

    def allocate(self, *, for_checkpoint: bool = False) -> int:
        """An owned slot: a free one, else the one whose cached state is evicted first.

        Raises StatePoolExhausted, without any effect, when every slot is in use.
        """
        if not self._free:
            slot = self._evictable.pop()
            if slot is None:
                raise StatePoolExhausted(f"All {self.num_slots} state slots are in use.")
            checkpoint = self._checkpoint[slot]
            assert checkpoint is not None
            self._forget(slot)
            self.evictions += 1
            self._on_evict(checkpoint.key)
        else:
            slot = self._free.take_highest() if for_checkpoint else self._free.take_lowest()
        self._owned[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Free an owned slot."""
        assert self._owned[slot], f"slot {slot} is not owned"
        self._owned[slot] = False
        self._free.add(slot)

    def publish(self, slot: int, checkpoint: Checkpoint) -> int:
        """Cache what an owned slot holds; returns the slot that holds the key.

        When the key is cached already, that slot is returned and the caller's is freed.
        """
        mapped = self.mamba_hash_to_slot_id.get(checkpoint.key)
        if mapped is not None:
            self.release(slot)
            return mapped
        assert self._owned[slot], f"slot {slot} is not owned"
        self._owned[slot] = False
        self.mamba_hash_to_slot_id[checkpoint.key] = slot
        self._checkpoint[slot] = checkpoint
        self._touch(slot)
        self._evictable.add(slot, self._last_use[slot])
        return slot

    def pin(self, slot: int) -> None:
        """Keep a cached slot until it is unpinned: somebody is about to read it."""
        assert not self._owned[slot], f"slot {slot} is not cached"
        self._pins[slot] += 1
        self._evictable.discard(slot)

    def unpin(self, slot: int, *, used: bool) -> None:
        """Take a pin back. `used`: the state was read, which makes it recent."""
        self._pins[slot] -= 1
        assert self._pins[slot] >= 0, f"slot {slot} is not pinned"
        if used:
            self._touch(slot)
        if self._pins[slot] == 0:
            if self._checkpoint[slot] is not None:
                self._evictable.add(slot, self._last_use[slot])
            else:  # dropped while it was pinned
                self._free.add(slot)

    def drop(self, key: BlockKey) -> bool:
        """Forget the state of `key`, if there is one: the KV that it needs is gone."""
        slot = self.mamba_hash_to_slot_id.get(key)
        if slot is None:
            return False
        self._evictable.discard(slot)
        self._forget(slot)
        if self._pins[slot] == 0:
            self._free.add(slot)
        return True

    def clear(self) -> None:
        """Forget every cached state. Pinned slots are freed when their last pin goes."""
        for key in list(self.mamba_hash_to_slot_id):
            self.drop(key)

    # ---------------------------------------------------------------- details

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_use[slot] = self._clock

    def _forget(self, slot: int) -> None:
        checkpoint = self._checkpoint[slot]
        assert checkpoint is not None
        self._checkpoint[slot] = None
        del self.mamba_hash_to_slot_id[checkpoint.key]

    def check_integrity(
        self, owned: Iterable[int] | None = None, pinned: Iterable[int] | None = None
    ) -> None:
        """Assert every invariant. `owned`, `pinned`: what the users hold, with multiplicity."""
        assert NULL_SLOT not in self._free and not self._owned[NULL_SLOT]
        assert self._checkpoint[NULL_SLOT] is None and self._pins[NULL_SLOT] == 0
        for slot in range(1, self.num_slots + 1):
            cached = self._checkpoint[slot] is not None
            held = cached or self._pins[slot] > 0
            assert (slot in self._free) + self._owned[slot] + held == 1, f"slot {slot}"
            assert (slot in self._evictable) == (cached and self._pins[slot] == 0)
        for key, slot in self.mamba_hash_to_slot_id.items():
            checkpoint = self._checkpoint[slot]
            assert checkpoint is not None and checkpoint.key == key
        assert len(self.mamba_hash_to_slot_id) == sum(c is not None for c in self._checkpoint)
        if owned is not None:
            expected = sorted(owned)
            actual = [s for s in range(self.num_slots + 1) if self._owned[s]]
            assert expected == actual, f"owned {actual}, users hold {expected}"
        if pinned is not None:
            pins = [0] * (self.num_slots + 1)
            for slot in pinned:
                pins[slot] += 1
            assert pins == self._pins, "pins differ from what is held"
