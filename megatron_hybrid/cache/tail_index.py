"""TailIndex: cached prefixes that end inside a block."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey


class Tail(NamedTuple):
    """Where a prefix that ends inside a block is kept."""

    parent: BlockKey  # of its last full block, or the root
    fill: int  # tokens after that block
    block: int  # holds their KV; 0 in a model without attention


class TailIndex(dict[BlockKey, Tail]):
    """Tails by their keys. Finds which tails may follow a full block without knowing their tokens:
    by their lengths. All calls are O(1), but for `fills`, which is linear in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self._fills: dict[BlockKey, Counter[int]] = {}  # parent -> {fill: tails of that fill}

    def fills(self, parent: BlockKey) -> list[int]:
        """Lengths of the tails behind `parent`, the longest first."""
        return sorted(self._fills.get(parent, ()), reverse=True)

    def add(self, key: BlockKey, tail: Tail) -> None:
        """Add a tail whose key is new."""
        self[key] = tail
        self._fills.setdefault(tail.parent, Counter())[tail.fill] += 1

    def remove(self, key: BlockKey) -> Tail | None:
        """Forget a tail and return it; None if there is none."""
        tail = self.pop(key, None)
        if tail is not None:
            fills = self._fills[tail.parent]
            fills[tail.fill] -= 1
            if not fills[tail.fill]:
                del fills[tail.fill]
            if not fills:
                del self._fills[tail.parent]
        return tail

    def clear(self) -> None:
        """Forget all tails."""
        super().clear()
        self._fills.clear()
