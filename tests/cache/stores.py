"""PrefixStores for tests of their pools."""

from __future__ import annotations

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.eviction import EvictionQueue, LeastRecentlyUsed
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.prefix_store import PrefixStore


class Removals:
    """A listener that notes the keys of what goes, in order."""

    def __init__(self, keys: list[BlockKey]) -> None:
        self.keys = keys

    def block_removed(self, key: BlockKey) -> None:
        self.keys.append(key)

    state_removed = block_removed

    def blocks_stored(self, keys: SequenceKeys, first: int, end: int) -> None:
        pass

    def state_stored(self, keys: SequenceKeys, position: int, has_logits: bool) -> None:
        pass

    def logits_removed(self, key: BlockKey) -> None:
        pass

    def cleared(self, epoch: int) -> None:
        pass


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
    store.listener = None if evicted is None else Removals(evicted)
    return store
