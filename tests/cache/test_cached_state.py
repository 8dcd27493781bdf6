"""CachedState: the tree of states, against one that is looked at from top to bottom."""

from __future__ import annotations

import random

import pytest

from megatron_hybrid.cache.cached_state import CachedState


class Forest:
    """Every state with the parent that it was made with, which never changes here."""

    def __init__(self) -> None:
        self.parent: dict[CachedState, CachedState | None] = {}
        self.alive: set[CachedState] = set()

    def grow(self, parent: CachedState | None, tokens: int) -> CachedState:
        position = tokens + (0 if parent is None else parent.position)
        state = CachedState(str(len(self.parent)).encode(), position, "fork", parent)
        self.parent[state] = parent
        return state

    def ancestor(self, state: CachedState) -> CachedState | None:
        found = self.parent[state]
        while found is not None and found not in self.alive:
            found = self.parent[found]
        return found

    def check(self) -> None:
        for state in self.parent:
            ancestor = self.ancestor(state)
            assert state.ancestor() is ancestor
            assert state.replay_tokens == state.position - (ancestor.position if ancestor else 0)
            assert state.alive == (state in self.alive)
        for state in self.alive:
            children = [s for s in self.alive if self.ancestor(s) is state]
            assert state.children == len(children)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("look", [0.05, 1.0])  # looking compresses paths
def test_ancestors_and_children_agree_with_brute_force(seed: int, look: float):
    rng = random.Random(seed)
    forest = Forest()
    for _ in range(150):
        if rng.random() < 0.6 or not forest.alive:
            known = list(forest.parent)
            # a request goes on from a state that may have been evicted since
            parent = rng.choice(known[-12:]) if known and rng.random() < 0.85 else None
            state = forest.grow(parent, rng.randrange(1, 100))
            forest.alive.add(state)
            state.join()
        else:
            state = rng.choice(sorted(forest.alive, key=lambda s: s.key))
            forest.alive.remove(state)
            assert state.leave() is forest.ancestor(state)
            assert state.children == 0
        if rng.random() < look:
            forest.check()
    forest.check()


def test_a_long_path_of_evicted_states_is_walked_once():
    forest = Forest()
    root = forest.grow(None, 1)
    forest.alive.add(root)
    root.join()
    state = root
    for _ in range(5000):
        state = forest.grow(state, 1)
    assert state.ancestor() is root
    assert state.parent is root, "the next call is one step"
