"""PrefixStore: what can be found. KV blocks, tails and states under the keys of their prefixes.

It keeps the two pools consistent: a state never outlives the KV that it needs, a tail never the
state without which nobody could use it, and KV behind which no state is left goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.eviction import EvictionQueue
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.kv_block_allocator import DUMMY_BLOCK, KVBlockAllocator
from megatron_hybrid.cache.listener import CacheListener
from megatron_hybrid.cache.prefix_index import PrefixIndex, PrefixMatch
from megatron_hybrid.cache.state_pool import StatePool
from megatron_hybrid.cache.tail_index import Tail

STATES_GIVEN_UP_AT_ONCE = 8
LOST_CAUSES = ("grid", "prompt_logprobs", "state_evicted", "state_missing")  # of `lost_tokens`
EVICTED_KEYS_REMEMBERED = 16384  # for telling "evicted" from "never there"


class Occupancy(NamedTuple):
    """How full the two pools are, in blocks and slots."""

    kv_blocks: int
    kv_free: int  # hold nothing; blocks = free + used + evictable
    kv_used: int  # referenced by running requests
    kv_cached: int  # mapped, referenced or not
    kv_evictable: int
    state_slots: int
    state_free: int  # hold nothing; slots = free + live + cached
    state_live: int  # of running requests, being written included
    state_used: int  # live, being written or being read
    state_cached: int
    state_evictable: int


class PrefixStore:
    """Both pools of one engine and what is mapped in them."""

    def __init__(self, geometry: CacheGeometry, queue: EvictionQueue, *, keeps_idle: bool) -> None:
        self.geometry = geometry
        self.kv = KVBlockAllocator(
            geometry.num_blocks,
            on_evict=self._block_was_evicted,
            on_tail_evict=self._tail_was_evicted,
            needs_cover=geometry.has_recurrent,
            uncover_some=self._give_up_a_path,
            keeps_idle=keeps_idle,
        )
        self.states = StatePool(geometry.num_slots, on_evict=self._state_was_evicted, queue=queue)
        self._index = PrefixIndex(geometry, self.kv, self.states)
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()
        self.listener: CacheListener | None = None

    def match(self, keys: SequenceKeys, length: int, *, may_skip: bool) -> PrefixMatch:
        """What is there of a prompt of `length` tokens. Changes nothing."""
        return self._index.match(keys, length, may_skip=may_skip)

    def publish_blocks(self, keys: SequenceKeys, blocks: list[int], first: int, end: int) -> bool:
        """Map the full blocks [first, end) of a sequence's table. Where the content is mapped
        already, that block takes the place of the one in `blocks`; returns whether any did."""
        changed = False
        parent = blocks[first - 1] if first else DUMMY_BLOCK
        if self.listener is not None:
            self._tell_of_blocks(self.listener, keys, first, end)
        for index in range(first, end):
            mapped = self.kv.publish(blocks[index], keys.blocks[index], parent)
            if mapped != blocks[index]:
                changed = True
                blocks[index] = mapped
            parent = mapped
        return changed

    def publish_tail(self, keys: SequenceKeys, blocks: Sequence[int], position: int) -> None:
        """Map the KV behind the last full block below `position`, if there is any."""
        count, fill = divmod(position, self.geometry.block_size)
        if not fill or (key := keys.at(position)) in self.kv.tails:
            return
        parent_key = keys.of_block(count)
        if self.geometry.has_attention:
            parent = blocks[count - 1] if count else DUMMY_BLOCK
            tail = Tail(parent_key, fill, blocks[count])
            self.kv.publish_tail(blocks[count], key, tail, parent)
        else:
            self.kv.tails.add(key, Tail(parent_key, fill, DUMMY_BLOCK))
        if self.listener is not None and not self.geometry.has_recurrent:
            self.listener.state_stored(keys, position, False)

    def publish_state(
        self, keys: SequenceKeys, blocks: Sequence[int], slot: int, state: CachedState
    ) -> CachedState:
        """Map what an owned slot holds, after the KV that it needs; returns what is cached under
        its key, which may have been there before."""
        state.key = keys.at(state.position)
        self.publish_tail(keys, blocks, state.position)
        known = self.states.get(state.key)
        had_logits = known is not None and known.has_logits
        cached = self.states.publish(slot, state)
        if self.listener is not None and (known is None or cached.has_logits != had_logits):
            self.listener.state_stored(keys, state.position, cached.has_logits)
        if cached is state and self.geometry.has_recurrent:
            self.kv.cover(self.block_of(state.key))
        return cached

    def forget(self, state: CachedState) -> None:
        """Drop a cached state, and the tail that nobody can use without it."""
        self.states.drop(state.key)
        self._state_is_gone(state)

    def block_of(self, key: BlockKey) -> int:
        """The block that holds the last KV of a cached prefix."""
        tail = self.kv.tails.get(key)
        return self.kv.kv_hash_to_block_id.get(key, DUMMY_BLOCK) if tail is None else tail.block

    def lost_tokens(self, match: PrefixMatch, keys: SequenceKeys) -> dict[str, int]:
        """Tokens whose KV was found but that are computed again, by cause."""
        lost = match.matched_tokens - match.skip
        if lost == 0 or not self.geometry.has_attention:
            return {}
        if not match.may_skip:
            return {"prompt_logprobs": lost}
        size = self.geometry.block_size
        grid = min(lost, match.matched_tokens - self.geometry.floor_grid(match.matched_tokens))
        between = keys.blocks[match.skip // size : match.matched_tokens // size]
        cause = "state_evicted" if any(key in self._evicted for key in between) else "state_missing"
        return {c: n for c, n in (("grid", grid), (cause, lost - grid)) if n}

    def clear(self) -> None:
        """Nothing can be found any more. What is in use stays with its users."""
        self.kv.clear()
        self.states.clear()
        self._evicted.clear()

    def occupancy(self) -> Occupancy:
        kv, states = self.kv, self.states
        return Occupancy(
            kv_blocks=kv.num_blocks,
            kv_free=kv.num_free,
            kv_used=kv.num_blocks - kv.num_available,
            kv_cached=kv.num_mapped,
            kv_evictable=kv.num_cached,
            state_slots=states.num_slots,
            state_free=states.num_free,
            state_live=states.num_slots - states.num_free - states.num_cached,
            state_used=states.num_slots - states.num_free - states.num_evictable,
            state_cached=states.num_cached,
            state_evictable=states.num_evictable,
        )

    def check_integrity(
        self,
        tables: Iterable[Sequence[int]] | None,
        owned: Iterable[int] | None,
        pinned: Iterable[int] | None,
    ) -> None:
        """Assert every invariant; with what the users hold, where it is known."""
        self.kv.check_integrity(tables)
        self.states.check_integrity(owned, pinned)
        cached = self.states.cached()
        if self.geometry.has_attention:
            places = {state.key: self.block_of(state.key) for state in cached}
            assert DUMMY_BLOCK not in places.values(), "a state is cached whose KV is not"
            if self.geometry.has_recurrent:
                self.kv.check_cover(places.values())
        if self.geometry.has_recurrent:
            keys = {state.key for state in cached}
            assert all(key in keys for key, _ in self.kv.tails.items()), "a tail has no state"

    # ---------------------------------------------------------------- details

    def _give_up_a_path(self) -> None:
        """Evict states until there is KV without one behind it. Few have to go besides: those that
        others cover."""
        for _ in range(STATES_GIVEN_UP_AT_ONCE):
            if not self.states.evict() or self.kv.num_uncovered:
                return

    def _state_was_evicted(self, state: CachedState) -> None:
        self._state_is_gone(state)
        self._remember_evicted(state.key)

    def _state_is_gone(self, state: CachedState) -> None:
        if self.listener is not None:
            if not self.geometry.has_recurrent and state.key in self.kv.tails:
                self.listener.logits_removed(state.key)
            else:
                self.listener.state_removed(state.key)
        if self.geometry.has_recurrent:
            self.kv.uncover(self.block_of(state.key))
            self.kv.drop_tail(state.key)

    def _block_was_evicted(self, key: BlockKey) -> None:
        if self.states.drop(key) is not None:
            self._remember_evicted(key)
            if self.listener is not None:
                self.listener.state_removed(key)
        if self.listener is not None:
            self.listener.block_removed(key)

    def _tail_was_evicted(self, key: BlockKey) -> None:
        if self.states.drop(key) is not None:
            self._remember_evicted(key)
        if self.listener is not None:
            self.listener.state_removed(key)

    def _tell_of_blocks(
        self, listener: CacheListener, keys: SequenceKeys, first: int, end: int
    ) -> None:
        """Before the blocks [first, end) are mapped: of those that are not yet."""
        mapped, start = self.kv.kv_hash_to_block_id, first
        for index in range(first, end):
            if keys.blocks[index] in mapped:
                if start < index:
                    listener.blocks_stored(keys, start, index)
                start = index + 1
        if start < end:
            listener.blocks_stored(keys, start, end)

    def _remember_evicted(self, key: BlockKey) -> None:
        self._evicted[key] = None
        self._evicted.move_to_end(key)
        if len(self._evicted) > EVICTED_KEYS_REMEMBERED:
            self._evicted.popitem(last=False)
