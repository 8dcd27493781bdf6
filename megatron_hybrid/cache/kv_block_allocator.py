"""KV blocks: allocated, shared by reference count, kept for reuse, evicted leaves first.

    free  --allocate-->  referenced (private)  --publish-->  referenced (mapped)
     ^                            |                            |        ^
     |                         release                      release   acquire
     +----------------------------+                            v        |
     +---------------------evict-------------------  cached (mapped, no references)

Eviction takes the least recently used leaf, in O(1). Cached blocks stand in one queue; releasing a
table puts its blocks at the end, the last one first. A child is therefore always ahead of its
parent, whoever else used the parent later, and the head of the queue is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.errors import KVBlocksExhausted

DUMMY_BLOCK = 0  # takes masked writes and idle steps; never allocated, hashed, counted or freed


class KVBlockAllocator:
    """Blocks 1 to num_blocks. Every ancestor of a mapped block is mapped too.

    `on_evict(key)` is called when a block loses its key to make room.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[BlockKey], None] = lambda key: None
    ) -> None:
        self.num_blocks = num_blocks
        self.kv_hash_to_block_id: dict[BlockKey, int] = {}
        self.evictions = 0
        self._on_evict = on_evict
        self._free = list(range(num_blocks, 0, -1))  # a stack; low numbers first
        self._references = [0] * (num_blocks + 1)
        self._key: list[BlockKey | None] = [None] * (num_blocks + 1)
        # mapped blocks without references, the next one to be evicted first
        self._cached: OrderedDict[int, None] = OrderedDict()

    # ------------------------------------------------------------------ sizes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Mapped blocks that nobody references; all of them can be evicted."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can deliver, by eviction where needed."""
        return len(self._free) + len(self._cached)

    @property
    def num_mapped(self) -> int:
        return len(self.kv_hash_to_block_id)

    def references(self, block: int) -> int:
        return self._references[block]

    # ------------------------------------------------------------------ verbs

    def allocate(self, count: int) -> list[int]:
        """`count` private blocks with one reference each; evicts what it must.

        Raises KVBlocksExhausted, without any effect, when there are not that many.
        """
        if count > self.num_available:
            raise KVBlocksExhausted(
                f"{count} KV blocks are wanted; {len(self._free)} are free and "
                f"{len(self._cached)} can be evicted."
            )
        blocks = []
        for _ in range(count):
            if not self._free:
                self.evict()
            block = self._free.pop()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these mapped blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each. `blocks` is a sequence's table, in its order.

        A mapped block without references stays cached; a private one is free.
        """
        for block in reversed(blocks):  # children get ahead of their parents
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, key: BlockKey) -> int:
        """Map `key` to `block`, whose KV is complete, and return the block that holds the key.

        When the key is mapped already, the caller's reference moves to that block and its own is
        freed. A sequence's blocks are published in their order.
        """
        mapped = self.kv_hash_to_block_id.get(key)
        if mapped is not None:
            if mapped != block:
                self.acquire((mapped,))
                self.release((block,))
            return mapped
        self.kv_hash_to_block_id[key] = block
        self._key[block] = key
        return block

    def evict(self) -> int | None:
        """Free the least recently used leaf; None when nothing is cached."""
        if not self._cached:
            return None
        block, _ = self._cached.popitem(last=False)
        key = self._key[block]
        assert key is not None
        self._unmap(block)
        self._free.append(block)
        self.evictions += 1
        self._on_evict(key)
        return block

    def clear(self) -> None:
        """Unmap everything. Blocks in use stay with their users and are freed when released."""
        for block in list(self.kv_hash_to_block_id.values()):
            self._unmap(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def _unmap(self, block: int) -> None:
        key = self._key[block]
        self._key[block] = None
        # only if it points here: another block may hold the same content by now
        if key is not None and self.kv_hash_to_block_id.get(key) == block:
            del self.kv_hash_to_block_id[key]

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant. `tables`: the blocks that each user holds, with multiplicity."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert DUMMY_BLOCK not in free and DUMMY_BLOCK not in self._cached
        assert self._references[DUMMY_BLOCK] == 0 and self._key[DUMMY_BLOCK] is None
        for block in range(1, self.num_blocks + 1):
            assert self._references[block] >= 0
            idle, mapped = self._references[block] == 0, self._key[block] is not None
            assert (block in free) == (idle and not mapped), f"block {block}"
            assert (block in self._cached) == (idle and mapped), f"block {block}"
        for key, block in self.kv_hash_to_block_id.items():
            assert self._key[block] == key
        assert len(self.kv_hash_to_block_id) == sum(key is not None for key in self._key)
        if tables is not None:
            held = [0] * (self.num_blocks + 1)
            for table in tables:
                for block in table:
                    held[block] += 1
            assert held == self._references, "references differ from what is held"
