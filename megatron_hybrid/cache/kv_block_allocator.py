"""KV blocks: allocated, shared by reference count, kept for reuse, evicted leaves first.

    free  --allocate-->  referenced (private)  ----map---->  referenced (mapped)
     ^                            |                            |        ^
     |                         release                      release   acquire
     +----------------------------+                            v        |
     +---------------------evict-------------------  cached (mapped, no references)

A block is mapped while it has a key of its own (it is full) or holds tails (its first tokens are
the end of a cached prefix, or several).

Eviction takes the least recently used leaf, in O(1). Cached blocks stand in two queues; releasing
a table puts its blocks at the end, the last one first. A child is therefore always ahead of its
parent, whoever else used the parent later, and the head of a queue is always a leaf.

In a hybrid model KV is useful only up to a cached state at or behind it. A block is `covered`
while there is one; uncovered blocks wait in a queue of their own, which goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.tail_index import Tail, TailIndex

DUMMY_BLOCK = 0  # takes masked writes and idle steps; never allocated, hashed, counted or freed


class DroppedBlock(NamedTuple):
    """What a block was found by when it was evicted."""

    block: int
    key: BlockKey | None
    tails: list[BlockKey]


class KVBlockAllocator:
    """Blocks 1 to num_blocks. Every ancestor of a mapped block is mapped too.

    needs_cover: whether KV without a state behind it is useless (a hybrid model).
    """

    def __init__(self, num_blocks: int, *, needs_cover: bool = False) -> None:
        self.num_blocks = num_blocks
        self.kv_hash_to_block_id: dict[BlockKey, int] = {}
        self.tails = TailIndex()
        self.evictions = 0
        self._needs_cover = needs_cover
        self._free = list(range(num_blocks, 0, -1))  # a stack; low numbers first
        self._references = [0] * (num_blocks + 1)
        self._key: list[BlockKey | None] = [None] * (num_blocks + 1)
        self._tails_of: dict[int, list[BlockKey]] = {}
        self._parent = [0] * (num_blocks + 1)  # of mapped blocks
        self._cover = [0] * (num_blocks + 1)  # states at the block, and covered children
        self.step = 0  # the engine's; what is released was used until then
        # by block, when it was last given back: the last step that may use it
        self.touched = [0] * (num_blocks + 1)
        # mapped blocks without references, the next one to be evicted first, each with the step
        # of its last use
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._uncovered: OrderedDict[int, int] = OrderedDict()

    # ------------------------------------------------------------------ sizes

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Mapped blocks that nobody references; all of them can be evicted."""
        return len(self._cached) + len(self._uncovered)

    @property
    def num_uncovered(self) -> int:
        """Cached blocks that are of no use."""
        return len(self._uncovered)

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self.num_free + self.num_cached

    @property
    def num_mapped(self) -> int:
        """Blocks that can be found by others, full ones and those with tails alone."""
        partial = sum(self._key[block] is None for block in self._tails_of)
        return len(self.kv_hash_to_block_id) + partial

    def num_available_beside(self, blocks: Iterable[int]) -> int:
        """Blocks that are free or can be evicted once somebody references these mapped ones."""
        references = self._references
        return self.num_available - [references[block] for block in blocks].count(0)

    def last_uses(self) -> npt.NDArray[np.int64]:
        """[num_cached]: the step in which somebody last held each cached block."""
        steps = [*self._cached.values(), *self._uncovered.values()]
        return np.array(steps, dtype=np.int64)

    # ------------------------------------------------------------------ verbs

    def allocate(self, count: int) -> list[int]:
        """`count` private blocks with one reference each, which have to be free."""
        end = len(self._free) - count
        blocks = sorted(self._free[end:])  # neighbours are copied at once
        del self._free[end:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these mapped blocks."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                if block in self._cached:
                    del self._cached[block]
                else:
                    del self._uncovered[block]
            references[block] += 1

    def release(self, blocks: Sequence[int], *, touched: bool = True) -> None:
        """Give back one reference to each. `blocks` is a sequence's table, in its order. touched:
        whether a step may use them that was launched while this reference was held.

        A mapped block without references stays cached; a private one is free.
        """
        references, keys = self._references, self._key
        for block in reversed(blocks):  # children get ahead of their parents
            if touched:
                self.touched[block] = self.step
            references[block] -= 1
            if references[block] == 0:
                if keys[block] is None and block not in self._tails_of:
                    self._free.append(block)
                elif self._needs_cover and self._cover[block] == 0:
                    self._uncovered[block] = self.step
                else:
                    self._cached[block] = self.step

    def map(self, block: int, key: BlockKey, parent: int = DUMMY_BLOCK) -> int:
        """Map `key` to `block`, whose KV is complete, and return the block that holds the key.

        `parent`: the block before it, 0 for the first. When the key is mapped already, the
        caller's reference moves to that block, with the tails, and its own is freed. A sequence's
        blocks are mapped in their order.
        """
        mapped = self.kv_hash_to_block_id.get(key)
        if mapped is None:
            self.kv_hash_to_block_id[key] = block
            self._key[block] = key
            self._parent[block] = parent
            return block
        if mapped != block:
            self.acquire((mapped,))
            for tail in self._tails_of.pop(block, ()):
                self.tails[tail] = self.tails[tail]._replace(block=mapped)
                self._tails_of.setdefault(mapped, []).append(tail)
            if cover := self._cover[block]:  # the tails' states
                self.cover(mapped)
                self._cover[mapped] += cover - 1
                self._cover[block] = 0
                self.uncover(self._parent[block])
            self.release((block,))
        return mapped

    def map_tail(self, block: int, key: BlockKey, tail: Tail, parent: int) -> None:
        """Make the first `tail.fill` tokens of a referenced block findable under a new key."""
        self.tails.add(key, tail)
        self._tails_of.setdefault(block, []).append(key)
        self._parent[block] = parent

    def drop_tail(self, key: BlockKey) -> None:
        """Forget a tail, if there is one; its block is free once nothing else needs it."""
        tail = self.tails.remove(key)
        if tail is None or tail.block == DUMMY_BLOCK:
            return
        block = tail.block
        others = self._tails_of[block]
        if len(others) > 1:
            others.remove(key)
            return
        del self._tails_of[block]
        if self._key[block] is None and self._references[block] == 0:
            self._cached.pop(block, None)
            self._uncovered.pop(block, None)
            self._free.append(block)

    def cover(self, block: int) -> None:
        """A state now stands at this mapped block: the KV up to here is useful."""
        cover, parents = self._cover, self._parent
        while block:
            cover[block] += 1
            if cover[block] > 1:
                return
            if block in self._uncovered:
                self._cached[block] = self._uncovered.pop(block)
            block = parents[block]

    def uncover(self, block: int) -> None:
        """A state at this mapped block is gone. KV that it covered alone is evicted next."""
        cover = self._cover
        while block:
            cover[block] -= 1
            if cover[block] > 0:
                return
            if block in self._cached:
                self._uncovered[block] = self._cached.pop(block)
            block = self._parent[block]

    def evict(self, *, counts: bool = True) -> DroppedBlock | None:
        """Unmap and free the least recently used leaf; None when nothing is cached. Whoever calls
        it has to forget what stands on the keys. `counts`: as an eviction, which makes room."""
        queue = self._uncovered or self._cached
        if not queue:
            return None
        block, _ = queue.popitem(last=False)
        self.evictions += counts
        tails = self._tails_of.pop(block, [])
        for tail in tails:
            self.tails.remove(tail)
        if self._cover[block]:
            self._cover[block] = 0
            self.uncover(self._parent[block])
        return DroppedBlock(block, self._unmap(block), tails)

    def evict_uncovered(self, most: int) -> list[BlockKey]:
        """Up to so many times what `evict` does, while there is what is of no use; the keys. No
        tail or state stands on them."""
        dropped = []
        for _ in range(min(most, len(self._uncovered))):
            key = self._unmap(self._uncovered.popitem(last=False)[0])
            assert key is not None
            dropped.append(key)
        self.evictions += len(dropped)
        return dropped

    def clear(self) -> None:
        """Unmap everything. Blocks in use stay with their users and are freed when released."""
        for block in [*self.kv_hash_to_block_id.values(), *self._tails_of]:
            self._key[block] = None
            self._cover[block] = self._parent[block] = 0
        self.kv_hash_to_block_id.clear()
        self._tails_of.clear()
        self.tails.clear()
        self._free += [*self._uncovered, *self._cached]
        self._cached.clear()
        self._uncovered.clear()

    # ---------------------------------------------------------------- details

    def _unmap(self, block: int) -> BlockKey | None:
        """Forget the key of a block that stands in no queue, and free it."""
        key, self._key[block], self._parent[block] = self._key[block], None, 0
        # only if it points here: another block may hold the same content by now
        if key is not None and self.kv_hash_to_block_id.get(key) == block:
            del self.kv_hash_to_block_id[key]
        self._free.append(block)
        return key

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant. `tables`: the blocks that each user holds, with multiplicity."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        idle_mapped = self._cached.keys() | self._uncovered.keys()
        assert len(idle_mapped) == self.num_cached, "a block is in both queues"
        assert DUMMY_BLOCK not in free and DUMMY_BLOCK not in idle_mapped
        assert self._references[DUMMY_BLOCK] == 0 and self._key[DUMMY_BLOCK] is None
        for block in range(1, self.num_blocks + 1):
            assert self._references[block] >= 0
            idle = self._references[block] == 0
            mapped = self._key[block] is not None or block in self._tails_of
            assert (block in free) == (idle and not mapped), f"block {block}"
            assert (block in idle_mapped) == (idle and mapped), f"block {block}"
            assert not (block in self._uncovered and self._cover[block]), f"block {block}"
            if self._needs_cover:
                assert not (block in self._cached and not self._cover[block]), f"block {block}"
            if mapped and (parent := self._parent[block]):
                assert self._key[parent] is not None, f"block {block} is an orphan"
                assert self._references[parent] >= 0 and parent not in free
            assert mapped or self._cover[block] == 0, f"block {block}"
        for key, block in self.kv_hash_to_block_id.items():
            assert self._key[block] == key
        assert len(self.kv_hash_to_block_id) == sum(key is not None for key in self._key)
        self._check_tails()
        if tables is not None:
            held = [0] * (self.num_blocks + 1)
            for table in tables:
                for block in table:
                    held[block] += 1
            assert held == self._references, "references differ from what is held"

    def _check_tails(self) -> None:
        of_blocks = {(key, tail.block) for key, tail in self.tails.items() if tail.block}
        assert of_blocks == {(key, b) for b, keys in self._tails_of.items() for key in keys}
        for tail in self.tails.values():
            if tail.block and self._parent[tail.block]:
                assert self._key[self._parent[tail.block]] == tail.parent

    def check_cover(self, blocks_with_states: Iterable[int]) -> None:
        """Assert that exactly the blocks up to these are covered."""
        expected = [0] * (self.num_blocks + 1)
        for start in blocks_with_states:
            block = start
            while block:
                expected[block] += 1
                if expected[block] > 1:
                    break
                block = self._parent[block]
        assert expected == self._cover, "cover counts differ from where the states are"
