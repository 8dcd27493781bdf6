"""HostTier: what the device would forget, kept in host memory: written while it is still there, and
fetched before a request that wants it is admitted.

Whole objects move: a state, with just those KV blocks before it that are not there yet. On either
side every ancestor of a block is there, so what is missing is the end of a path.

    begin_write   the next state that is worth it: its place in host memory, and its pin
    end_write     it was copied: it can be found there
    begin_fetch   what host memory has beyond the device's match: its place on the device
    end_fetch     it was copied: it can be found here, and is pinned for who waits for it

In between nothing of it can be evicted, on either side, and nobody finds it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.changes import CacheChanges
from megatron_hybrid.cache.checkpoint_placement import PROMPT_END
from megatron_hybrid.cache.eviction import EvictionQueue
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.host_store import HostStore
from megatron_hybrid.cache.lease import Pin
from megatron_hybrid.cache.prefix_store import PrefixMatch, PrefixStore
from megatron_hybrid.cache.state_pool import NULL_SLOT
from megatron_hybrid.cache.tier import COUNTERS, REFUSED, Tier
from megatron_hybrid.errors import StatePoolExhausted

NAME = "host"  # in figures
LOOKED_AT = 32  # states that were published, at most, to find one to write
MOST_PENDING = 65_536  # published ones that are remembered
ANY_STEP = 2**62  # of those that are launched


class Copy(NamedTuple):
    """Between the device and pages of host memory."""

    blocks: list[int]  # of the device
    pages: list[int]  # one for each
    slot: int  # of the device; NULL_SLOT: no state
    state_pages: list[int]
    # The last step that may write to where it comes from, or use where it goes to, on the device.
    touched: int = ANY_STEP


@dataclass(slots=True)
class Move:
    """A prefix on its way from one store to the other."""

    keys: SequenceKeys
    position: int
    copy: Copy
    blocks: list[int]  # where it goes: of all its KV, in order, referenced
    first: int  # of these, which is not there yet
    slot: int  # where it goes
    state: CachedState | None  # where it comes from
    pin: Pin  # there
    version: int
    tokens: int = 0  # of a fetch: that can be skipped besides


class _Published(NamedTuple):
    keys: SequenceKeys
    position: int
    state: CachedState | None


def _key(keys: SequenceKeys, position: int, state: CachedState | None) -> BlockKey:
    """Of a prefix."""
    return keys.at(position) if state is None else state.key


class _Pending(OrderedDict[BlockKey, _Published]):
    """What may be written, one after the other."""

    def append(self, published: _Published) -> None:
        """Behind the others, if it is not there. The first one goes if there are too many."""
        self.setdefault(_key(*published), published)
        if len(self) > MOST_PENDING:
            self.popitem(last=False)

    def popleft(self) -> _Published:
        """The first one."""
        return self.popitem(last=False)[1]


class _Arrived(NamedTuple):
    state: CachedState | None
    is_new: bool  # it was not there yet


class HostTier(Tier):
    """Beside the store of one engine's device."""

    def __init__(
        self,
        device: PrefixStore,
        num_pages: int,
        queue: EvictionQueue,
        bytes_per_token: float,
        geometry: CacheGeometry | None = None,
    ) -> None:
        """num_pages: see HostStore. queue: which state in host memory goes first. bytes_per_token:
        that come while one token is computed. geometry: the device's, with bytes of what is here;
        None: of the same."""
        self.device = device
        self._geometry = device.geometry if geometry is None else geometry
        self.host = HostStore(self._geometry, num_pages, queue, self._is_gone)
        self._bytes_per_token = bytes_per_token
        self.rate = 0  # bytes a second that a fetch moves, as measured; 0: it was not
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSED, 0))  # by reason
        self._published, self._covered = _Pending(), _Pending()
        self._writing: set[BlockKey] = set()
        self.version = 0
        # of tiers below: by name, by tier
        self.lower_figures: Callable[[], dict[str, dict[str, int]]] = dict

    # ------------------------------------------------------------ to the host

    def was_published(self, keys: SequenceKeys, position: int, state: CachedState | None) -> None:
        self._published.append(_Published(keys, position, state))

    def was_used(self, keys: SequenceKeys, state: CachedState) -> None:
        known = self.host.states.get(state.key)
        if known is not None:
            self.host.states.pin(known.slot)
            self.host.states.unpin(known.slot, used=True)
        elif state.hits:  # not for the first time: others share it
            self.was_published(keys, state.position, state)

    @property
    def has_published(self) -> bool:
        """Whether there may be something to write."""
        return bool(self._published or self._covered)

    def may_come(self, key: BlockKey) -> bool:
        """Whether the device has a prefix, which may be written."""
        kv = self.device.kv
        is_kv = key in kv.tails or key in kv.kv_hash_to_block_id
        return is_kv or self.device.states.get(key) is not None

    def begin_write(self, *, covered: bool = True) -> Move | None:
        """The next prefix that is to be written, with a place; None if there is none now. covered:
        or a prompt's own end that an answer covers."""
        for _ in range(min(LOOKED_AT, len(self._published))):
            published = self._published.popleft()
            if self._is_there(published):
                continue
            state = published.state
            if state is not None and not state.is_shared:
                if state.runners:
                    self._published.append(published)  # what they end with says more
                    continue
                if state.children:  # another one behind it says more
                    if state.kind == PROMPT_END:
                        self._covered.append(published)
                    continue
            write = self._write(*published)
            if write is not None:
                return write
        return self._write_covered() if covered else None

    def _write_covered(self) -> Move | None:
        """A prompt that comes again as it was needs its own end's state: where nothing has to go
        for it, that is written, too."""
        for _ in range(min(LOOKED_AT, len(self._covered))):
            published = self._covered.popleft()
            most = self._blocks_to(published.position) + self.host.pages_per_state
            if not self._is_there(published) and most <= self.host.kv.num_free:
                write = self._write(*published)
                if write is not None:
                    return write
        return None

    def end_write(self, move: Move) -> bool:
        """It was copied; whether it can be found in host memory."""
        self._writing.discard(_key(move.keys, move.position, move.state))
        if self._arrived(move, self.device, self.host) is None:
            return False
        if move.state is not None and move.state.alive:
            self._is_kept(move.state)
        self.host.release_blocks(move.blocks)
        self.counts["tier_writes"] += 1
        self.counts["tier_bytes_written"] += self._bytes_of(move.copy)
        return True

    def arrived_from_below(self, move: Move) -> bool:
        """It was read from a lower tier; whether it can be found in host memory."""
        if self._arrived(move, self.device, self.host) is None:
            return False
        self.host.release_blocks(move.blocks)
        return True

    # ---------------------------------------------------------- to the device

    def find(self, keys: SequenceKeys, match: PrefixMatch, length: int) -> PrefixMatch | None:
        """What host memory has of a prompt of `length` tokens beyond the device's `match`."""
        found = self.host.match(keys, length, most=match.most)
        return found if found.skip > match.skip else None

    def is_pressed(self, blocks: int) -> bool:
        """Whether room for a fetch of so many blocks can only be had, on the device, from what is
        on its way, or of a state that covers something and is not in host memory."""
        states, kv = self.device.states, self.device.kv
        if not self.device.geometry.has_recurrent:
            return False
        if states.has_free(for_checkpoint=True) and kv.num_free + kv.num_uncovered >= blocks:
            return False
        first = states.queue.first()
        if first is None:
            return True
        (rank, _), state = first
        return rank > 0 and not state.fetch_tokens

    def begin_fetch(
        self, keys: SequenceKeys, match: PrefixMatch, found: PrefixMatch, length: int, headroom: int
    ) -> Move | None:
        """A place on the device for what `find` has found, beside the rest of the prompt, and
        `headroom` blocks for others. None, without any effect, if there is none now."""
        device = self.device
        copied = self.missing(match, found)
        blocks = match.blocks[: self._blocks_to(found.skip)]
        wanted = device.geometry.blocks_for(length) - len(blocks)
        if wanted and wanted > device.kv.num_available_beside(blocks) - headroom:
            return None  # a model without attention wants none
        device.kv.acquire(blocks)
        first, slot = len(blocks), NULL_SLOT
        state = found.state if device.reads_state(found, length) else None
        if state is not None:
            try:
                slot = device.allocate_slot(for_checkpoint=True)
            except StatePoolExhausted:
                device.release_blocks(blocks)
                return None
        own = device.allocate_blocks(len(copied))
        touched = [device.kv.touched[block] for block in own]
        if state is not None:
            touched.append(device.states.touched[slot])
        pages = self._path(found)
        self.host.kv.acquire(pages)
        state_pages: list[int] = []
        if state is not None:
            self.host.states.pin(state.slot)
            state_pages = self.host.pages_of(state.slot)
        return Move(
            keys,
            found.skip,
            Copy(own, copied, slot, state_pages, max(touched, default=0)),
            blocks + own,
            first,
            slot,
            state,
            Pin(NULL_SLOT if state is None else state.slot, pages),
            self.version,
            tokens=found.skip - match.skip,
        )

    def end_fetch(self, move: Move) -> Pin | None:
        """It was copied: it can be found on the device, and is pinned; None if it is of no use any
        more."""
        theirs = move.state
        arrived = self._arrived(move, self.host, self.device)
        if arrived is None:
            return None
        self.counts["tier_fetches"] += 1
        self.counts["tier_bytes_fetched"] += self._bytes_of(move.copy)
        self.counts["tier_tokens_fetched"] += move.tokens
        if theirs is None or arrived.state is None:
            return Pin(NULL_SLOT, move.blocks)
        if arrived.is_new:
            arrived.state.used_at = theirs.used_at  # pauses are counted from then
            if theirs.alive:
                self._is_kept(arrived.state)
        self.device.states.pin(arrived.state.slot)
        return Pin(arrived.state.slot, move.blocks)

    def missing(self, match: PrefixMatch, found: PrefixMatch) -> list[int]:
        """The pages of KV that the device lacks of what was found."""
        return self._path(found)[len(match.blocks) :]

    def is_worth_it(self, match: PrefixMatch, found: PrefixMatch, length: int) -> bool:
        """Whether fetching what was found is quicker than computing it."""
        geometry = self._geometry
        state = geometry.bytes_per_cached_slot * self.device.reads_state(found, length)
        moved = len(self.missing(match, found)) * geometry.bytes_per_block + state
        return moved < (found.skip - match.skip) * self._bytes_per_token

    # ------------------------------------------------------------------ whole

    def take_down(self, changes: CacheChanges) -> None:
        self.host.changes = changes

    def clear(self) -> None:
        self.version += 1  # what is under way ends without an effect
        for pending in (self._published, self._covered, self._writing):
            pending.clear()
        self.host.clear(0)

    def begin_step(self, step: int) -> None:
        """Ages are counted in the engine's steps."""
        self.host.kv.step = self.host.states.queue.now = step

    def figures(self) -> dict[str, dict[str, int]]:
        host = self.host
        found: dict[str, int] = {name: self.counts[name] for name in COUNTERS} | {
            "tier_bytes": host.kv.num_blocks * host.page_bytes,
            "tier_bytes_used": host.num_used * host.page_bytes,
            "tier_states": host.num_states,
            "tier_rate": self.rate,
        }
        lower = self.lower_figures()
        by_tier = {name: {NAME: n, **lower.get(name, {})} for name, n in found.items()}
        return by_tier | {"tier_refused": dict(self.refused)}

    # ---------------------------------------------------------------- details

    def _arrived(self, move: Move, source: PrefixStore, target: PrefixStore) -> _Arrived | None:
        """It can be found where it was to go; None if it is of no use any more."""
        keys = move.keys
        source.unpin(move.pin)  # who waits for it will count as its reader
        if move.version != self.version:
            self.give_back(target, move.slot, move.blocks)
            return None
        target.map_blocks(keys, move.blocks, move.first, self.full_blocks(move.position))
        if move.state is None:
            target.map_tail(keys, move.blocks, move.position)
            return _Arrived(None, is_new=True)
        own = self._same(move.state, target, keys)
        cached = target.map_state(keys, move.blocks, move.slot, own)
        return _Arrived(cached, is_new=cached is own)

    def _bytes_of(self, copy: Copy) -> int:
        geometry = self._geometry
        state = geometry.bytes_per_cached_slot if copy.slot else 0
        return len(copy.blocks) * geometry.bytes_per_block + state

    def _write(self, keys: SequenceKeys, position: int, state: CachedState | None) -> Move | None:
        device, host = self.device, self.host
        full, end = self.full_blocks(position), self._blocks_to(position)
        there, here = host.kv.kv_hash_to_block_id, device.kv.kv_hash_to_block_id
        first = full
        while first and keys.blocks[first - 1] not in there:
            first -= 1
        table = [here.get(key, 0) for key in keys.blocks[:full]]
        if end > full:
            tail = device.kv.tails.get(keys.at(position))
            table.append(0 if tail is None else tail.block)
        if 0 in table:
            return None  # some of its KV is gone already
        path = [there[key] for key in keys.blocks[:first]]
        host.kv.acquire(path)
        place = host.allocate(end - first, state=state is not None)
        if place is None:
            host.release_blocks(path)
            self.refused["tier_full"] += 1
            return None
        own, slot = place
        state_pages = [] if state is None else host.pages_of(slot)
        device_slot, touched = NULL_SLOT, ANY_STEP
        if state is not None:
            device_slot = state.slot
            device.states.pin(device_slot)
            if device.geometry.has_recurrent:  # its KV was there before
                touched = device.states.touched[device_slot]
        device.kv.acquire(table)
        self._writing.add(_key(keys, position, state))
        return Move(
            keys,
            position,
            Copy(table[first:], own, device_slot, state_pages, touched),
            path + own,
            first,
            slot,
            state,
            Pin(device_slot, table),
            self.version,
        )

    def _is_kept(self, state: CachedState | None) -> None:
        """A state on the device is in host memory, too: losing it costs a fetch."""
        if state is not None:
            geometry = self._geometry
            kv = state.replay_tokens * geometry.bytes_per_block / geometry.block_size
            moved = geometry.bytes_per_cached_slot + kv
            state.fetch_tokens = max(1, round(moved / self._bytes_per_token))
            self.device.states.queue.refresh(state)

    def _is_gone(self, key: BlockKey) -> None:
        """A state is in host memory no more."""
        state = self.device.states.get(key)
        if state is not None:
            state.fetch_tokens = 0
            self.device.states.queue.refresh(state)

    def _is_there(self, published: _Published) -> bool:
        """Whether there is nothing to write, or nothing any more, or it is under way."""
        state, key = published.state, _key(*published)
        if key in self._writing:
            return True
        if state is not None:
            return not state.alive or self.host.states.get(key) is not None
        return key in self.host.kv.tails or key in self.host.kv.kv_hash_to_block_id

    def _same(self, state: CachedState, store: PrefixStore, keys: SequenceKeys) -> CachedState:
        """What is to be cached in the other store."""
        before = store.match(keys, state.position - 1) if state.position > 1 else None
        return CachedState(
            b"",
            state.position,
            state.kind,
            None if before is None else before.state,
            state.has_logits,
            hits=state.hits,
            turn=state.turn,
            pause=state.pause,
        )

    def full_blocks(self, position: int) -> int:
        """Of KV, below a position."""
        geometry = self.device.geometry
        return position // geometry.block_size if geometry.has_attention else 0

    def _blocks_to(self, position: int) -> int:
        """That hold the KV of so many tokens."""
        return self.device.geometry.blocks_for(position)

    def _path(self, found: PrefixMatch) -> list[int]:
        """The pages of the KV up to where a prompt can be continued."""
        end = self._blocks_to(found.skip)
        pages = found.blocks[:end]
        return pages if len(pages) == end else [*pages, found.tail_block]

    @staticmethod
    def give_back(store: PrefixStore, slot: int, blocks: list[int]) -> None:
        """A place that nothing came to."""
        if slot != NULL_SLOT:
            store.states.release(slot)
        store.release_blocks(blocks)
