"""The hybrid prefix cache: KV blocks AND the recurrent state at the same position.

A request's life in the cache:

    match     what of its prompt is there (changes nothing)
    admit     pin and allocate all of it or nothing: a Lease
    reserve_checkpoints, extend    slots and blocks for the coming step
    state_was_read                 the step that reads the cached state was launched
    publish_blocks, publish_state  after the step: its results become visible to others
    keep_end  the state at which it ends or has to stop becomes visible too
    release   give everything back; what was published stays cached
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys, root_key
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.changes import CacheChanges
from megatron_hybrid.cache.eviction import EvictionQueue
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.lease import Lease, Pin, StepCheckpoint, TailCopy, held_by
from megatron_hybrid.cache.packing import Packing
from megatron_hybrid.cache.prefix_store import Occupancy, PrefixMatch, PrefixStore
from megatron_hybrid.cache.replay_cost import queue_of
from megatron_hybrid.cache.state_pool import NULL_SLOT
from megatron_hybrid.cache.tier import NO_TIER, Tier
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted


class HybridCache:
    """All cache state of one engine. `enabled=False` allocates, but finds and keeps nothing.

    policy: one of eviction.POLICIES. checkpoints, queue: in place of the engine's own, to compare
    with what others do.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        enabled: bool = True,
        policy: str = "replay_cost",
        checkpoints: placement.CheckpointPlacement | None = None,
        queue: EvictionQueue | None = None,
    ) -> None:
        self.geometry = geometry
        # without room for a state, a hybrid request could never skip: keep nothing
        self.enabled = enabled and (not geometry.needs_state or geometry.num_cached_slots > 0)
        self.placement = (
            placement.CheckpointPlacement(geometry) if checkpoints is None else checkpoints
        )
        self._keeps_idle = policy != "ref_zero"
        queue = queue_of(policy) if queue is None else queue
        self.store = PrefixStore(geometry, queue, keeps_idle=self._keeps_idle)
        self.kv, self.states, self.windows = self.store.kv, self.store.states, self.store.windows
        self.tier: Tier = NO_TIER  # what is told of all that others may find
        self.packing = Packing(geometry, self.states)
        self.checkpoints_published: Counter[str] = Counter()
        self.checkpoints_read: Counter[str] = Counter()
        self.checkpoints_skipped = 0
        self._version = self.epoch = 0  # the epoch changes with the weights; part of every key

    def take_down_changes(self) -> CacheChanges:
        """What can be found from now on, as it changes. Before anything is."""
        assert not self.kv.num_mapped and not self.states.num_cached, "something is cached already"
        changes = self.store.changes = CacheChanges(self.geometry, self.epoch)
        self.tier.take_down(changes.of_host())
        return changes

    def begin_step(self, step: int) -> None:
        """Ages are counted in the engine's steps."""
        self.kv.step = self.states.queue.now = step

    # -------------------------------------------------------------- admission

    def root(self, cache_salt: str = "", adapter: str = "") -> BlockKey:
        """What keys of a sequence start from under the present epoch."""
        return root_key(self.epoch, cache_salt, adapter, self.geometry.stored_as)

    def match(self, keys: SequenceKeys, length: int, *, most: int | None = None) -> PrefixMatch:
        """What the cache holds of a prompt of `length` tokens; `most`: of PrefixStore's."""
        return self.store.match(keys, length, most=most) if self.enabled else PrefixMatch([], 0, 0)

    def admit(
        self,
        match: PrefixMatch,
        keys: SequenceKeys,
        length: int,
        *,
        headroom: int = 0,
        hints: placement.CheckpointHints = placement.NO_HINTS,
    ) -> Lease:
        """Pin what matched and allocate the rest of the prompt; all of it or nothing.

        `headroom`: blocks that have to stay free or evictable for others. Raises KVBlocksExhausted
        or StatePoolExhausted, without any effect, when the request has to wait.
        """
        geometry = self.geometry
        new_blocks = geometry.blocks_for(length) - len(match.blocks)
        source = (match.tail_block,) if match.tail_block else ()
        if geometry.has_attention:
            available = self.kv.num_available_beside((*match.blocks, *source)) - headroom
            if new_blocks > available:
                raise KVBlocksExhausted(
                    f"The request needs {new_blocks} more KV blocks of {geometry.block_size} "
                    f"tokens; {max(0, available)} are available."
                )
        self.windows.check_room(match.skip)
        lost = self.store.lost_tokens(match, keys)  # before evictions for it blur the picture
        reads_slot = self.store.reads_state(match, length)
        read_slot = match.state.slot if match.state is not None and reads_slot else NULL_SLOT
        write_slot = NULL_SLOT
        if reads_slot:
            self.states.pin(read_slot)
        if geometry.needs_state:
            try:
                write_slot = self.store.allocate_slot()
            except StatePoolExhausted:
                if reads_slot:
                    self.states.unpin(read_slot, used=False)
                raise
        self.kv.acquire((*match.blocks, *source))
        own = self.store.allocate_blocks(new_blocks)
        fill = match.skip % geometry.block_size
        planned = []
        if self.enabled and geometry.num_slots:
            planned = self.placement.for_prompt(length, match.skip, match.matched_tokens, hints)
        lease = Lease(
            keys=keys,
            blocks=match.blocks + own,
            num_shared=len(match.blocks),
            skip=match.skip,
            read_slot=read_slot,
            write_slot=write_slot,
            checkpoints=planned,
            version=self._version,
            copy=TailCopy(match.tail_block, own[0], fill) if source else None,
            lost_tokens=lost,
            num_published=len(match.blocks),
            pinned=reads_slot,
        )
        self.windows.admit(lease, match.state)
        if match.state is not None:
            self._go_on_from(lease, match.state)
            self._count_user(lease, match.state)
            self.tier.was_used(lease.keys, match.state)
        return lease

    # --------------------------------------------------------------- stepping

    def extend(self, lease: Lease) -> int:
        """One more block at the end of the table. Raises KVBlocksExhausted without any effect."""
        (block,) = self.store.allocate_blocks(1)
        lease.blocks.append(block)
        return block

    def publishes(self, lease: Lease) -> bool:
        """Whether what the request computes can be found by others."""
        return self.enabled and lease.version == self._version

    def is_cached(self, lease: Lease, position: int) -> bool:
        """Whether the state after the first `position` tokens is cached already."""
        return self.states.get(lease.keys.at(position)) is not None

    def reserve_checkpoints(self, lease: Lease, start: int, end: int) -> list[StepCheckpoint]:
        """Slots for the checkpoints that a step from `start` to `end` passes.

        Positions that are cached already are dropped; those without a slot are skipped and
        counted. For a checkpoint at `end` itself the step has to write its last state there.
        """
        passed = [c for c in lease.planned(start) if c.position <= end]
        lease.checkpoints = [c for c in lease.checkpoints if c.position > end]
        lease.forks = [c for c in lease.forks if c.position > end]
        if not self.publishes(lease):
            return []
        # Before any slot is taken, which may evict: a chunk does not end where a state is cached.
        missing = [checkpoint for checkpoint in passed if not self._is_kept(lease, checkpoint)]
        step: list[StepCheckpoint] = []
        for position, kind in missing:
            has_logits = kind == placement.PROMPT_END
            if not self.geometry.needs_state and not has_logits:
                # KV needs no state to be found: who waits for it only has to know that it comes
                step.append(StepCheckpoint(CachedState(b"", position, kind), NULL_SLOT))
                continue
            state = CachedState(b"", position, kind, lease.deepest, has_logits)
            if (checkpoint := self._reserve(state, passes=position < end)) is not None:
                step.append(checkpoint)
        return step

    def reserve_decode_checkpoint(
        self, lease: Lease, position: int, *, passes: bool = False
    ) -> StepCheckpoint | None:
        """A slot for the state at a position that the coming step comes to, if it is to be kept.
        The request's last such state makes room, unless somebody read it: at once, or when the
        new one is there. `passes`: the step may pass the position, or not come there."""
        if not self.publishes(lease) or not self.placement.decode_position(position):
            return None
        if not (passes and self.states.has_free(for_checkpoint=True)):
            self.store.forget_unread(lease.decode_state)
        state = CachedState(b"", position, placement.DECODE, lease.deepest)
        return self._reserve(state, passes=passes)

    def state_was_read(self, lease: Lease) -> None:
        """The step that reads the lease's state was launched: from now on it reads its own."""
        if lease.pinned:
            state = self.states.state_in(lease.read_slot)
            if state is not None and not lease.reads_own:
                self.checkpoints_read[state.kind] += 1
            self.states.unpin(lease.read_slot, used=not lease.reads_own)
            lease.pinned = lease.reads_own = False
            self.windows.state_was_read(lease)
        lease.read_slot = lease.write_slot

    def tail_was_copied(self, lease: Lease) -> None:
        """The step that copies the tail of a matched prefix was launched."""
        if lease.copy is not None:
            self.store.release_blocks((lease.copy.source,))
            lease.copy = None

    def publish_blocks(self, lease: Lease, computed: int) -> bool:
        """Make the full blocks below position `computed` visible to others.

        Returns whether the block table changed: a block that is mapped already replaces its
        newer twin.
        """
        full = computed // self.geometry.block_size
        if full <= lease.num_published or not self.publishes(lease):
            return False
        lease.keys.extend_to(computed)
        changed = False
        if self.geometry.has_attention:
            changed = self.store.map_blocks(lease.keys, lease.blocks, lease.num_published, full)
        lease.num_published = full
        return changed

    def publish_state(self, lease: Lease, checkpoint: StepCheckpoint, *, at_end: bool) -> bool:
        """Make a captured state visible, after the blocks that it needs; whether it is cached now.

        `at_end`: the step ended there and wrote the state nowhere else. The request reads it once
        more and goes on in its own slot, so that the states of a batch keep lying side by side.
        Where states are packed the step wrote that one, which is copied.
        """
        packs = self.geometry.packs_states
        swaps = at_end and self.geometry.needs_state and not packs
        if not self.publishes(lease):
            if swaps:  # it is the request's only state
                self.states.release(lease.write_slot)
                lease.read_slot = lease.write_slot = checkpoint.slot
            else:
                self.discard_checkpoint(checkpoint)
            return False
        if checkpoint.slot == NULL_SLOT:
            return True
        if checkpoint.state.kind == placement.DECODE:
            self.store.forget_unread(lease.decode_state)
        state = self._publish(lease, checkpoint.slot, checkpoint.state)
        if packs:
            self.packing.pack(checkpoint, lease.write_slot if at_end else checkpoint.staged)
        if swaps:
            self.states.pin(state.slot)
            lease.read_slot, lease.pinned, lease.reads_own = state.slot, True, True
        if state is checkpoint.state and state.kind == placement.DECODE:
            lease.decode_state = state
        return True

    def keep_end(self, lease: Lease, position: int, kind: str) -> None:
        """Keep the last state of a request that ends or stops at `position`, which was fed in full.

        The live slot changes owner, or is packed. Nothing is kept where the state stands in a
        cached slot already.
        """
        position = self.geometry.floor_granule(position)
        if not position or not self.publishes(lease) or not self.placement.keeps_end(position):
            return
        if not self.geometry.needs_state:
            self.store.map_tail(lease.keys, lease.blocks, position)
            self.tier.was_published(lease.keys, position, None)
        elif self.geometry.packs_states:
            state = CachedState(b"", position, kind, lease.deepest)
            if not self.is_cached(lease, position) and (kept := self._reserve(state, passes=False)):
                self.publish_state(lease, kept, at_end=True)
        elif lease.read_slot == lease.write_slot:
            slot, lease.write_slot = lease.write_slot, NULL_SLOT
            self._publish(lease, slot, CachedState(b"", position, kind, lease.deepest))

    def discard_checkpoint(self, checkpoint: StepCheckpoint) -> None:
        """Give back the slots of a checkpoint whose step failed."""
        if checkpoint.slot != NULL_SLOT:
            self.states.release(checkpoint.slot)
        self.packing.unstage(checkpoint.staged)

    def pin(self, lease: Lease, position: int) -> Pin | None:
        """Keep the prefix of `position` tokens, which the lease has just published, from being
        evicted; None if its state is gone, or there is no room for what would be held."""
        state = self.states.get(lease.keys.at(position))
        if state is None and self.geometry.needs_state:
            return None
        window = () if state is None else self.windows.pin(state)
        if window is None:
            return None
        if state is not None:
            self.states.pin(state.slot)
        blocks = lease.blocks[: position // self.geometry.block_size]
        tail = self.kv.tails.get(lease.keys.at(position))
        if tail is not None and tail.block:
            blocks = [*blocks, tail.block]
        self.kv.acquire(blocks)
        return Pin(NULL_SLOT if state is None else state.slot, blocks, window)

    def release(self, lease: Lease) -> None:
        """Give back everything that the lease holds. What was published stays cached."""
        self.tail_was_copied(lease)
        if lease.pinned:
            self.states.unpin(lease.read_slot, used=False)
            lease.pinned = False
        if lease.write_slot != NULL_SLOT:
            self.states.release(lease.write_slot)
            lease.write_slot = NULL_SLOT
        self.windows.release(lease)
        self._leave(lease)
        self.store.release_blocks(lease.blocks)
        lease.blocks = []
        for state in lease.used:
            state.users -= 1
            if not state.users and state.alive:
                self.store.forget(state)
        lease.used = []

    # ------------------------------------------------------------------ whole

    def reset(self, *, keeps_tier: bool = False) -> None:
        """Empty the cache; keeps_tier: on the device alone. Running requests keep what they hold
        and publish nothing any more."""
        self._version += 1
        self.store.clear(self.epoch)
        if not keeps_tier:
            self.tier.clear()

    def set_epoch(self, epoch: int) -> None:
        """New weights: nothing that was computed with the old ones is found again."""
        self.epoch = epoch
        self.reset()

    def occupancy(self) -> Occupancy:
        """How full the pools are now."""
        return self.store.occupancy()

    def last_uses(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The steps in which each KV block that nobody holds, and each cached state, was used last.
        Takes time that grows with their number; not for every step."""
        return self.kv.last_uses(), self.states.last_uses()

    def check_integrity(
        self,
        leases: Iterable[Lease] | None = None,
        pins: Iterable[Pin] = (),
        reserved: Iterable[int] = (),
    ) -> None:
        """Assert every invariant; between steps, with all running requests' leases, all pins and
        the slots of checkpoints that are reserved, the references too."""
        leases, pins = None if leases is None else list(leases), list(pins)
        held = (None, None, None) if leases is None else held_by(leases, pins, reserved)
        self.store.check_integrity(*held)
        self.windows.check_integrity(self.states.cached(), leases, pins)
        assert self._keeps_idle or self.kv.num_cached == 0

    # ---------------------------------------------------------------- details

    def _is_kept(self, lease: Lease, checkpoint: placement.PlannedCheckpoint) -> bool:
        """Whether there is nothing to add to what is cached of a planned checkpoint."""
        position, kind = checkpoint
        known = self.states.get(lease.keys.at(position))
        return known is not None and (known.has_logits or kind != placement.PROMPT_END)

    def _reserve(self, state: CachedState, *, passes: bool) -> StepCheckpoint | None:
        """`passes`: the step leaves no other state that is the same."""
        evicts = state.kind not in self.placement.expendable_kinds
        staged = NULL_SLOT
        try:
            if passes and self.geometry.packs_states:
                staged = self.packing.stage()
            slot = self.store.allocate_slot(for_checkpoint=True, evicts=evicts)
            return StepCheckpoint(state, slot, staged)
        except StatePoolExhausted:
            self.packing.unstage(staged)
            self.checkpoints_skipped += 1
            return None

    def _publish(self, lease: Lease, slot: int, state: CachedState) -> CachedState:
        """Cache an owned slot's state; returns what is cached under its key."""
        last = lease.deepest
        state.parent, state.fork = last, lease.fork
        state.turn, state.pause = lease.turn, lease.pause
        state.runners = 1
        if last is not None:
            last.runners -= 1  # the request goes on from the new state, which takes its place
        cached = self.store.map_state(lease.keys, lease.blocks, slot, state)
        if cached is state:
            self.windows.keep(lease, state)
            self.checkpoints_published[state.kind] += 1
            self._follow(lease, state)
            self.tier.was_published(lease.keys, state.position, state)
        else:
            self._follow(lease, cached)
            cached.runners += 1
            self.states.rescore(cached)
            self.states.rescore(last)
        self._count_user(lease, cached)
        return cached

    def _go_on_from(self, lease: Lease, state: CachedState) -> None:
        """A request is admitted that goes on from a cached state."""
        lease.turn, lease.fork = state.turn, state.fork
        if state.kind == placement.ANSWER_END:
            lease.turn += 1
            lease.pause = self.states.queue.now - state.used_at
        self._follow(lease, state)
        state.runners += 1
        self.states.rescore(state)

    @staticmethod
    def _follow(lease: Lease, state: CachedState) -> None:
        lease.deepest = state
        if state.kind in placement.SHARED_KINDS:
            lease.fork = state

    def _leave(self, lease: Lease) -> None:
        """A request that ends goes on from nowhere."""
        if lease.deepest is not None:
            lease.deepest.runners -= 1
            self.states.rescore(lease.deepest)
            lease.deepest = None

    def _count_user(self, lease: Lease, state: CachedState) -> None:
        if not self._keeps_idle:
            state.users += 1
            lease.used.append(state)
