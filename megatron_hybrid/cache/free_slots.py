"""Free slots, taken from either end of the numbers."""

from __future__ import annotations

import heapq


class FreeSlots:
    """The free ones of slots 1 to num_slots. O(log n) for every call, amortised.

    Two heaps over one set; a heap's entry counts only while its slot is in the set.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = set(range(1, num_slots + 1))
        self._lowest = list(range(1, num_slots + 1))
        self._highest = list(range(-num_slots, 0))  # negated

    def add(self, slot: int) -> None:
        self._free.add(slot)
        heapq.heappush(self._lowest, slot)
        heapq.heappush(self._highest, -slot)
        if len(self._lowest) + len(self._highest) > 4 * len(self._free) + 64:
            self._lowest = sorted(self._free)
            self._highest = [-slot for slot in reversed(self._lowest)]

    def take_lowest(self) -> int:
        """Remove and return the smallest number; there must be one."""
        while (slot := heapq.heappop(self._lowest)) not in self._free:
            pass
        self._free.remove(slot)
        return slot

    def take_highest(self) -> int:
        """Remove and return the largest number; there must be one."""
        while (slot := -heapq.heappop(self._highest)) not in self._free:
            pass
        self._free.remove(slot)
        return slot

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, slot: object) -> bool:
        return slot in self._free
