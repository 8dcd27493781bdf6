"""PrefixStore: what can be found, and what goes to make room. KV blocks, tails and states under the
keys of their prefixes.

It keeps the two pools consistent: a state never outlives the KV that it needs, a tail never the
state without which nobody could use it, and KV behind which no state is left goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.changes import BLOCKS, LOGITS, STATES, CacheChanges
from megatron_hybrid.cache.eviction import EvictionQueue
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.kv_block_allocator import DUMMY_BLOCK, KVBlockAllocator
from megatron_hybrid.cache.lease import Pin
from megatron_hybrid.cache.state_pool import NULL_SLOT, FreeSlots, StatePool
from megatron_hybrid.cache.tail_index import Tail, is_usable
from megatron_hybrid.cache.windows import NoWindows, Windows
from megatron_hybrid.errors import KVBlocksExhausted

STATES_GIVEN_UP_AT_ONCE = 8
LOST_CAUSES = ("grid", "prompt_logprobs", "state_evicted", "state_missing")  # of `lost_tokens`
EVICTED_KEYS_REMEMBERED = 16384  # for telling "evicted" from "never there"


class PrefixMatch(NamedTuple):
    """What the cache holds of one prompt."""

    blocks: list[int]  # the leading KV blocks found, to be shared
    matched_tokens: int  # how far KV was found
    skip: int  # tokens that need no computing: KV and state are both there
    state: CachedState | None = None  # at `skip`; None at 0 and where no state is needed
    tail_block: int = DUMMY_BLOCK  # holds the KV behind `blocks` up to `skip`, to be copied
    most: int | None = None  # may be skipped, since the request wants logits behind it; None: all


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
    window_blocks: int  # of layers with a sliding window
    window_free: int  # hold nothing; blocks = free + used + evictable
    window_used: int  # of running requests
    window_evictable: int  # kept with cached states alone


class PrefixStore:
    """Both pools of one engine and what is mapped in them."""

    def __init__(
        self,
        geometry: CacheGeometry,
        queue: EvictionQueue,
        *,
        keeps_idle: bool,
        free: FreeSlots | None = None,
    ) -> None:
        """`queue`: which state goes first. `keeps_idle`: whether a block outlives its last
        reference (not under `ref_zero`). `free`: of StatePool."""
        self.geometry = geometry
        self.kv = KVBlockAllocator(geometry.num_blocks, needs_cover=geometry.needs_state)
        self.states = StatePool(
            geometry.num_slots,
            queue,
            num_live=geometry.max_requests if geometry.packs_states else 0,
            num_staged=geometry.num_staged_slots,
            free=free,
        )
        self.windows = Windows(geometry, self.evict_state) if geometry.has_window else NoWindows()
        self._keeps_idle = keeps_idle
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()
        self.changes: CacheChanges | None = None  # told of, where somebody wants to know

    # ---------------------------------------------------------------- matching

    def match(self, keys: SequenceKeys, length: int, *, most: int | None = None) -> PrefixMatch:
        """The longest reusable prefix of a prompt of `length` tokens.

        It leaves at least one token to compute, unless the state at the prompt's very end comes
        with the logits of its last token. (Without them that state can't be used: the last token
        would be applied to it twice.) `most`: no more may be skipped, for a request that needs the
        logits behind it; KV blocks are shared from there on, too. Changes nothing.
        """
        size, has_attention = self.geometry.block_size, self.geometry.has_attention
        keys.extend_to(length)
        blocks: list[int] = []
        full = length // size
        if has_attention:
            mapped = self.kv.kv_hash_to_block_id
            for key in keys.blocks[:full]:
                block = mapped.get(key)
                if block is None:
                    break
                blocks.append(block)
            full = len(blocks)
        skip, state, tail_block = 0, None, DUMMY_BLOCK
        tails = self.kv.tails
        needs_state, states = self.geometry.needs_state, self.states.mamba_hash_to_slot_id
        last = length if most is None else min(most, length)
        within = keys.blocks[: min(full, last // size)]
        for end, key in tails.fills.ends(keys.root, within, size, keys.at, last):
            if needs_state and key not in states:  # as at most of them
                continue
            tail = tails.get(key)
            if tail is None and end % size:
                continue
            found = self.states.get(key)
            if is_usable(found, end, length, needs_state=needs_state):
                skip, state = end, found
                tail_block = DUMMY_BLOCK if tail is None else tail.block
                break
        if skip < length:
            del blocks[(length - 1) // size :]
        if skip // size < len(blocks):
            tail_block = DUMMY_BLOCK  # a shared block holds it anyway
        matched = max(len(blocks) * size, skip)
        return PrefixMatch(blocks, matched, skip, state, tail_block, most)

    def reads_state(self, match: PrefixMatch, length: int) -> bool:
        """Whether a prompt of `length` tokens goes on from what is in the match's slot: without
        recurrent layers that is the logits at its very end alone."""
        return match.state is not None and (self.geometry.needs_state or match.skip == length)

    # ----------------------------------------------------------------- mapping

    def map_blocks(self, keys: SequenceKeys, blocks: list[int], first: int, end: int) -> bool:
        """Map the full blocks [first, end) of a sequence's table. Where the content is mapped
        already, that block takes the place of the one in `blocks`; returns whether any did."""
        changed = False
        parent = blocks[first - 1] if first else DUMMY_BLOCK
        if self.changes is not None:
            known = self.kv.kv_hash_to_block_id
            for is_known, run in groupby(range(first, end), lambda i: keys.blocks[i] in known):
                if not is_known:
                    indices = list(run)
                    self.changes.blocks_stored(keys, indices[0], indices[-1] + 1)
        for index in range(first, end):
            mapped = self.kv.map(blocks[index], keys.blocks[index], parent)
            if mapped != blocks[index]:
                changed = True
                blocks[index] = mapped
            parent = mapped
        return changed

    def map_tail(self, keys: SequenceKeys, blocks: Sequence[int], position: int) -> None:
        """Map the KV behind the last full block below `position`, if there is any."""
        count, fill = divmod(position, self.geometry.block_size)
        if not fill or (key := keys.at(position)) in self.kv.tails:
            return
        parent_key = keys.of_block(count)
        if self.geometry.has_attention:
            parent = blocks[count - 1] if count else DUMMY_BLOCK
            tail = Tail(parent_key, fill, blocks[count])
            self.kv.map_tail(blocks[count], key, tail, parent)
        else:
            self.kv.tails.add(key, Tail(parent_key, fill, DUMMY_BLOCK))
        if self.changes is not None and not self.geometry.needs_state:
            self.changes.state_stored(keys, position, False)

    def map_state(
        self, keys: SequenceKeys, blocks: Sequence[int], slot: int, state: CachedState
    ) -> CachedState:
        """Map what an owned slot holds, after the KV that it needs; returns what is cached under
        its key, which may have been there before."""
        state.key = keys.at(state.position)
        self.map_tail(keys, blocks, state.position)
        known = self.states.get(state.key)
        had_logits = known is not None and known.has_logits
        cached = self.states.cache(slot, state)
        if self.changes is not None and (known is None or cached.has_logits != had_logits):
            self.changes.state_stored(keys, state.position, cached.has_logits)
        if cached is state and self.geometry.needs_state:
            self.kv.cover(self.block_of(state.key))
        return cached

    def forget_unread(self, state: CachedState | None) -> None:
        """Forget a state that is still cached, unless somebody read it or is about to."""
        if state is None or not state.alive or state.hits:
            return
        if not self.states.is_pinned(state.slot):
            self.forget(state)

    def forget(self, state: CachedState) -> None:
        """Drop a cached state, and the tail that nobody can use without it."""
        self._drop_state(state.key)
        self._state_is_gone(state)

    # ---------------------------------------------------------------- eviction

    def allocate_blocks(self, count: int) -> list[int]:
        """`count` private blocks, which may be those of what is cached. Raises KVBlocksExhausted,
        without any effect, when there are not that many."""
        kv = self.kv
        if count > kv.num_available:
            raise KVBlocksExhausted(
                f"{count} KV blocks are wanted; {kv.num_free} are free and "
                f"{kv.num_cached} can be evicted."
            )
        while kv.num_free < count:
            if self.geometry.needs_state and not kv.num_uncovered:
                self._uncover_a_path()
                if kv.num_free >= count:  # the ends of sequences may be free at once
                    break
            self._drop_blocks(count - kv.num_free)
        return kv.allocate(count)

    def allocate_slot(self, *, for_checkpoint: bool = False, evicts: bool = True) -> int:
        """A slot that the caller owns: a free one, else, if it `evicts`, that of the state that
        goes first. Raises StatePoolExhausted, without any effect, when there is none."""
        if evicts and not self.states.has_free(for_checkpoint=for_checkpoint):
            self.evict_state()
        return self.states.allocate(for_checkpoint=for_checkpoint)

    def evict_state(self) -> bool:
        """Give up the state that goes first; whether there was one."""
        state = self.states.evict()
        if state is None:
            return False
        self.windows.drop(state)
        self._state_is_gone(state)
        self._remember_evicted(state.key)
        return True

    def unpin(self, pin: Pin) -> None:
        """Let what a pin keeps be evicted. Who kept it is no user of it."""
        if pin.slot != NULL_SLOT:
            self.states.unpin(pin.slot, used=False, touched=False)
        self.release_blocks(pin.blocks, touched=False)
        self.windows.unpin(pin)

    def release_blocks(self, blocks: Sequence[int], *, touched: bool = True) -> None:
        """Give back a reference to each block of a sequence's table. touched: of the allocator."""
        self.kv.release(blocks, touched=touched)
        while not self._keeps_idle and self._drop_block(counts=False):
            pass

    # ------------------------------------------------------------------- whole

    def block_of(self, key: BlockKey) -> int:
        """The block that holds the last KV of a cached prefix."""
        tail = self.kv.tails.get(key)
        return self.kv.kv_hash_to_block_id.get(key, DUMMY_BLOCK) if tail is None else tail.block

    def lost_tokens(self, match: PrefixMatch, keys: SequenceKeys) -> dict[str, int]:
        """Tokens whose KV was found but that are computed again, by cause."""
        if match.matched_tokens == match.skip or not self.geometry.has_attention:
            return {}
        end, size = match.matched_tokens, self.geometry.block_size
        if match.most is not None:
            end = min(end, max(match.most, match.skip))
        lost = end - match.skip
        grid = min(lost, end - self.geometry.floor_grid(end))
        between = keys.blocks[match.skip // size : end // size]
        cause = "state_evicted" if any(key in self._evicted for key in between) else "state_missing"
        behind = match.matched_tokens - end
        causes = (("prompt_logprobs", behind), ("grid", grid), (cause, lost - grid))
        return {c: n for c, n in causes if n}

    def clear(self, epoch: int) -> None:
        """Nothing can be found any more. What is in use stays with its users. epoch: what later
        keys depend on."""
        self.kv.clear()
        if self.geometry.has_window:
            for state in self.states.cached():
                self.windows.drop(state)
        self.states.clear()
        self._evicted.clear()
        if self.changes is not None:
            self.changes.cleared(epoch)

    def occupancy(self) -> Occupancy:
        """How full the pools are now."""
        kv, states, window = self.kv, self.states, self.windows.blocks
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
            window_blocks=window.num_blocks,
            window_free=window.num_free,
            window_used=window.num_held,
            window_evictable=window.num_evictable,
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
            if self.geometry.needs_state:
                self.kv.check_cover(places.values())
        if self.geometry.needs_state:
            keys = {state.key for state in cached}
            assert all(key in keys for key, _ in self.kv.tails.items()), "a tail has no state"

    # ---------------------------------------------------------------- details

    def _uncover_a_path(self) -> None:
        """Give up states until there is KV without one behind it, so that the policy for states
        decides about KV too. Few have to go besides: those that others cover."""
        for _ in range(STATES_GIVEN_UP_AT_ONCE):
            if not self.evict_state() or self.kv.num_uncovered:
                return

    def _drop_state(self, key: BlockKey) -> CachedState | None:
        """Forget the state of a prefix, if there is one, and return it."""
        state = self.states.drop(key)
        if state is not None:
            self.windows.drop(state)
        return state

    def _state_is_gone(self, state: CachedState) -> None:
        stays = not self.geometry.needs_state and state.key in self.kv.tails
        self._tell_of_removal(state.key, LOGITS if stays else STATES)
        if self.geometry.needs_state:
            self.kv.uncover(self.block_of(state.key))
            self.kv.drop_tail(state.key)

    def _drop_blocks(self, most: int) -> bool:
        """Evict up to `most` that are of no use, or else one; whether there was one."""
        if not self.kv.num_uncovered:
            return self._drop_block(counts=True)
        for key in self.kv.evict_uncovered(most):
            self._tell_of_removal(key, BLOCKS)
        return True

    def _drop_block(self, *, counts: bool) -> bool:
        """Evict a block, and the states that need its KV with it; whether there was one."""
        dropped = self.kv.evict(counts=counts)
        if dropped is None:
            return False
        for tail in dropped.tails:
            if self._drop_state(tail) is not None:
                self._remember_evicted(tail)
            self._tell_of_removal(tail, STATES)
        if dropped.key is not None:
            if self._drop_state(dropped.key) is not None:
                self._remember_evicted(dropped.key)
                self._tell_of_removal(dropped.key, STATES)
            self._tell_of_removal(dropped.key, BLOCKS)
        return True

    def _tell_of_removal(self, key: BlockKey, kind: int) -> None:
        if self.changes is not None:
            self.changes.removed(key, kind)

    def _remember_evicted(self, key: BlockKey) -> None:
        self._evicted[key] = None
        self._evicted.move_to_end(key)
        if len(self._evicted) > EVICTED_KEYS_REMEMBERED:
            self._evicted.popitem(last=False)
