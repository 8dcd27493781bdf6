"""KV blocks: allocated, shared by reference count, kept for reuse, evicted leaves first.

free  --allocate-->  referenced (private)  --publish-->  referenced (mapped)
 ^                         |                               |        ^
 |                      release                         release   acquire
 +-------------------------+                               v        |
 +---------------evict-----------------------------  cached (mapped, no references)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.eviction import EvictionQueue, LeastRecentlyUsed
from megatron_hybrid.errors import KVBlocksExhausted

DUMMY_BLOCK = 0  # takes masked writes and idle steps; never allocated, hashed, counted or freed


class KVBlockAllocator:
    """Blocks 1 to num_blocks. Every ancestor of a mapped block is mapped too.

    `on_evict(key)` is called when a block loses its key to make room.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[BlockKey], None] = lambda key: None,
        queue: EvictionQueue | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.kv_hash_to_block_id: dict[BlockKey, int] = {}
        self.evictions = 0
        self._on_evict = on_evict
        self._leaves: EvictionQueue = LeastRecentlyUsed() if queue is None else queue
        self._free = list(range(num_blocks, 0, -1))  # a stack; low numbers first
        self._references = [0] * (num_blocks + 1)
        self._key: list[BlockKey | None] = [None] * (num_blocks + 1)
        self._parent = [DUMMY_BLOCK] * (num_blocks + 1)  # of mapped blocks; 0: the root
        self._mapped_children = [0] * (num_blocks + 1)
        self._last_use = [0] * (num_blocks + 1)
        self._clock = 0
        self._num_cached = 0  # mapped and without references

    # ------------------------------------------------------------------ sizes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Mapped blocks that nobody references; all of them can be evicted."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can deliver, by eviction where needed."""
        return len(self._free) + self._num_cached

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
                f"{self._num_cached} can be evicted."
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
                self._num_cached -= 1
                self._leaves.discard(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each. `blocks` is a sequence's table, in its order.

        A mapped block without references stays cached; a private one is free.
        """
        self._clock += 1
        for block in reversed(blocks):  # children first, so that a leaf is known as such
            self._references[block] -= 1
            self._last_use[block] = self._clock
            if self._references[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._num_cached += 1
                    self._add_if_leaf(block)

    def publish(self, block: int, key: BlockKey, parent: int) -> int:
        """Map `key` to `block`, whose KV is complete, and return the block that holds the key.

        `parent` is the mapped block before it in the sequence, or DUMMY_BLOCK for the first. When
        the key is mapped already, the caller's reference moves to that block and its own is freed.
        """
        mapped = self.kv_hash_to_block_id.get(key)
        if mapped is not None:
            if mapped != block:
                self.acquire((mapped,))
                self.release((block,))
            return mapped
        self.kv_hash_to_block_id[key] = block
        self._key[block] = key
        self._parent[block] = parent
        if parent != DUMMY_BLOCK:
            self._mapped_children[parent] += 1
            self._leaves.discard(parent)
        return block

    def evict(self) -> int | None:
        """Free the least recently used leaf; None when nothing is cached."""
        block = self._leaves.pop()
        if block is None:
            return None
        key = self._key[block]
        assert key is not None
        self._num_cached -= 1
        self._unmap(block)
        parent = self._parent[block]
        if parent != DUMMY_BLOCK:
            self._mapped_children[parent] -= 1
            self._add_if_leaf(parent)
        self._free.append(block)
        self.evictions += 1
        self._on_evict(key)
        return block

    def clear(self) -> None:
        """Unmap everything. Blocks in use stay with their users and are freed when released."""
        self._leaves.clear()
        for block in list(self.kv_hash_to_block_id.values()):
            self._unmap(block)
            self._mapped_children[block] = 0
            if self._references[block] == 0:
                self._free.append(block)
        self._num_cached = 0

    # ---------------------------------------------------------------- details

    def _add_if_leaf(self, block: int) -> None:
        if (
            self._references[block] == 0
            and self._key[block] is not None
            and self._mapped_children[block] == 0
        ):
            self._leaves.add(block, self._last_use[block])

    def _unmap(self, block: int) -> None:
        key = self._key[block]
        self._key[block] = None
        # only if it points here: another block may hold the same content by now
        if key is not None and self.kv_hash_to_block_id.get(key) == block:
            del self.kv_hash_to_block_id[key]

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant. `tables`: the blocks that each user holds, with multiplicity."""
        blocks = range(1, self.num_blocks + 1)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert DUMMY_BLOCK not in free
        assert self._references[DUMMY_BLOCK] == 0 and self._key[DUMMY_BLOCK] is None
        cached = {b for b in blocks if self._references[b] == 0 and self._key[b] is not None}
        assert len(cached) == self._num_cached
        children = [0] * (self.num_blocks + 1)
        for block in blocks:
            assert self._references[block] >= 0
            idle = self._references[block] == 0
            assert (block in free) == (idle and self._key[block] is None), f"block {block}"
            key = self._key[block]
            if key is None:
                continue
            assert self.kv_hash_to_block_id.get(key) == block
            parent = self._parent[block]
            if parent != DUMMY_BLOCK:
                assert self._key[parent] is not None, f"block {block} is an orphan"
                assert self._references[parent] >= self._references[block]
                children[parent] += 1
        assert len(self.kv_hash_to_block_id) == sum(k is not None for k in self._key)
        assert children == self._mapped_children
        leaves = {b for b in cached if children[b] == 0}
        assert len(self._leaves) == len(leaves) and all(b in self._leaves for b in leaves)
        if tables is not None:
            held = [0] * (self.num_blocks + 1)
            for table in tables:
                for block in table:
                    held[block] += 1
            assert held == self._references, "references differ from what is held"
