"""What other engines do, behind our interfaces: where they keep states and which they evict.

All of them get what isn't theirs but costs nothing to give: requests wait for a twin that is about
to leave what they need, and KV behind which no state is left goes first. So the comparison is about
placement and eviction alone, and where in doubt it is generous.
"""

from __future__ import annotations

import numpy as np

from megatron_hybrid.cache import checkpoint_placement as placement
from megatron_hybrid.cache.cached_state import CachedState
from megatron_hybrid.cache.checkpoint_placement import (
    NO_HINTS,
    CheckpointHints,
    CheckpointPlacement,
    PlannedCheckpoint,
)
from megatron_hybrid.cache.eviction import SCORED_ANEW, EvictionQueue, LeastRecentlyUsed
from megatron_hybrid.cache.geometry import CacheGeometry
from simulation.pools import ModelShape


class BlockPlacement(CheckpointPlacement):
    """States on the grid only: where a prompt leaves a known one, and at its last block."""

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry, exact_ends=False, interval=0)

    @property
    def expendable_kinds(self) -> frozenset[str]:
        return frozenset()

    def for_prompt(
        self,
        prompt_tokens: int,
        skip: int,
        matched_tokens: int,
        hints: CheckpointHints = NO_HINTS,
    ) -> list[PlannedCheckpoint]:
        return super().for_prompt(prompt_tokens, skip, matched_tokens)

    def decode_position(self, position: int) -> bool:
        return False


class PeriodicPlacement(CheckpointPlacement):
    """SGLang's radix cache for hybrid models: a state every `interval` tokens of prompt and
    answer, of which an answer keeps the last one, and one at the prompt's last block."""

    def __init__(self, geometry: CacheGeometry, interval: int) -> None:
        super().__init__(geometry, exact_ends=False, interval=interval)
        self._every = geometry.floor_grid(max(interval, geometry.grid))

    @property
    def expendable_kinds(self) -> frozenset[str]:
        return frozenset()

    def for_prompt(
        self,
        prompt_tokens: int,
        skip: int,
        matched_tokens: int,
        hints: CheckpointHints = NO_HINTS,
    ) -> list[PlannedCheckpoint]:
        # matched_tokens = skip: it does not look for where prompts part
        return super().for_prompt(prompt_tokens, skip, skip)

    def decode_position(self, position: int) -> bool:
        return position % self._every == 0


class MarconiPlacement(CheckpointPlacement):
    """Marconi's admission (Pan et al., MLSys 2025, section 4.1): at most two states a sequence,
    where its prompt leaves a known path and after the last token that it decoded."""

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry, exact_ends=False, interval=0)

    @property
    def expendable_kinds(self) -> frozenset[str]:
        return frozenset()

    def for_prompt(
        self,
        prompt_tokens: int,
        skip: int,
        matched_tokens: int,
        hints: CheckpointHints = NO_HINTS,
    ) -> list[PlannedCheckpoint]:
        branch = self._geometry.floor_grid(matched_tokens)
        return [PlannedCheckpoint(branch, placement.DIVERGENCE)] if branch > skip else []

    def decode_position(self, position: int) -> bool:
        return False

    def keeps_end(self, position: int) -> bool:
        return True


class MarconiQueue(EvictionQueue):
    """Marconi's eviction (section 4.2): the node with the smallest recency + alpha * FLOPs saved
    per byte, both scaled to [0, 1] over the candidates, which are the nodes with at most one child.

    As in the authors' code, recency is 1 / age, FLOPs are those from the parent node on, and bytes
    are the state and the KV of the whole prefix. Scores move with time, so every eviction looks at
    all candidates. Their tuner picks alpha by replaying a window of requests; here it is a
    candidate like the split of the pool, and the best one is reported.
    """

    def __init__(self, geometry: CacheGeometry, shape: ModelShape, alpha: float) -> None:
        super().__init__(LeastRecentlyUsed())
        self._shape = shape
        self._alpha = alpha
        self._states: dict[int, CachedState] = {}
        size = geometry.num_slots + 1
        self._last_use = np.zeros(size)
        self._efficiency = np.zeros(size)
        self._candidate = np.zeros(size, dtype=bool)
        self._clock = 0

    def add(self, state: CachedState) -> None:
        slot = state.slot
        self._states[slot] = state
        self._clock = max(self._clock, state.last_use)
        self._last_use[slot] = state.last_use
        self._candidate[slot] = state.children <= 1
        self._efficiency[slot] = self._flops_per_byte(state)

    def discard(self, slot: int) -> None:
        if self._states.pop(slot, None) is not None:
            self._candidate[slot] = False

    def pop(self) -> CachedState | None:
        state = self._first()
        if state is not None:
            self.discard(state.slot)
        return state

    def _first(self) -> CachedState | None:
        for _ in range(SCORED_ANEW):
            state = self._least_useful()
            if state is None:
                break
            efficiency = self._flops_per_byte(state)
            if efficiency == self._efficiency[state.slot]:
                return state
            self._efficiency[state.slot] = efficiency  # its parent was evicted meanwhile
        else:
            return state
        # every node left has several children, which others read
        return min(self._states.values(), key=lambda s: s.last_use, default=None)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, slot: object) -> bool:
        return slot in self._states

    def _least_useful(self) -> CachedState | None:
        slots = np.flatnonzero(self._candidate)
        if not len(slots):
            return None
        recency = 1.0 / (self._clock + 1 - self._last_use[slots])
        utility = _scaled(recency) + self._alpha * _scaled(self._efficiency[slots])
        return self._states[int(slots[int(utility.argmin())])]

    def _flops_per_byte(self, state: CachedState) -> float:
        shape, end = self._shape, state.position
        start = end - state.replay_tokens
        flops = 2 * shape.parameters * (end - start)
        flops += 4 * shape.attention_layers * shape.attention_width * (end**2 - start**2)
        return flops / (shape.bytes_per_state + shape.bytes_per_token * end)


def _scaled(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)
