"""LowerTier: places in host memory for what an ObjectStore keeps, in both directions.

What is in host memory is written to the store, and what a waiting request's prompt has there beyond
host memory is read into it. From there on it is fetched as anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.host_tier import Copy, HostTier, Move
from megatron_hybrid.cache.lease import Pin
from megatron_hybrid.cache.state_pool import NULL_SLOT
from megatron_hybrid.cache.stored_prefixes import Ending, Found, Stored


class Save(NamedTuple):
    """A prefix in host memory that is being written to the store, and cannot be evicted there."""

    keys: list[bytes]  # of its KV
    parent: bytes
    pages: list[int]  # of its KV
    state_pages: list[int]
    ending: Ending | None  # None: KV alone, of a prompt that is still computed
    pin: Pin

    def stored(self, root: bytes) -> Stored:
        """What it is there."""
        assert self.ending is not None, "a part is not stored"
        return Stored(root, self.keys, self.parent, bytes.fromhex(self.ending.key))


class LowerTier:
    """Below the host memory of one engine."""

    def __init__(self, upper: HostTier) -> None:
        self.upper = upper
        self.counts: Counter[str] = Counter()

    def begin_save(self, keys: SequenceKeys, position: int) -> Save | None:
        """All of a prefix that is in host memory; None if it is there no more."""
        parent = keys.of_block(position // self.upper.host.geometry.block_size)
        return self.begin_save_of(self._kv_of(keys, position), keys.at(position), position, parent)

    def begin_save_of(
        self, names: list[bytes], key: bytes, position: int, parent: bytes = b""
    ) -> Save | None:
        """The same by keys: of all its KV, in order, of its end, and of its last full block."""
        host = self.upper.host
        state = host.states.get(key)
        if state is None and host.geometry.has_recurrent:
            return None
        pages = [host.block_of(name) for name in names]
        if 0 in pages:
            return None
        slot, state_pages = NULL_SLOT, []
        if state is not None:
            slot, state_pages = state.slot, host.pages_of(state.slot)
            host.states.pin(slot)
        host.kv.acquire(pages)
        fill = position % host.geometry.block_size
        ending = Ending(
            fill,
            key.hex(),
            state is not None,
            state is not None and state.has_logits,
            "" if state is None else state.kind,
            0 if state is None else state.turn,
            0 if state is None else state.pause,
        )
        return Save(names, parent, pages, state_pages, ending, Pin(slot, pages))

    def begin_save_of_part(self, names: list[bytes], first: int) -> Save | None:
        """A prompt's KV behind its first blocks, as far as it is there; None: there is none."""
        pages = self._first_pages(names[first:])
        if not pages:
            return None
        self.upper.host.kv.acquire(pages)
        return Save(names[first : first + len(pages)], b"", pages, [], None, Pin(NULL_SLOT, pages))

    def end_save(self, save: Save, written: int | None) -> None:
        """It was written, so many bytes; None: it could not be."""
        host = self.upper.host
        host.unpin(save.pin)
        if written is not None:
            self.counts["tier_writes"] += save.ending is not None
            self.counts["tier_bytes_written"] += written

    def num_there(self, keys: SequenceKeys) -> int:
        """Full blocks of KV from the beginning that are in host memory."""
        return len(self._first_pages(keys.blocks))

    def begin_load(self, keys: SequenceKeys, found: Found, beyond: int) -> Move | None:
        """A place in host memory for what the store has of a prompt, of which `beyond` tokens need
        not be computed anyway. None, without any effect, if there is none now."""
        host, ending, position = self.upper.host, found.ending, found.position
        state = None
        if ending is not None and ending.has_state:
            state = CachedState(
                b"", position, ending.kind, has_logits=ending.has_logits,
                turn=ending.turn, pause=ending.pause,
            )  # fmt: skip
        path = self._first_pages(keys.blocks[: self.upper.full_blocks(position)])
        host.kv.acquire(path)
        count = host.geometry.blocks_for(position) - len(path)
        place = host.allocate(count, state=state is not None)
        if place is None:
            host.release_blocks(path)
            self.upper.refused["tier_full"] += 1
            return None
        own, slot = place
        return Move(
            keys,
            position,
            Copy([], own, NULL_SLOT, [] if state is None else host.pages_of(slot)),
            path + own,
            len(path),
            slot,
            state,
            Pin(NULL_SLOT, []),
            self.upper.version,
            tokens=position - beyond,
        )

    def end_load(self, move: Move, *, is_there: bool) -> bool:
        """It was read, or not; whether it can be found in host memory now."""
        host = self.upper.host
        if not is_there:
            self.upper.give_back(host, move.slot, move.blocks)
            return False
        if not self.upper.arrived_from_below(move):
            return False
        self.counts["tier_fetches"] += move.tokens > 0  # else it is the KV of a part
        self.counts["tier_tokens_fetched"] += move.tokens
        geometry = host.geometry
        state = geometry.bytes_per_cached_slot if move.state is not None else 0
        self.counts["tier_bytes_fetched"] += len(move.copy.pages) * host.page_bytes + state
        return True

    def stored(self, root: bytes, move: Move) -> Stored:
        """What a load reads."""
        keys, position = move.keys, move.position
        parent = keys.of_block(position // self.upper.host.geometry.block_size)
        return Stored(root, self._kv_of(keys, position), parent, keys.at(position))

    def _first_pages(self, names: Sequence[BlockKey]) -> list[int]:
        """Of full blocks, one behind the other, those that are in host memory up to the first that
        is not."""
        return list(takewhile(bool, map(self.upper.host.block_of, names)))

    def _kv_of(self, keys: SequenceKeys, position: int) -> list[BlockKey]:
        return names_of(keys.blocks, position, keys.at(position), self.upper.host.geometry)


def names_of(
    blocks: Sequence[BlockKey], position: int, end: BlockKey, geometry: CacheGeometry
) -> list[BlockKey]:
    """The keys of all KV of a prefix, in order, by those of its full blocks and of its end."""
    if not geometry.has_attention:
        return []
    full, rest = divmod(position, geometry.block_size)
    return [*blocks[:full], *([end] if rest else [])]
