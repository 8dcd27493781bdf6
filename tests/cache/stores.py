"""PrefixStores for tests of their pools."""

from __future__ import annotations

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.changes import LOGITS, CacheChanges
from megatron_hybrid.cache.eviction import EvictionQueue, LeastRecentlyUsed
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.prefix_store import PrefixStore


class Removals(CacheChanges):
    """Notes the keys of what goes, in order."""

    def __init__(self, geometry: CacheGeometry, keys: list[BlockKey]) -> None:
        super().__init__(geometry)
        self.keys = keys

    def removed(self, key: BlockKey, kind: int) -> None:
        if kind != LOGITS:
            self.keys.append(key)


def make_store(
    num_blocks: int = 0,
    num_slots: int = 0,
    *,
    is_hybrid: bool = False,
    evicted: list[BlockKey] | None = None,
    keeps_idle: bool = True,
) -> PrefixStore:
    """Of a hybrid model; or one with blocks alone, or with slots alone. The oldest state goes
    first; `evicted` gets the keys of what goes."""
    geometry = CacheGeometry(
        block_size=1,
        kernel_chunk=1,
        num_blocks=num_blocks,
        max_requests=0,
        num_cached_slots=num_slots,
        bytes_per_block=int(num_blocks > 0),
        bytes_per_state=int(num_slots > 0 or is_hybrid),
    )
    store = PrefixStore(geometry, EvictionQueue(LeastRecentlyUsed()), keeps_idle=keeps_idle)
    store.changes = None if evicted is None else Removals(geometry, evicted)
    return store
