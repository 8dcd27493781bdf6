"""Where recurrent states are kept: placed, not spaced.

Every other part (scheduler, batch builder, statistics) asks this class; nobody else computes a
checkpoint's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_hybrid.cache.geometry import CacheGeometry

DIVERGENCE = "divergence"  # somebody shared this far, but left no state
FORK = "fork"  # somebody who waits shares this far
HINT = "hint"  # named by the caller, or the end of a message
LAST_ALIGNED = "last_aligned"  # the same prompt, or one that goes on from it, hits next time
INTERVAL = "interval"  # for want of a better place
PROMPT_END = "prompt_end"  # the exact end, with the logits: the same prompt computes nothing
ANSWER_END = "answer_end"  # the exact end: the next turn computes only what is new
DECODE = "decode"  # the newest grid position of an answer that is being generated
PREEMPTED = "preempted"  # where a request had to stop
KINDS = (
    DIVERGENCE, FORK, HINT, LAST_ALIGNED, INTERVAL, PROMPT_END, ANSWER_END, DECODE, PREEMPTED,
)  # fmt: skip
SHARED_KINDS = frozenset({DIVERGENCE, FORK, HINT})  # other sequences branch off there

MAX_FORKS = 8  # positions a request
MAX_MESSAGE_ENDS = 8


class PlannedCheckpoint(NamedTuple):
    """A state that a request is to leave on its way."""

    position: int  # tokens that the state has seen
    kind: str


class CheckpointHints(NamedTuple):
    """What the caller knows of a prompt."""

    checkpoints: tuple[int, ...] = ()  # positions where it wants a state
    message_ends: tuple[int, ...] = ()  # of a chat, ascending; the system message's first


NO_HINTS = CheckpointHints()


class CheckpointPlacement:
    """Positions at which a request leaves its state behind.

    Positions on the grid are captured inside a chunk, at no cost. With `exact_ends` a position may
    also be anywhere; the request's chunk then ends there, so it has to be worth a step.
    """

    def __init__(
        self, geometry: CacheGeometry, *, exact_ends: bool = True, interval: int = 1024
    ) -> None:
        self._geometry = geometry
        self._interval = interval
        self.exact_ends = exact_ends

    @property
    def _unit(self) -> int:
        """Ends of requests that are multiples of this can be kept."""
        return self._geometry.granule if self.exact_ends else self._geometry.grid

    @property
    def expendable_kinds(self) -> frozenset[str]:
        """Kinds that nobody may ever read, because a better state of the same request follows."""
        if not self.exact_ends:
            return frozenset({INTERVAL})
        followed = {INTERVAL, DECODE}
        if self._geometry.granule == 1:  # else it is the nearest that there is to the end
            followed.add(LAST_ALIGNED)
        return frozenset(followed)

    def for_prompt(
        self,
        prompt_tokens: int,
        skip: int,
        matched_tokens: int,
        hints: CheckpointHints = NO_HINTS,
    ) -> list[PlannedCheckpoint]:
        """Checkpoints strictly above `skip`, ascending, each position once.

        `matched_tokens`: how far the prompt's KV was found in the cache, at least `skip`.
        """
        geometry = self._geometry
        floor_grid = geometry.floor_grid
        planned: dict[int, str] = {}
        if self.exact_ends and prompt_tokens % geometry.granule == 0:
            planned[prompt_tokens] = PROMPT_END
        if not self._geometry.needs_state:  # KV alone can be found at any block
            return [PlannedCheckpoint(p, kind) for p, kind in planned.items() if p > skip]
        if self._geometry.has_attention and matched_tokens > skip:
            planned.setdefault(floor_grid(matched_tokens), DIVERGENCE)
        for position in self._hinted(prompt_tokens, hints):
            planned.setdefault(position, HINT)
        if self.exact_ends and geometry.granule > 1:
            planned.setdefault(geometry.floor_granule(prompt_tokens - 1), LAST_ALIGNED)
        else:
            planned.setdefault(floor_grid(prompt_tokens - 1), LAST_ALIGNED)
            # the state at the prefill's end, when it is on the grid, for a prompt that goes on
            planned.setdefault(floor_grid(prompt_tokens), LAST_ALIGNED)
        for position in self._spaced(skip, prompt_tokens):
            planned.setdefault(position, INTERVAL)
        return [PlannedCheckpoint(p, planned[p]) for p in sorted(planned) if p > skip]

    def for_waiters(
        self, shared: Iterable[tuple[int, int]], reached: int, above: int, prompt_tokens: int
    ) -> list[PlannedCheckpoint]:
        """Checkpoints for requests that wait, ascending: where they leave this prompt.

        shared: (tokens that the prompts have in common, how many requests). reached: where the
        last state before them is; who leaves before the next grid position is served by that one.
        above: what this request has computed; positions up to there are past.
        """
        anywhere = self.exact_ends and self._geometry.needs_state
        if not self._geometry.needs_state:
            reached = above
        worth: dict[int, int] = {}
        for common, waiters in shared:
            floor = self._geometry.floor_grid(common)
            position = self._geometry.floor_granule(common) if anywhere else floor
            if floor > reached and above < position < prompt_tokens:
                worth[position] = worth.get(position, 0) + waiters * (position - reached)
        best = sorted(worth, key=lambda position: (-worth[position], position))[:MAX_FORKS]
        return [PlannedCheckpoint(position, FORK) for position in sorted(best)]

    def decode_position(self, position: int) -> bool:
        """Whether the state after `position` tokens of a growing answer is kept."""
        return position % self._geometry.grid == 0

    def keeps_end(self, position: int) -> bool:
        """Whether the state at which a request ends or stops, at `position`, can be kept."""
        return position % self._unit == 0

    def needs_break(self, position: int) -> bool:
        """Whether a chunk has to end at `position`, because no kernel captures a state there."""
        return self._geometry.granule == 1 and position % self._geometry.grid != 0

    def _hinted(self, prompt_tokens: int, hints: CheckpointHints) -> list[int]:
        """A message's end is worth a step of its own only where much follows: the system message's,
        which others share. The rest are taken on the grid."""
        floor_grid = self._geometry.floor_grid
        ends = [end for end in hints.message_ends if 0 < end <= prompt_tokens]
        first, others = ends[:1], ends[1:][1 - MAX_MESSAGE_ENDS :]
        exact = [
            self._geometry.floor_granule(end)
            for end in (*hints.checkpoints, *first)
            if self.exact_ends and prompt_tokens - end >= self._geometry.grid
        ]
        rounded = [floor_grid(end) for end in (*hints.checkpoints, *first, *others)]
        return [*exact, *(p for p in rounded if p not in map(floor_grid, exact))]

    def _spaced(self, skip: int, prompt_tokens: int) -> Sequence[int]:
        if not self._interval:
            return ()
        spaced = range(self._interval * (skip // self._interval + 1), prompt_tokens, self._interval)
        return [p for p in map(self._geometry.floor_grid, spaced) if p]
