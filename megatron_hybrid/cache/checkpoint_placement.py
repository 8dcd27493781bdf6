"""Where recurrent states are kept: placed, not spaced.

Every other part (scheduler, batch builder, statistics) asks this class; nobody else computes a
checkpoint's position.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_hybrid.cache.geometry import CacheGeometry

DIVERGENCE = "divergence"  # somebody shared this far, but left no state
LAST_ALIGNED = "last_aligned"  # the same prompt, or one that goes on from it, hits next time
KINDS = (DIVERGENCE, LAST_ALIGNED)


class PlannedCheckpoint(NamedTuple):
    position: int  # tokens that the state has seen; on the grid
    kind: str


class CheckpointPlacement:
    """Positions at which a prompt's prefill leaves its state behind."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry

    def for_prompt(
        self, prompt_tokens: int, skip: int, matched_tokens: int
    ) -> list[PlannedCheckpoint]:
        """Checkpoints strictly above `skip`, ascending, each position once.

        `matched_tokens`: how far the prompt's KV was found in the cache, at least `skip`.
        """
        floor_grid = self._geometry.floor_grid
        planned: dict[int, str] = {}
        if self._geometry.has_attention and matched_tokens > skip:
            planned[floor_grid(matched_tokens)] = DIVERGENCE
        planned.setdefault(floor_grid(prompt_tokens - 1), LAST_ALIGNED)
        # the state at the prefill's end, when it is on the grid, for a prompt that goes on
        planned.setdefault(floor_grid(prompt_tokens), LAST_ALIGNED)
        return [PlannedCheckpoint(p, planned[p]) for p in sorted(planned) if p > skip]
