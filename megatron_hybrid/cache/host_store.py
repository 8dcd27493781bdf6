"""HostStore: cached KV blocks and states in host memory, from one budget of pages.

A page is as large as a KV block, and a state takes as many as it needs: so what sequences leave
decides how much of the memory is KV, not a ratio that somebody has to guess. Matching, mapping and
the order of eviction are those of the device's store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.changes import BLOCKS
from megatron_hybrid.cache.eviction import EvictionQueue
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.prefix_store import PrefixStore
from megatron_hybrid.cache.state_pool import FreeSlots


class PagedSlots(FreeSlots):
    """Slots whose states lie in pages, which are free again when the slot is."""

    def __init__(self, count: int, release: Callable[[list[int]], None]) -> None:
        super().__init__(1, count)
        self._release = release
        self.pages: dict[int, list[int]] = {}  # by slot

    def add(self, slot: int) -> None:
        """A slot is free from now on, and so are its pages."""
        super().add(slot)
        self._release(self.pages.pop(slot))


class HostStore(PrefixStore):
    """Pages 1 to num_pages."""

    def __init__(
        self,
        geometry: CacheGeometry,
        num_pages: int,
        queue: EvictionQueue,
        is_gone: Callable[[BlockKey], None] = lambda key: None,
    ) -> None:
        """geometry: of the device's caches. num_pages: of `page_bytes(geometry)` each. is_gone:
        called with the key of each state that goes."""
        self.page_bytes = page_bytes(geometry)
        self.pages_per_state = pages_per_state(geometry)
        sizes = replace(
            geometry,
            num_blocks=num_pages,
            max_requests=0,
            num_cached_slots=num_pages // max(1, self.pages_per_state),
            bytes_per_packed_state=None,
        )
        self._is_gone = is_gone
        self._paged = PagedSlots(sizes.num_cached_slots, lambda pages: self.kv.release(pages))
        super().__init__(sizes, queue, keeps_idle=True, free=self._paged)

    @property
    def num_states(self) -> int:
        """Cached states."""
        return len(self._paged.pages)

    @property
    def num_used(self) -> int:
        """Pages that hold something."""
        return self.kv.num_blocks - self.kv.num_free

    def pages_of(self, slot: int) -> list[int]:
        """The pages in which a slot's state lies, in their order."""
        return self._paged.pages[slot]

    def allocate(self, blocks: int, *, state: bool) -> tuple[list[int], int] | None:
        """Pages for so many blocks, and a slot with pages for a state, which the caller owns; of
        what goes first, if there are no free ones. None, if too much is in use."""
        per_state = self.pages_per_state
        wanted = blocks + (per_state if state else 0)
        kv, states = self.kv, self.states
        if wanted > kv.num_available + per_state * states.num_evictable:
            return None
        if state and not (states.has_free() or self.evict_state()):
            return None
        while kv.num_free < wanted:
            if not self._give_up_something(wanted - kv.num_free):
                return None
        own = kv.allocate(blocks)
        if not state:
            return own, 0
        slot = states.allocate()
        self._paged.pages[slot] = kv.allocate(per_state)
        return own, slot

    def _give_up_something(self, pages: int) -> bool:
        """A state, or blocks in up to so many pages; whether there was one. The policy for states
        decides about the KV that they need, too: that is uncovered."""
        if self.geometry.has_recurrent and not self.kv.num_uncovered and self.evict_state():
            return True
        return self._drop_blocks(pages) or self.evict_state()

    def _tell_of_removal(self, key: BlockKey, kind: int) -> None:
        super()._tell_of_removal(key, kind)
        if kind != BLOCKS:
            self._is_gone(key)

    def check_integrity(
        self,
        tables: Iterable[Sequence[int]] | None,
        owned: Iterable[int] | None,
        pinned: Iterable[int] | None,
    ) -> None:
        """As of the device's store; the pages of states are theirs."""
        if tables is not None:
            tables = [*tables, *self._paged.pages.values()]
        super().check_integrity(tables, owned, pinned)


def page_bytes(geometry: CacheGeometry) -> int:
    """A KV block; without attention a state."""
    return geometry.bytes_per_block or geometry.bytes_per_cached_slot


def pages_per_state(geometry: CacheGeometry) -> int:
    """Pages that a cached state takes."""
    return -(-geometry.bytes_per_cached_slot // page_bytes(geometry))
