"""Who goes first: the order in which unused states are evicted."""

from __future__ import annotations

import heapq
from bisect import bisect
from typing import Protocol

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.reuse import PAUSES, SHARES, TURNS, ReuseEstimator

POLICIES = ("ref_zero", "lru", "replay_cost")
Score = tuple[int, float]  # compared in this order; the smallest goes first
SCORED_ANEW = 4  # states at each eviction, and as many tries to find the one that goes first


class ScoringRule(Protocol):
    """How much a state is worth."""

    def score(self, state: CachedState, now: int) -> Score:
        """What losing `state` would cost; asked when it becomes evictable, when it is about to be
        evicted, and now and then."""

    def was_left(self, state: CachedState) -> None:
        """A state was published."""

    def was_read(self, state: CachedState, now: int) -> None:
        """A state was read; its figures are those before."""

    def was_lost(self, state: CachedState, now: int) -> None:
        """A state was evicted."""


class LeastRecentlyUsed:
    """The state that was used longest ago goes first."""

    def score(self, state: CachedState, now: int) -> Score:
        return 0, state.last_use

    def was_left(self, state: CachedState) -> None:
        pass

    def was_read(self, state: CachedState, now: int) -> None:
        state.hits += 1

    def was_lost(self, state: CachedState, now: int) -> None:
        pass


class ReplayCost:
    """The state goes first that is expected to save the fewest tokens for the time that it stays.

    That is the tokens to replay from the nearest surviving ancestor times the hit density of states
    like it at its age. A state with one other behind it on the same path, or one request running
    from it, covers nothing that the other one doesn't, unless somebody branches off between them:
    it goes before the rest.
    """

    def __init__(self) -> None:
        self._reuse = ReuseEstimator()
        self._root = CachedState(b"", 0, "")

    def score(self, state: CachedState, now: int) -> Score:
        covered = state.children + state.runners == 1 and state.kind not in placement.SHARED_KINDS
        density = self._reuse.density(state.group, now - state.used_at)
        return 0 if covered else 1, max(1, state.replay_tokens) * density

    def was_left(self, state: CachedState) -> None:
        if state.kind == placement.ANSWER_END and state.turn == 0:
            fork = state.fork or self._root
            fork.born += 1
        state.group = self._group(state)

    def was_read(self, state: CachedState, now: int) -> None:
        if state.kind == placement.ANSWER_END and state.turn == 0 and not state.hits:
            fork = state.fork or self._root
            fork.continued += 1
        self._reuse.was_read(state.group, now - state.used_at)
        state.hits += 1
        state.group = self._group(state)

    def was_lost(self, state: CachedState, now: int) -> None:
        self._reuse.was_evicted(state.group, now - state.used_at)

    def _group(self, state: CachedState) -> int:
        if state.kind in placement.SHARED_KINDS:
            return 100 + min(6, state.hits.bit_length())
        if state.hits:
            return 200 + min(3, state.hits)
        if state.kind != placement.ANSWER_END:
            return 300 + placement.KINDS.index(state.kind)
        if state.turn == 0:
            fork = state.fork or self._root
            share = (fork.continued + 0.5) / (fork.born + 1.0)
            return 400 + bisect(SHARES, share)
        return 500 + 10 * min(TURNS, state.turn) + bisect(PAUSES, state.pause)


class EvictionQueue:
    """Evictable states, the one with the smallest score first. O(log n) for every call.

    A heap with lazy deletion: `_entry` is the truth, and heap entries that disagree with it are
    dropped when they surface. When stale entries outnumber live ones the heap is built anew, so its
    size stays linear in the number of states. A score may have risen since it was taken (the states
    before it on its path were evicted): what surfaces is scored again, a bounded number of times.
    """

    def __init__(self, rule: ScoringRule) -> None:
        self.rule = rule
        self.now = 0  # the engine's step
        self._order: list[CachedState] = []  # to score all of them anew by and by
        self._entry: dict[int, tuple[Score, int, CachedState]] = {}  # by slot
        self._heap: list[tuple[Score, int, CachedState]] = []
        self._added = 0  # breaks ties: two states are never compared

    def add(self, state: CachedState) -> None:
        """Make a state evictable, or take its score anew."""
        self._added += 1
        entry = (self.rule.score(state, self.now), self._added, state)
        self._entry[state.slot] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)

    def rescore(self, state: CachedState) -> None:
        """A state's rank may have changed. (A worth that has risen is seen when it surfaces.)"""
        entry = self._entry.get(state.slot)
        if entry is not None and entry[2] is state:
            if self.rule.score(state, self.now)[0] != entry[0][0]:
                self.add(state)

    def discard(self, slot: int) -> None:
        """Make a slot's state not evictable, if it is."""
        self._entry.pop(slot, None)

    def pop(self) -> CachedState | None:
        """Remove and return the state that goes first; None when there is none."""
        self._score_some_anew()
        for attempt in range(SCORED_ANEW):
            while self._heap and self._entry.get(self._heap[0][2].slot) is not self._heap[0]:
                heapq.heappop(self._heap)  # stale
            if not self._heap:
                return None
            score, _, state = heapq.heappop(self._heap)
            if attempt == SCORED_ANEW - 1 or self.rule.score(state, self.now) <= score:
                break
            self.add(state)
        del self._entry[state.slot]
        return state

    def _score_some_anew(self) -> None:
        """Worth falls with age: each state has its turn, so that no score is much too high."""
        for _ in range(SCORED_ANEW):
            if not self._order:
                self._order = [state for _, _, state in self._entry.values()]
                if not self._order:
                    return
            state = self._order.pop()
            entry = self._entry.get(state.slot)
            if entry is not None and entry[2] is state:
                self.add(state)

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, slot: object) -> bool:
        return slot in self._entry
