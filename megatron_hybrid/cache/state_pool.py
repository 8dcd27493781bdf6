"""Slots for recurrent states: live ones of running requests and cached ones, from one pool.

    free --allocate--> owned (live, or a checkpoint being written) ---cache---> cached
     ^                    |                                                       |
     +------release-------+----------------------evict / drop---------------------+

A slot changes owner, never place: publishing and reading a state cost no copy. Only where cached
states are packed they have slots of their own, see packing.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.eviction import EvictionQueue, LeastRecentlyUsed
from megatron_hybrid.errors import StatePoolExhausted

NULL_SLOT = 0  # reads as zeros, writes to it are dropped; never allocated, counted or freed


class FreeSlots:
    """The free ones of slots first to last, taken from either end of the numbers: bit i says
    whether slot i is free."""

    def __init__(self, first: int, last: int) -> None:
        self._bits = 2 ** (last + 1) - 2**first

    def add(self, slot: int) -> None:
        """A slot is free from now on."""
        self._bits |= 1 << slot

    def take(self, *, highest: bool) -> int:
        """Remove and return the largest number, or the smallest; there must be one."""
        slot = (self._bits if highest else self._bits & -self._bits).bit_length() - 1
        self._bits ^= 1 << slot
        return slot

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __contains__(self, slot: int) -> bool:
        return bool(self._bits >> slot & 1)


class StatePool:
    """Slots 1 to num_slots. `queue`: decides which state goes first; None: by age.

    `num_live`: the first of them, which alone are live, where cached states are packed; the numbers
    of the others are higher by `num_staged` (packing.py). 0: any slot may be live or cached.
    """

    def __init__(
        self,
        num_slots: int,
        queue: EvictionQueue | None = None,
        *,
        num_live: int = 0,
        num_staged: int = 0,
        free: FreeSlots | None = None,
    ) -> None:
        """`free`: the free ones, if they are more than numbers."""
        self.num_slots = num_slots
        last, first_cached = num_slots + num_staged, num_live + num_staged + 1
        self.mamba_hash_to_slot_id: dict[BlockKey, int] = {}
        self.evictions = 0
        self.uses = 0  # publications and hits: the pool's clock
        self.queue = (
            EvictionQueue(LeastRecentlyUsed()) if queue is None else queue
        )  # evictable ones
        # Live slots are taken from the low end, checkpoints' from the high one: the states of a
        # batch then tend to lie side by side, where kernels can update them in place.
        self._free = FreeSlots(first_cached, last) if free is None else free
        self._free_live = FreeSlots(1, num_live) if num_live else self._free
        self._num_live = num_live
        self._numbers = [*range(1, num_live + 1), *range(first_cached, last + 1)]
        self._state: list[CachedState | None] = [None] * (last + 1)
        self._pins = [0] * (last + 1)
        self._owned = [False] * (last + 1)
        # by slot that nobody owns or pins: the last of the engine's steps that may use it
        self.touched = [0] * (last + 1)

    @property
    def num_cached(self) -> int:
        """Slots whose states can be found."""
        return len(self.mamba_hash_to_slot_id)

    @property
    def num_evictable(self) -> int:
        """Cached ones that nobody is about to read."""
        return len(self.queue)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free) + (len(self._free_live) if self._num_live else 0)

    def get(self, key: BlockKey) -> CachedState | None:
        """The cached state of a prefix."""
        slot = self.mamba_hash_to_slot_id.get(key)
        return None if slot is None else self._state[slot]

    def state_in(self, slot: int) -> CachedState | None:
        """What is cached in `slot`, if anything is."""
        return self._state[slot]

    # ------------------------------------------------------------------ verbs

    def has_free(self, *, for_checkpoint: bool = False) -> bool:
        """Whether `allocate` has a slot to give."""
        return bool(self._free if for_checkpoint else self._free_live)

    def allocate(self, *, for_checkpoint: bool = False) -> int:
        """A free slot, owned from now on. Raises StatePoolExhausted, without any effect, when there
        is none."""
        free = self._free if for_checkpoint else self._free_live
        if not free:
            raise StatePoolExhausted(f"All {self.num_slots} state slots are in use.")
        slot = free.take(highest=for_checkpoint)
        self._owned[slot] = True
        return slot

    def evict(self) -> CachedState | None:
        """Free the slot of the state that goes first, and return that state; None when there is
        none. Whoever calls it has to forget what needs the state."""
        victim = self.queue.pop()
        if victim is not None:
            self.evictions += 1
            self._forget(victim)
        return victim

    def release(self, slot: int) -> None:
        """Free an owned slot."""
        assert self._owned[slot], f"slot {slot} is not owned"
        self._owned[slot] = False
        self.touch((slot,))
        (self._free_live if slot <= self._num_live else self._free).add(slot)

    def cache(self, slot: int, state: CachedState) -> CachedState:
        """Cache what an owned slot holds; returns the cached state of the key.

        When the key is cached already, the caller's slot is freed, unless it holds logits that the
        older one lacks: then the slots change places.
        """
        assert self._owned[slot], f"slot {slot} is not owned"
        known = self.get(state.key)
        if known is not None:
            if state.has_logits and not known.has_logits:
                self._move(known, slot)
                known.has_logits = True
            else:
                self.release(slot)
            return known
        self._owned[slot] = False
        self.touch((slot,))
        self.mamba_hash_to_slot_id[state.key] = slot
        self._state[slot] = state
        state.slot = slot
        state.join()
        self._use(state)
        self.queue.rule.was_left(state)
        self.queue.add(state)
        self.rescore(state.ancestor())
        return state

    def pin(self, slot: int) -> None:
        """Keep a cached slot until it is unpinned: somebody is about to read it."""
        assert not self._owned[slot], f"slot {slot} is not cached"
        self._pins[slot] += 1
        self.queue.discard(slot)

    def unpin(self, slot: int, *, used: bool, touched: bool = True) -> None:
        """Take a pin back. `used`: the state was read, which makes it recent. touched: whether a
        step may use the slot that was launched while it was pinned."""
        if touched:
            self.touch((slot,))
        self._pins[slot] -= 1
        assert self._pins[slot] >= 0, f"slot {slot} is not pinned"
        state = self._state[slot]
        if state is not None and used:
            self.queue.rule.was_read(state, self.queue.now)
            self._use(state)
        if self._pins[slot] == 0:
            if state is not None:
                self.queue.add(state)
            else:  # dropped while it was pinned
                self._free.add(slot)

    def touch(self, slots: Iterable[int]) -> None:
        """The last step that was launched may use them, or the one that is being planned."""
        for slot in slots:
            self.touched[slot] = self.queue.now

    def rescore(self, state: CachedState | None) -> None:
        """Whether a state covers anything may have changed."""
        if state is not None:
            self.queue.rescore(state)

    def is_pinned(self, slot: int) -> bool:
        """Whether somebody is about to read a cached slot."""
        return self._pins[slot] > 0

    def drop(self, key: BlockKey) -> CachedState | None:
        """Forget the state of `key`, if there is one, and return it."""
        state = self.get(key)
        if state is not None:
            self.queue.discard(state.slot)
            self._forget(state)
        return state

    def clear(self) -> None:
        """Forget every cached state. Pinned slots are freed when their last pin goes."""
        for key in list(self.mamba_hash_to_slot_id):
            self.drop(key)

    def cached(self) -> list[CachedState]:
        """Every state that can be found, by slot."""
        return [state for state in self._state if state is not None]

    def last_uses(self) -> npt.NDArray[np.int64]:
        """[num_cached]: the step in which each cached state was left or last read."""
        return np.array([state.used_at for state in self.cached()], dtype=np.int64)

    # ---------------------------------------------------------------- details

    def _use(self, state: CachedState) -> None:
        self.uses += 1
        state.last_use = self.uses
        state.used_at = self.queue.now

    def _forget(self, state: CachedState) -> None:
        """A cached state, which is not evictable any more, is lost."""
        self.queue.rule.was_lost(state, self.queue.now)
        self._state[state.slot] = None
        del self.mamba_hash_to_slot_id[state.key]
        self.rescore(state.leave())
        if self._pins[state.slot] == 0:
            self._free.add(state.slot)

    def _move(self, state: CachedState, slot: int) -> None:
        """Let a cached state be what an owned slot holds, from now on."""
        old = state.slot
        self.queue.discard(old)
        self._state[old] = None
        if self._pins[old] == 0:
            self._free.add(old)
        self._owned[slot] = False
        self.touch((slot,))
        self._state[slot] = state
        self.mamba_hash_to_slot_id[state.key] = state.slot = slot
        self.queue.add(state)

    def check_integrity(
        self, owned: Iterable[int] | None = None, pinned: Iterable[int] | None = None
    ) -> None:
        """Assert every invariant. `owned`, `pinned`: what the users hold, with multiplicity."""
        assert NULL_SLOT not in self._free and not self._owned[NULL_SLOT]
        assert self._state[NULL_SLOT] is None and self._pins[NULL_SLOT] == 0
        assert not any(self._state[: self._num_live + 1]), "a cached state is in a live slot"
        children: dict[int, int] = {}
        for slot in self._numbers:
            state = self._state[slot]
            cached = state is not None
            held = cached or self._pins[slot] > 0
            is_free = slot in self._free or slot in self._free_live
            assert is_free + self._owned[slot] + held == 1, f"slot {slot}"
            assert (slot in self.queue) == (cached and self._pins[slot] == 0)
            if state is not None:
                assert state.alive and state.slot == slot
                assert self.mamba_hash_to_slot_id.get(state.key) == slot
                if (ancestor := state.ancestor()) is not None:
                    assert ancestor.position < state.position
                    children[ancestor.slot] = children.get(ancestor.slot, 0) + 1
        for state in self.cached():
            assert state.children == children.get(state.slot, 0), "children are miscounted"
        assert len(self.mamba_hash_to_slot_id) == len(self.cached())
        if owned is not None:
            expected = sorted(owned)
            actual = [s for s, is_owned in enumerate(self._owned) if is_owned]
            assert expected == actual, f"owned {actual}, users hold {expected}"
        if pinned is not None:
            pins = [0] * len(self._pins)
            for slot in pinned:
                pins[slot] += 1
            assert pins == self._pins, "pins differ from what is held"
