"""TailIndex: cached prefixes that end inside a block."""

from __future__ import annotations

from typing import NamedTuple

from megatron_hybrid.cache.block_hash import BlockKey


class Tail(NamedTuple):
    """Where a prefix that ends inside a block is kept."""

    parent: BlockKey  # of its last full block, or the root
    fill: int  # tokens after that block
    block: int  # holds their KV; 0 in a model without attention


class TailIndex:
    """Finds which tails may follow a full block without knowing their tokens: by their lengths.

    All calls are O(1), but for `fills`, which is linear in what it returns.
    """

    def __init__(self) -> None:
        self._tails: dict[BlockKey, Tail] = {}
        self._fills: dict[BlockKey, dict[int, int]] = {}  # parent -> {fill: tails of that fill}

    def __len__(self) -> int:
        return len(self._tails)

    def __contains__(self, key: object) -> bool:
        return key in self._tails

    def get(self, key: BlockKey) -> Tail | None:
        return self._tails.get(key)

    def fills(self, parent: BlockKey) -> list[int]:
        """Lengths of the tails behind `parent`, the longest first."""
        fills = self._fills.get(parent)
        return [] if fills is None else sorted(fills, reverse=True)

    def add(self, key: BlockKey, tail: Tail) -> None:
        """Add a tail whose key is new."""
        self._tails[key] = tail
        fills = self._fills.setdefault(tail.parent, {})
        fills[tail.fill] = fills.get(tail.fill, 0) + 1

    def move(self, key: BlockKey, block: int) -> None:
        """The tail's KV is in another block now."""
        self._tails[key] = self._tails[key]._replace(block=block)

    def remove(self, key: BlockKey) -> Tail | None:
        tail = self._tails.pop(key, None)
        if tail is not None:
            fills = self._fills[tail.parent]
            if fills[tail.fill] > 1:
                fills[tail.fill] -= 1
            elif len(fills) > 1:
                del fills[tail.fill]
            else:
                del self._fills[tail.parent]
        return tail

    def items(self) -> list[tuple[BlockKey, Tail]]:
        return list(self._tails.items())

    def clear(self) -> None:
        self._tails.clear()
        self._fills.clear()
