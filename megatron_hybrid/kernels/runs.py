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
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.kernels.protocols import AScansTokens, Rings
from megatron_hybrid.kernels.slots import DecodePlan, SlotReads, SlotWrites

Constants = TypeVar("Constants")


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
        """The (sequence, tokens ahead of its position) that are computed together."""
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
        """A turn of tokens that go into the states, with the checkpoints that they reach."""
        slots = [0] * len(self.lengths)
        for s, ahead in tokens:
            position, slot = self.checkpoints[s]
            if position == self.position[s] + ahead + 1:
                slots[s] = slot
        checkpoints = SlotWrites.of(slots, self.device) if max(slots) > 0 else None
        return Fold(self.turn(tokens), checkpoints)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, slots=True)
class TokenByToken(Generic[AScansTokens, Constants]):
    """The decodes of a scan, from what it does with one token of each sequence."""

    # (states [N, ...] float32, which change in place; `kept` of one token each; constants)
    advance: Callable[[Tensor, tuple[Tensor, ...], Constants], None]
    # (states after their tokens, the tokens, constants) -> outputs [N, ...] float32
    read_out: Callable[[Tensor, AScansTokens, Constants], Tensor]

    def decode(
        self,
        tokens: AScansTokens,
        constants: Constants,
        state: Tensor,
        plan: DecodePlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """As in Recurrence."""
        in_place = plan.in_place if state.dtype == torch.float32 else None
        if in_place is None:
            states = plan.reads.gather(state).float()
        else:
            states = state.narrow(0, *in_place)
        self.advance(states, tokens.kept, constants)
        y = self.read_out(states, tokens, constants)
        if in_place is None:
            plan.writes.scatter(state, states)
        return into(out, y, tokens.like)

    def decode_runs(
        self,
        tokens: AScansTokens,
        constants: Constants,
        state: Tensor,
        ring: Rings,
        plan: RunsPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """As in Recurrence."""
        out = torch.empty_like(tokens.like) if out is None else out
        states, inputs = plan.reads.gather(state).float(), tokens.kept

        def take(turn: Turn) -> None:
            part = states.index_select(0, turn.sequences)
            if turn.tokens is None:
                earlier = tuple(values[turn.rings, turn.places] for values in ring)
                self.advance(part, earlier, constants)
            else:
                own = type(tokens)(*(v.index_select(0, turn.tokens) for v in tokens))
                self.advance(part, own.kept, constants)
                y = self.read_out(part, own, constants)
                out.index_copy_(0, turn.tokens, y.to(out.dtype))
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


def into(out: Tensor | None, values: Tensor, like: Tensor) -> Tensor:
    """The values in `out`, or, if that is None, in the dtype of `like`."""
    return values.to(like.dtype) if out is None else out.copy_(values)
