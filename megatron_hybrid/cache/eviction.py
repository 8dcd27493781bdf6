"""Who goes first: the order in which unused states are evicted."""

from __future__ import annotations

import heapq
from typing import Protocol

from megatron_hybrid.cache.cached_state import CachedState

POLICIES = ("ref_zero", "lru", "replay_cost")
SCORED_IN_TURN = 2  # states at each eviction, all in turn
SCORED_ANEW = 4  # tries at most to find the state that goes first

Score = tuple[int, float]  # (rank, worth), compared in this order; the smallest goes first


class ScoringRule(Protocol):
    """How much a state is worth."""

    def score(self, state: CachedState, now: int) -> Score:
        """What losing `state` would cost in step `now`; asked when it becomes evictable, when it
        is about to be evicted, and now and then."""

    def was_left(self, state: CachedState) -> None:
        """A state was published."""
        return

    def was_read(self, state: CachedState, now: int) -> None:
        """A state was read: counts the hit."""

    def was_lost(self, state: CachedState, now: int) -> None:
        """A state was evicted."""
        return


class LeastRecentlyUsed(ScoringRule):
    """The state that was used longest ago goes first."""

    def score(self, state: CachedState, now: int) -> Score:
        """The time of its last use."""
        return 0, state.last_use

    def was_read(self, state: CachedState, now: int) -> None:
        """Counts the hit."""
        state.hits += 1


class EvictionQueue:
    """Evictable states, the one with the smallest score first. O(log n) for every call.

    A heap with lazy deletion: `_entry` is the truth, and heap entries that disagree with it are
    dropped when they surface. When stale entries outnumber live ones the heap is built anew, so its
    size stays linear in the number of states.

    Scores move. A worth that has risen is seen when the state surfaces, for a bounded number of
    states; worth that falls with age, by scoring a few states anew at every eviction, all in turn.
    """

    def __init__(self, rule: ScoringRule) -> None:
        self.rule = rule
        self.now = 0  # the engine's step
        self._entry: dict[int, tuple[Score, int, CachedState]] = {}  # by slot
        self._heap: list[tuple[Score, int, CachedState]] = []
        self._largest_slot = 0
        self._turn = 0  # slot that was scored anew last
        self._added = 0  # breaks ties: two states are never compared

    def add(self, state: CachedState) -> None:
        """Make a state evictable, or take its score anew."""
        self._added += 1
        entry = (self.rule.score(state, self.now), self._added, state)
        self._entry[state.slot] = entry
        self._largest_slot = max(self._largest_slot, state.slot)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)

    def rescore(self, state: CachedState) -> None:
        """A state's rank may have changed."""
        entry = self._entry.get(state.slot)
        if entry is None or entry[2] is not state:
            return
        if self.rule.score(state, self.now)[0] != entry[0][0]:
            self.add(state)

    def refresh(self, state: CachedState) -> None:
        """What a state is worth has changed at once."""
        if state.slot in self._entry:
            self.add(state)

    def discard(self, slot: int) -> None:
        """Make a slot's state not evictable, if it is."""
        self._entry.pop(slot, None)

    def pop(self) -> CachedState | None:
        """Remove and return the state that goes first; None when there is none."""
        self._score_some_anew()
        for attempt in range(SCORED_ANEW):
            self._drop_stale()
            if not self._heap:
                return None
            score, _, state = heapq.heappop(self._heap)
            if attempt == SCORED_ANEW - 1 or self.rule.score(state, self.now) <= score:
                break
            self.add(state)
        del self._entry[state.slot]
        return state

    def first(self) -> tuple[Score, CachedState] | None:
        """What goes first, by the scores that are known, and its own."""
        self._drop_stale()
        if not self._heap:
            return None
        score, _, state = self._heap[0]
        return score, state

    def _drop_stale(self) -> None:
        while self._heap and self._entry.get(self._heap[0][2].slot) is not self._heap[0]:
            heapq.heappop(self._heap)

    def _score_some_anew(self) -> None:
        for _ in range(SCORED_IN_TURN):
            self._turn = self._turn % max(1, self._largest_slot) + 1
            entry = self._entry.get(self._turn)
            if entry is not None:
                self.add(entry[2])

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, slot: object) -> bool:
        return slot in self._entry
