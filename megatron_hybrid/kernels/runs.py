"""DecodeRuns in plain torch: which tokens are computed in which turn, for every recurrence.

Turn by turn, each sequence takes its next token: the unfolded ones first, which it has from the
ring, then its own.

                 turn 0   turn 1   turn 2
    sequence 0   p0       n0       d0           one token unfolded, one draft
    sequence 1   n1       d1       e1           none unfolded, two drafts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.kernels.slots import SlotReads, SlotWrites


@dataclass(frozen=True, slots=True)
class Turn:
    """One token each of some sequences."""

    sequences: Tensor  # [n]
    tokens: Tensor | None  # [n] places in the call's tokens; None: they come from the ring
    rings: Tensor  # [n]
    places: Tensor  # [n] in the ring


@dataclass(frozen=True, slots=True)
class Fold:
    """A turn whose tokens the written states include."""

    turn: Turn
    checkpoints: SlotWrites | None  # of the states after it; None: no sequence has one there


@dataclass(frozen=True, slots=True)
class RunsPlan:
    """The same for every recurrent layer of a step."""

    reads: SlotReads
    writes: SlotWrites
    folds: tuple[Fold, ...]
    drafts: tuple[Turn, ...]
    kept: Turn  # the tokens whose inputs go to the ring
    num_tokens: int  # the call's; those behind them are padding


def plan_runs(runs: DecodeRuns, ring_length: int) -> RunsPlan:
    """Once a step."""
    host = HostRuns(runs, ring_length)
    unfolded, lengths = host.unfolded, host.lengths
    everyone = range(len(lengths))
    folds = []
    for number in range(max(unfolded, default=0)):
        folds.append(
            host.fold([(s, number - unfolded[s]) for s in everyone if number < unfolded[s]])
        )
    if any(lengths):
        folds.append(host.fold([(s, 0) for s in everyone if lengths[s]]))
    drafts = []
    for number in range(1, max(lengths, default=0)):
        drafts.append(host.turn([(s, number) for s in everyone if number < lengths[s]]))
    return RunsPlan(
        reads=SlotReads.of(runs.read_slot.tolist(), host.device),
        writes=SlotWrites.of(host.write_slot, host.device),
        folds=tuple(folds),
        drafts=tuple(drafts),
        kept=host.kept(),
        num_tokens=host.bounds[-1],
    )


class HostRuns:
    """The figures of DecodeRuns on the host. A token is named by its sequence and how far ahead of
    the sequence's next one it is; unfolded ones are behind it."""

    def __init__(self, runs: DecodeRuns, ring_length: int) -> None:
        self.device = runs.position.device
        self.bounds: list[int] = runs.cu_seqlens.tolist()
        self.lengths = [end - begin for begin, end in pairwise(self.bounds)]
        self.position: list[int] = runs.position.tolist()
        self.unfolded: list[int] = runs.unfolded.tolist()
        self.write_slot: list[int] = runs.write_slot.tolist()
        self._rings: list[int] = runs.ring.tolist()
        self.checkpoints = list(
            zip(runs.checkpoint_position.tolist(), runs.checkpoint_slot.tolist(), strict=True)
        )
        self._ring_length = ring_length
        for s, (unfolded, length) in enumerate(zip(self.unfolded, self.lengths, strict=True)):
            if unfolded + length > ring_length:
                raise ValueError(
                    f"sequence {s} has {unfolded} unfolded tokens and {length} to compute; the "
                    f"ring has {ring_length} places."
                )

    def turn(self, tokens: list[tuple[int, int]]) -> Turn:
        from_ring = any(ahead < 0 for _, ahead in tokens)
        return Turn(
            sequences=self._ints([s for s, _ in tokens]),
            tokens=None if from_ring else self._ints([self.bounds[s] + a for s, a in tokens]),
            rings=self._ints([self._rings[s] for s, _ in tokens]),
            places=self._ints([(self.position[s] + a) % self._ring_length for s, a in tokens]),
        )

    def kept(self) -> Turn:
        """All tokens whose inputs go to the ring."""
        return self.turn(
            [
                (s, ahead)
                for s, length in enumerate(self.lengths)
                for ahead in range(int(self.write_slot[s] > 0), length)
            ]
        )

    def fold(self, tokens: list[tuple[int, int]]) -> Fold:
        slots = [0] * len(self.lengths)
        for s, ahead in tokens:
            position, slot = self.checkpoints[s]
            if position == self.position[s] + ahead + 1:
                slots[s] = slot
        checkpoints = SlotWrites.of(slots, self.device) if max(slots) > 0 else None
        return Fold(self.turn(tokens), checkpoints)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def compute_runs(
    state: Tensor,
    ring: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    plan: RunsPlan,
    out: Tensor,
    advance: Callable[..., None],
    read_out: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The outputs, in `out` [T, ...].

    state [slots, ...]; inputs: what the recurrence takes in, [T, ...] each; ring: the same of
    earlier tokens, [rows, R, ...] each. `advance(states, *inputs)` takes one token each into states
    [n, ...] of float32, in place; `read_out(states, tokens)` gives the outputs of those tokens.
    """
    states = plan.reads.gather(state).float()

    def take(turn: Turn) -> None:
        part = states.index_select(0, turn.sequences)
        if turn.tokens is None:
            advance(part, *(values[turn.rings, turn.places] for values in ring))
        else:
            advance(part, *(values.index_select(0, turn.tokens) for values in inputs))
            out.index_copy_(0, turn.tokens, read_out(part, turn.tokens).to(out.dtype))
        states.index_copy_(0, turn.sequences, part)

    out[plan.num_tokens :] = 0
    for fold in plan.folds:
        take(fold.turn)
        if fold.checkpoints is not None:
            fold.checkpoints.scatter(state, states)
    plan.writes.scatter(state, states)
    for turn in plan.drafts:
        take(turn)
    for values, kept in zip(inputs, ring, strict=True):
        assert plan.kept.tokens is not None
        kept[plan.kept.rings, plan.kept.places] = values.index_select(0, plan.kept.tokens)
    return out
