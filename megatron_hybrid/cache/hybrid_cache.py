"""The hybrid prefix cache: KV blocks AND the recurrent state at the same position.

A request's life in the cache:

    match     what of its prompt is there (changes nothing)
    admit     pin and allocate all of it or nothing: a Lease
    reserve_checkpoint, extend     slots and blocks for the coming step
    state_was_read                 the step that reads the cached state was launched
    publish_blocks, publish_state  after the step: its results become visible to others
    release   give everything back; what was published stays cached
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey, extend_keys, root_key
from megatron_hybrid.cache.checkpoint_placement import CheckpointPlacement, PlannedCheckpoint
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.kv_block_allocator import KVBlockAllocator
from megatron_hybrid.cache.prefix_index import PrefixIndex, PrefixMatch
from megatron_hybrid.cache.state_pool import NULL_SLOT, Checkpoint, StatePool
from megatron_hybrid.errors import KVBlocksExhausted, StatePoolExhausted

Tokens = npt.NDArray[np.int32]

EVICTED_KEYS_REMEMBERED = 16384  # for telling "evicted" from "never there"


class Occupancy(NamedTuple):
    """How full the two pools are, in blocks and slots."""

    kv_blocks: int
    kv_used: int  # referenced by running requests
    kv_cached: int  # mapped, referenced or not
    kv_evictable: int
    state_slots: int
    state_used: int  # live, being written or being read
    state_cached: int
    state_evictable: int


class PromptKeys(NamedTuple):
    """Keys of one prompt under one epoch."""

    root: BlockKey
    blocks: list[BlockKey]  # of its full blocks


class StepCheckpoint(NamedTuple):
    """A checkpoint that the coming step writes."""

    position: int
    kind: str
    slot: int


@dataclass(slots=True)
class Lease:
    """What one running request holds. Only HybridCache changes it."""

    root: BlockKey
    keys: list[BlockKey]  # of its full blocks so far
    blocks: list[int]  # its block table
    num_shared: int  # leading blocks that were found in the cache and must not be written
    skip: int  # tokens that it did not have to compute
    reserved: int  # blocks that it may still take by `extend`
    read_slot: int  # where its state is read next
    live_slot: int  # where its state is written next
    checkpoints: list[PlannedCheckpoint]  # not captured yet, ascending
    generation: int  # of the cache at admission; an older one publishes nothing
    lost_tokens: dict[str, int] = field(default_factory=dict)  # matched, computed again; by cause
    num_published: int = 0  # blocks, the shared ones included
    pinned: bool = False  # read_slot is a cached slot


class HybridCache:
    """All cache state of one engine. `enabled=False` allocates, but finds and keeps nothing."""

    def __init__(self, geometry: CacheGeometry, *, enabled: bool = True) -> None:
        self.geometry = geometry
        # without room for a state, a hybrid request could never skip: keep nothing
        self.enabled = enabled and (not geometry.has_recurrent or geometry.num_cached_slots > 0)
        self.placement = CheckpointPlacement(geometry)
        self.kv = KVBlockAllocator(geometry.num_blocks, on_evict=self._drop_state)
        self.states = StatePool(geometry.num_slots, on_evict=self._remember_evicted)
        self.checkpoints_published: dict[str, int] = {}
        self.checkpoints_read: dict[str, int] = {}
        self.checkpoints_skipped = 0
        self._index = PrefixIndex(
            geometry, self.kv.kv_hash_to_block_id, self.states.mamba_hash_to_slot_id
        )
        self._reserved = 0
        self._generation = 0
        self._epoch = 0
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()

    # -------------------------------------------------------------- admission

    @property
    def epoch(self) -> int:
        """Changes with the weights; part of every key."""
        return self._epoch

    def keys_of(self, tokens: Tokens, cache_salt: str = "") -> PromptKeys:
        """Keys of a prompt under the present epoch."""
        root = root_key(self._epoch, cache_salt)
        size = self.geometry.block_size
        return PromptKeys(root, extend_keys(root, tokens, size) if self.enabled else [])

    def match(self, keys: PromptKeys, prompt_tokens: int, *, may_skip: bool = True) -> PrefixMatch:
        """What the cache holds of a prompt. Changes nothing."""
        if not self.enabled:
            return PrefixMatch([], 0, 0, NULL_SLOT, may_skip)
        return self._index.match(keys.blocks, prompt_tokens, may_skip=may_skip)

    def admit(
        self,
        match: PrefixMatch,
        keys: PromptKeys,
        prompt_tokens: int,
        total_tokens: int,
    ) -> Lease:
        """Pin what matched and allocate the rest of the prompt; all of it or nothing.

        `total_tokens`: the most tokens whose KV the request can ever need; blocks beyond the
        prompt are only reserved. Raises KVBlocksExhausted or StatePoolExhausted, without any
        effect, when the request has to wait.
        """
        geometry = self.geometry
        new_blocks = geometry.blocks_for(prompt_tokens) - len(match.blocks)
        reserve = max(0, geometry.blocks_for(total_tokens) - geometry.blocks_for(prompt_tokens))
        if geometry.has_attention:
            # blocks that match but are idle can't be evicted for this request
            idle = sum(self.kv.references(block) == 0 for block in match.blocks)
            available = self.kv.num_available - idle - self._reserved
            if new_blocks + reserve > available:
                raise KVBlocksExhausted(
                    f"The request needs {new_blocks + reserve} more KV blocks of "
                    f"{geometry.block_size} tokens; {max(0, available)} are available."
                )
        live_slot = NULL_SLOT
        if geometry.has_recurrent:
            if match.state_slot != NULL_SLOT:
                self.states.pin(match.state_slot)
            try:
                live_slot = self.states.allocate()
            except StatePoolExhausted:
                if match.state_slot != NULL_SLOT:
                    self.states.unpin(match.state_slot, used=False)
                raise
        lost = self._lost_tokens(match, keys.blocks)  # before evictions for it blur the picture
        self.kv.acquire(match.blocks)
        own = self.kv.allocate(new_blocks)
        self._reserved += reserve
        planned = []
        if self.enabled and geometry.has_recurrent:
            planned = self.placement.for_prompt(prompt_tokens, match.skip, match.matched_tokens)
        return Lease(
            root=keys.root,
            keys=list(keys.blocks),
            blocks=match.blocks + own,
            num_shared=len(match.blocks),
            skip=match.skip,
            reserved=reserve,
            read_slot=match.state_slot,
            live_slot=live_slot,
            checkpoints=planned,
            generation=self._generation,
            lost_tokens=lost,
            num_published=len(match.blocks),
            pinned=match.state_slot != NULL_SLOT,
        )

    def can_ever_fit(self, total_tokens: int) -> bool:
        """Whether a request of this many tokens fits into an empty cache."""
        return self.geometry.blocks_for(total_tokens) <= self.kv.num_blocks

    # --------------------------------------------------------------- stepping

    def extend(self, lease: Lease) -> int:
        """One more block at the end of the table, out of the lease's reservation."""
        assert lease.reserved > 0, "the reservation does not cover another block"
        (block,) = self.kv.allocate(1)
        lease.reserved -= 1
        self._reserved -= 1
        lease.blocks.append(block)
        return block

    def reserve_checkpoints(self, lease: Lease, end: int) -> list[StepCheckpoint]:
        """Slots for the checkpoints that a step up to position `end` passes.

        Positions that are cached already are dropped; those without a slot are skipped and
        counted. For a checkpoint at `end` itself the slot is the one that the request goes on
        with: its live slot becomes the checkpoint.
        """
        step: list[StepCheckpoint] = []
        while lease.checkpoints and lease.checkpoints[0].position <= end:
            position, kind = lease.checkpoints.pop(0)
            if not self._publishes(lease) or self._state_key(lease, position) in (
                self.states.mamba_hash_to_slot_id
            ):
                continue
            try:
                slot = self.states.allocate(for_checkpoint=True)
            except StatePoolExhausted:
                self.checkpoints_skipped += 1
                continue
            step.append(StepCheckpoint(position, kind, slot))
        return step

    def next_checkpoint(self, lease: Lease) -> int | None:
        """The next position that is to be captured and is not cached yet."""
        for position, _ in lease.checkpoints:
            if self._state_key(lease, position) not in self.states.mamba_hash_to_slot_id:
                return position
        return None

    def state_was_read(self, lease: Lease) -> None:
        """The step that reads the lease's state was launched: from now on it reads its own."""
        if lease.pinned:
            checkpoint = self.states.checkpoint(lease.read_slot)
            if checkpoint is not None:
                kind = checkpoint.kind
                self.checkpoints_read[kind] = self.checkpoints_read.get(kind, 0) + 1
            self.states.unpin(lease.read_slot, used=True)
            lease.pinned = False
        lease.read_slot = lease.live_slot

    def publish_blocks(
        self, lease: Lease, computed: int, tokens: Callable[[int, int], Tokens]
    ) -> bool:
        """Make the full blocks below position `computed` visible to others.

        `tokens(start, end)` returns the sequence's tokens; asked only for blocks without a key.
        Returns whether the block table changed: a block that is mapped already replaces its
        newer twin.
        """
        full = computed // self.geometry.block_size
        if full <= lease.num_published or not self._publishes(lease):
            return False
        size = self.geometry.block_size
        if full > len(lease.keys):
            known = len(lease.keys)
            new = tokens(known * size, full * size)
            lease.keys += extend_keys(lease.keys[-1] if known else lease.root, new, size)
        changed = False
        if self.geometry.has_attention:
            for index in range(lease.num_published, full):
                block = self.kv.publish(lease.blocks[index], lease.keys[index])
                changed |= block != lease.blocks[index]
                lease.blocks[index] = block
        lease.num_published = full
        return changed

    def publish_state(self, lease: Lease, checkpoint: StepCheckpoint, *, at_end: bool) -> None:
        """Make a captured state visible, after the blocks that it needs.

        `at_end`: the state was captured in the lease's live slot, which changes owner; the
        request reads it once more and goes on in the checkpoint's slot.
        """
        if not self._publishes(lease):
            self.states.release(checkpoint.slot)
            return
        entry = Checkpoint(
            self._state_key(lease, checkpoint.position), checkpoint.position, checkpoint.kind
        )
        captured = lease.live_slot if at_end else checkpoint.slot
        slot = self.states.publish(captured, entry)
        if slot == captured:
            kind = checkpoint.kind
            self.checkpoints_published[kind] = self.checkpoints_published.get(kind, 0) + 1
        if at_end:
            self.states.pin(slot)
            lease.read_slot, lease.pinned = slot, True
            lease.live_slot = checkpoint.slot

    def discard_checkpoint(self, checkpoint: StepCheckpoint) -> None:
        """Give back the slot of a checkpoint whose step failed."""
        self.states.release(checkpoint.slot)

    def release(self, lease: Lease) -> None:
        """Give back everything that the lease holds. What was published stays cached."""
        if lease.pinned:
            self.states.unpin(lease.read_slot, used=False)
            lease.pinned = False
        if lease.live_slot != NULL_SLOT:
            self.states.release(lease.live_slot)
            lease.live_slot = NULL_SLOT
        self.kv.release(lease.blocks)
        lease.blocks = []
        self._reserved -= lease.reserved
        lease.reserved = 0

    # ------------------------------------------------------------------ whole

    def reset(self) -> None:
        """Empty the cache. Running requests keep what they hold and publish nothing any more."""
        self._generation += 1
        self.kv.clear()
        self.states.clear()
        self._evicted.clear()

    def set_epoch(self, epoch: int) -> None:
        """New weights: nothing that was computed with the old ones is found again."""
        self._epoch = epoch
        self.reset()

    def occupancy(self) -> Occupancy:
        kv, states = self.kv, self.states
        return Occupancy(
            kv_blocks=kv.num_blocks,
            kv_used=kv.num_blocks - kv.num_available,
            kv_cached=kv.num_mapped,
            kv_evictable=kv.num_cached,
            state_slots=states.num_slots,
            state_used=states.num_slots - states.num_free - states.num_evictable,
            state_cached=states.num_cached,
            state_evictable=states.num_evictable,
        )

    def check_integrity(self, leases: Iterable[Lease] | None = None) -> None:
        """Assert every invariant; between steps, with all running requests' leases, the
        references too."""
        if leases is None:
            self.kv.check_integrity()
            self.states.check_integrity()
        else:
            leases = list(leases)
            self.kv.check_integrity([lease.blocks for lease in leases])
            self.states.check_integrity(
                owned=[lease.live_slot for lease in leases if lease.live_slot != NULL_SLOT],
                pinned=[lease.read_slot for lease in leases if lease.pinned],
            )
            assert self._reserved == sum(lease.reserved for lease in leases)
        assert 0 <= self._reserved <= self.kv.num_available
        if self.geometry.has_attention:
            missing = self.states.mamba_hash_to_slot_id.keys() - self.kv.kv_hash_to_block_id.keys()
            assert not missing, "a state is cached whose KV is not"

    # ---------------------------------------------------------------- details

    def _publishes(self, lease: Lease) -> bool:
        return self.enabled and lease.generation == self._generation

    def _state_key(self, lease: Lease, position: int) -> BlockKey:
        return lease.keys[position // self.geometry.block_size - 1]

    def _drop_state(self, key: BlockKey) -> None:
        if self.states.drop(key):
            self._remember_evicted(key)

    def _remember_evicted(self, key: BlockKey) -> None:
        self._evicted[key] = None
        self._evicted.move_to_end(key)
        if len(self._evicted) > EVICTED_KEYS_REMEMBERED:
            self._evicted.popitem(last=False)

    def _lost_tokens(self, match: PrefixMatch, keys: list[BlockKey]) -> dict[str, int]:
        """Tokens whose KV was found but that are computed again, by cause."""
        lost = match.matched_tokens - match.skip
        if lost == 0 or not self.geometry.has_attention:
            return {}
        if not match.may_skip:
            return {"prompt_logprobs": lost}
        size = self.geometry.block_size
        grid = min(lost, match.matched_tokens - self.geometry.floor_grid(match.matched_tokens))
        between = keys[match.skip // size : match.matched_tokens // size]
        cause = "state_evicted" if any(key in self._evicted for key in between) else "state_missing"
        return {c: n for c, n in (("grid", grid), (cause, lost - grid)) if n}
