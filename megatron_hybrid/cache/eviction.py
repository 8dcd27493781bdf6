"""Who goes first: the order in which unused blocks and states are evicted."""

from __future__ import annotations

import heapq
from typing import Protocol


class EvictionQueue(Protocol):
    """What a pool asks of an eviction policy. Items are block or slot numbers."""

    def add(self, item: int, last_use: int) -> None:
        """Make `item` evictable; `last_use` orders it against the others."""

    def discard(self, item: int) -> None:
        """Make `item` not evictable, if it is."""

    def pop(self) -> int | None:
        """Remove and return the item to evict first; None when there is none."""

    def clear(self) -> None:
        """Forget every item."""

    def __len__(self) -> int: ...

    def __contains__(self, item: object) -> bool: ...


class LeastRecentlyUsed:
    """The item with the smallest `last_use` goes first. O(log n) for every call.

    A heap with lazy deletion: `_last_use` is the truth, and heap entries that disagree with it
    are dropped when they surface. When stale entries outnumber live ones the heap is built anew,
    so its size stays linear in the number of items.
    """

    def __init__(self) -> None:
        self._last_use: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, item: int, last_use: int) -> None:
        self._last_use[item] = last_use
        heapq.heappush(self._heap, (last_use, item))
        if len(self._heap) > 2 * len(self._last_use) + 64:
            self._heap = [(use, item) for item, use in self._last_use.items()]
            heapq.heapify(self._heap)

    def discard(self, item: int) -> None:
        self._last_use.pop(item, None)

    def pop(self) -> int | None:
        while self._heap:
            last_use, item = heapq.heappop(self._heap)
            if self._last_use.get(item) == last_use:
                del self._last_use[item]
                return item
        return None

    def clear(self) -> None:
        self._last_use.clear()
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._last_use)

    def __contains__(self, item: object) -> bool:
        return item in self._last_use
