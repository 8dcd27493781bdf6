"""WindowBlocks: blocks of keys and values of layers with a sliding window.

    free --allocate--> held (by running requests, pins) --keep--> held and kept
     ^                    |                                          |      |
     +------release-------+                               release    |      | drop
     |                                                               v      v
     +-------------------------------drop-------------------------  kept  held

Nothing is found by a block's content: whoever goes on from a cached state takes over the blocks
that are kept with it, which nobody could use without the state. So a block that no state and no
running request needs is free, and what can be evicted are states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

DUMMY_BLOCK = 0  # as in KVBlockAllocator


class WindowBlocks:
    """Blocks 1 to num_blocks. `held` counts users that are running, `kept` cached states."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # a stack; low numbers first
        self._held = [0] * (num_blocks + 1)
        self._kept = [0] * (num_blocks + 1)
        self.num_held = 0  # by anybody who runs; the others are free or can be evicted

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Blocks that cached states alone keep."""
        return self.num_blocks - self.num_held - self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, held once each, which have to be free."""
        assert 0 <= count <= len(self._free), "more window blocks are wanted than are free"
        end = len(self._free) - count
        blocks = sorted(self._free[end:])
        del self._free[end:]
        self.hold(blocks)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more running user of each of these, which are not free."""
        for block in blocks:
            self.num_held += not self._held[block]
            self._held[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take back one `hold` of each."""
        for block in blocks:
            self._held[block] -= 1
            if not self._held[block]:
                self.num_held -= 1
                if not self._kept[block]:
                    self._free.append(block)

    def keep(self, blocks: Iterable[int]) -> None:
        """One more cached state needs each of these, which somebody holds."""
        for block in blocks:
            self._kept[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Take back one `keep` of each."""
        for block in blocks:
            self._kept[block] -= 1
            if not self._kept[block] and not self._held[block]:
                self._free.append(block)

    def check_integrity(
        self, held: Iterable[Sequence[int]] | None, kept: Iterable[Sequence[int]]
    ) -> None:
        """Assert every invariant. `held`, `kept`: what each user and each cached state has, with
        multiplicity; None: not known."""
        free = set(self._free)
        assert len(free) == len(self._free), "a window block is free twice"
        assert DUMMY_BLOCK not in free
        for block in range(1, self.num_blocks + 1):
            used = self._held[block] + self._kept[block]
            assert (block in free) == (used == 0), f"window block {block}"
        assert self.num_held == sum(count > 0 for count in self._held)
        for users, counts in ((held, self._held), (kept, self._kept)):
            if users is not None:
                expected = [0] * (self.num_blocks + 1)
                for blocks in users:
                    for block in blocks:
                        expected[block] += 1
                assert expected == counts, "window blocks differ from what is held"
