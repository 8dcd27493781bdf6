"""Scans in plain torch, from what each does with a token or a tile; and DecodeRuns: which tokens
are computed in which turn, for every recurrence.

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

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.protocols import AScansTokens, Rings, RoundsStates
from megatron_hybrid.kernels.slots import DecodePlan, SlotReads, SlotWrites, indices
from megatron_hybrid.kernels.tiles import TilePlan, largest_tile, plan_tiles

Constants = TypeVar("Constants", bound=RoundsStates)


@dataclass(frozen=True, slots=True)
class Turn:
    """One token each of some sequences."""

    sequences: Tensor  # [n]
    tokens: Tensor | None  # [n] places in the call's tokens; None: they come from the ring
    rings: Tensor  # [n]
    places: Tensor  # [n] in the ring
    checkpoints: SlotWrites | None  # of the states after it; None: no sequence has one there


@dataclass(frozen=True, slots=True)
class RunsPlan:
    """The same for every recurrent layer of a step."""

    reads: SlotReads
    writes: SlotWrites
    write_positions: Tensor  # [sequences]: tokens in the written states
    checkpoint_positions: Tensor  # [sequences]
    folds: tuple[Turn, ...]  # whose tokens the written states include
    drafts: tuple[Turn, ...]
    kept: Turn  # the tokens whose inputs go to the ring
    num_tokens: int  # the call's; those behind them are padding


def plan_runs(runs: DecodeRuns, ring_length: int) -> RunsPlan:
    """Once a step."""
    host = HostRuns(runs, ring_length)
    unfolded, lengths = host.unfolded, host.lengths
    everyone = range(len(lengths))
    folds = [
        [(s, number - unfolded[s]) for s in everyone if number < unfolded[s]]
        for number in range(max(unfolded, default=0))
    ]
    if any(lengths):
        folds.append([(s, 0) for s in everyone if lengths[s]])
    drafts = [
        [(s, number) for s in everyone if number < lengths[s]]
        for number in range(1, max(lengths, default=0))
    ]
    return RunsPlan(
        reads=SlotReads.of(runs.read_slot.tolist(), host.device),
        writes=SlotWrites.of(host.write_slot, host.device),
        write_positions=runs.position + runs.cu_seqlens.diff().clamp(max=1),
        checkpoint_positions=runs.checkpoint_position,
        folds=tuple(host.turn(tokens, folds=True) for tokens in folds),
        drafts=tuple(map(host.turn, drafts)),
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

    def turn(self, tokens: list[tuple[int, int]], *, folds: bool = False) -> Turn:
        """The (sequence, tokens ahead of its position) that are computed together; `folds`: with
        the checkpoints that they reach."""
        slots = [0] * len(self.lengths)
        for s, ahead in tokens if folds else ():
            position, slot = self.checkpoints[s]
            if position == self.position[s] + ahead + 1:
                slots[s] = slot
        own = None
        if all(ahead >= 0 for _, ahead in tokens):
            own = indices([self.bounds[s] + ahead for s, ahead in tokens], self.device)
        places = [(self.position[s] + ahead) % self._ring_length for s, ahead in tokens]
        return Turn(
            sequences=indices([s for s, _ in tokens], self.device),
            tokens=own,
            rings=indices([self._rings[s] for s, _ in tokens], self.device),
            places=indices(places, self.device),
            checkpoints=SlotWrites.of(slots, self.device) if any(s > 0 for s in slots) else None,
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


@dataclass(frozen=True, slots=True)
class TorchScan(Generic[AScansTokens, Constants]):
    """A Recurrence of a scan, from what it does with all tiles at once, and with one token of each
    sequence."""

    largest_tile: int  # in tokens
    # (tokens, constants, initial states [S, ...] float32, plan) -> outputs [T, ...], and the states
    # as TilePlan numbers them
    over_tiles: Callable[[AScansTokens, Constants, Tensor, TilePlan], tuple[Tensor, Tensor]]
    # (states [N, ...] float32, which change in place; `kept` of one token each; constants)
    advance: Callable[[Tensor, tuple[Tensor, ...], Constants], None]
    # (states after their tokens, the tokens, constants) -> outputs [N, ...] float32
    read_out: Callable[[Tensor, AScansTokens, Constants], Tensor]
    reads_before: bool = False  # outputs are of the states before their tokens

    def plan(self, segments: PrefillSegments, kernel_chunk: int) -> TilePlan:
        """The step's tiles."""
        return plan_tiles(segments, largest_tile(kernel_chunk, self.largest_tile))

    def prefill(
        self,
        tokens: AScansTokens,
        constants: Constants,
        state: Tensor,
        plan: TilePlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """As in Recurrence."""
        states = plan.reads.gather(state).float()
        if plan.num_tiles:
            y, states = self.over_tiles(tokens, constants, states, plan)
        else:
            y = torch.empty_like(tokens.like)
        written = states.index_select(0, plan.write_rows)
        plan.writes.scatter(state, written, constants.rounding_seed, plan.write_positions)
        return into(out, y, tokens.like)

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
        y = self._step(states, tokens, constants)
        if in_place is None:
            plan.writes.scatter(state, states)
        return into(out, y, tokens.like)

    def _step(self, states: Tensor, tokens: AScansTokens, constants: Constants) -> Tensor:
        """One token of each: their outputs; the states change in place."""
        if self.reads_before:
            y = self.read_out(states, tokens, constants)
            self.advance(states, tokens.kept, constants)
            return y
        self.advance(states, tokens.kept, constants)
        return self.read_out(states, tokens, constants)

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
        seed = constants.rounding_seed

        def take(turn: Turn) -> None:
            part = states.index_select(0, turn.sequences)
            if turn.tokens is None:
                earlier = tuple(values[turn.rings, turn.places] for values in ring)
                self.advance(part, earlier, constants)
            else:
                own = type(tokens)(*(v.index_select(0, turn.tokens) for v in tokens))
                y = self._step(part, own, constants)
                out.index_copy_(0, turn.tokens, y.to(out.dtype))
            states.index_copy_(0, turn.sequences, part)

        out[plan.num_tokens :] = 0
        for fold in plan.folds:
            take(fold)
            if fold.checkpoints is not None:
                fold.checkpoints.scatter(state, states, seed, plan.checkpoint_positions)
        plan.writes.scatter(state, states, seed, plan.write_positions)
        for turn in plan.drafts:
            take(turn)
        for values, kept in zip(inputs, ring, strict=True):
            assert plan.kept.tokens is not None
            kept[plan.kept.rings, plan.kept.places] = values.index_select(0, plan.kept.tokens)
        return out


def into(out: Tensor | None, values: Tensor, like: Tensor) -> Tensor:
    """The values in `out`, or, if that is None, in the dtype of `like`."""
    return values.to(like.dtype) if out is None else out.copy_(values)
