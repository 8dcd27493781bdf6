"""Recurrences in plain torch whose states lie on the grid alone: what a CPU runs in
batch-invariant mode. The calls are Replay's in protocols.py.

A sequence's tokens since its last multiple of the chunk are replayed from its ring, in front of its
own, so that every token is computed in the chunk that it is in, from the state at the beginning of
that, by the same operations whatever a step has of it:

    positions    0          16         32          ring: 32, 33; own: 34, 35, 36
    a step       |----------|----------|rr...
                            state here

Chunks are the tiles of tiles.py, and have as many places each, whether or not there are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic

import torch
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d import reference as conv
from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.gated_delta_rule import reference as gated_delta_rule
from megatron_hybrid.kernels.mamba1_scan import reference as mamba1_scan
from megatron_hybrid.kernels.mamba2_scan import reference as mamba2_scan
from megatron_hybrid.kernels.mlstm import reference as mlstm
from megatron_hybrid.kernels.protocols import AScansTokens, ConvConstants, Gates, Rings
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.kernels.rg_lru import reference as rg_lru
from megatron_hybrid.kernels.runs import Constants, TorchScan
from megatron_hybrid.kernels.slots import indices
from megatron_hybrid.kernels.tiles import TilePlan, plan_tiles
from megatron_hybrid.kernels.wkv import reference as wkv


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Of a part of a step, the same for every layer of a kind. Packed tokens: each sequence's
    replayed ones and its own."""

    replayed_rings: Tensor  # [U]
    replayed_places: Tensor  # [U] in the ring
    order: Tensor  # [P] of packed tokens: their places among the replayed and, behind them, the own
    own: Tensor  # [T]: places of the own tokens among the packed ones
    kept: Tensor  # [K]: own tokens whose inputs go to the ring
    kept_rings: Tensor  # [K]
    kept_places: Tensor  # [K]
    inner: Any  # of the packed tokens: the tiles of a scan, the windows of a convolution

    def packed(self, own: Tensor, ring: Tensor) -> Tensor:
        """own [T or more, ...], ring [rows, R, ...] -> [P, ...]."""
        replayed = ring[self.replayed_rings, self.replayed_places]
        return torch.cat((replayed, own[: len(self.own)])).index_select(0, self.order)

    def keep(self, own: Tensor, ring: Tensor) -> None:
        """Write to the ring."""
        ring[self.kept_rings, self.kept_places] = own.index_select(0, self.kept)


class _Sequences:
    """The figures of a part of a step on the host."""

    def __init__(self, part: DecodeRuns | PrefillSegments, chunk: int) -> None:
        self.device = part.cu_seqlens.device
        self.bounds: list[int] = part.cu_seqlens.tolist()
        self.lengths = [end - begin for begin, end in pairwise(self.bounds)]
        self.read: list[int] = part.read_slot.tolist()
        self.write: list[int] = part.write_slot.tolist()
        assert part.ring is not None
        self.rings: list[int] = part.ring.tolist()
        if isinstance(part, PrefillSegments):
            self.start: list[int] = part.start_position.tolist()
            self.first = [start - start % chunk for start in self.start]
            certain = self.lengths
            states = part.checkpoints()
        else:
            self.start = part.position.tolist()
            unfolded: list[int] = part.unfolded.tolist()
            self.first = [s - u for s, u in zip(self.start, unfolded, strict=True)]
            certain = [min(length, 1) for length in self.lengths]
            positions = part.checkpoint_position.tolist()
            slots = part.checkpoint_slot.tolist()
            states = list(zip(range(len(slots)), positions, slots, strict=True))
        # After how many tokens the state is that a sequence's slot has from then on.
        ends = [start + count for start, count in zip(self.start, certain, strict=True)]
        self.last = [end - end % chunk for end in ends]
        self.states: list[tuple[int, int, int]] = []  # (sequence, position, slot), sorted
        for s, position, slot in states:
            if slot > 0 and self.first[s] < position <= self.last[s]:
                self.states.append((s, position, slot))
        for s, slot in enumerate(self.write):
            if slot > 0 and (self.last[s] > self.first[s] or slot != self.read[s]):
                self.states.append((s, self.last[s], slot))


def _plan(
    part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int, inner: Any
) -> ReplayPlan:
    """`inner`: what plans the packed sequences, [S] segments which leave states only where they are
    asked to."""
    known = _Sequences(part, chunk)
    device = known.device
    replayed: list[tuple[int, int]] = []  # ring, position
    order: list[int] = []
    own: list[int] = []
    kept: list[tuple[int, int, int]] = []  # token, ring, place
    packed_bounds = [0]
    total = sum(start - first for start, first in zip(known.start, known.first, strict=True))
    for s, (begin, end) in enumerate(pairwise(known.bounds)):
        first, start, ring = known.first[s], known.start[s], known.rings[s]
        order += range(len(replayed), len(replayed) + start - first)
        replayed += [(ring, position) for position in range(first, start)]
        own += range(len(order), len(order) + end - begin)
        order += range(total + begin, total + end)
        position = start + end - begin
        later = min(end - begin, position - known.last[s])
        kept += [
            (end - back, ring, (position - back) % ring_length) for back in range(later, 0, -1)
        ]
        if (needed := max(start - first, later)) > ring_length:
            raise ValueError(f"sequence {s} needs {needed} places of a ring of {ring_length}.")
        packed_bounds.append(len(order))
    sequences, positions, slots = (
        (list(column) for column in zip(*known.states, strict=True))
        if (known.states)
        else ([], [], [])
    )
    nothing = indices([0] * len(known.first), device)
    segments = PrefillSegments(
        cu_seqlens=indices(packed_bounds, device),
        start_position=indices(known.first, device),
        read_slot=indices(known.read, device),
        write_slot=nothing,
        cu_checkpoints=nothing,  # which torch's kernels do not read
        checkpoint_sequence=indices(sequences, device),
        checkpoint_position=indices(positions, device),
        checkpoint_slot=indices(slots, device),
        sequence_of_token=nothing,
        longest=max(b - a for a, b in pairwise(packed_bounds)) if known.first else 0,
    )
    kept_tokens, kept_rings, kept_places = zip(*kept, strict=True) if kept else ((), (), ())
    return ReplayPlan(
        replayed_rings=indices([ring for ring, _ in replayed], device),
        replayed_places=indices([position % ring_length for _, position in replayed], device),
        order=indices(order, device),
        own=indices(own, device),
        kept=indices(list(kept_tokens), device),
        kept_rings=indices(list(kept_rings), device),
        kept_places=indices(list(kept_places), device),
        inner=inner(segments),
    )


@dataclass(frozen=True, slots=True)
class TorchReplay(Generic[AScansTokens, Constants]):
    """A Replay of a scan, from what it does with all tiles at once."""

    scan: TorchScan[AScansTokens, Constants]

    def plan(self, part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int) -> ReplayPlan:
        """As in Replay."""
        return _plan(part, chunk, ring_length, lambda packed: plan_tiles(packed, chunk, whole=True))

    def run(
        self,
        tokens: AScansTokens,
        constants: Constants,
        state: Tensor,
        ring: Rings,
        plan: ReplayPlan,
        out: Tensor | None = None,
    ) -> Tensor:
        """As in Replay."""
        tiles: TilePlan = plan.inner
        out = torch.empty_like(tokens.like) if out is None else out
        out[len(plan.own) :] = 0
        states = tiles.reads.gather(state).float()
        if tiles.num_tiles:
            y, states = self.scan.over_tiles(
                self._packed(tokens, ring, plan), constants, states, tiles
            )
            out[: len(plan.own)] = y.index_select(0, plan.own).to(out.dtype)
        tiles.writes.scatter(state, states.index_select(0, tiles.write_rows))
        for values, kept in zip(tokens.kept, ring, strict=True):
            plan.keep(values, kept)
        return out

    @staticmethod
    def _packed(tokens: AScansTokens, ring: Rings, plan: ReplayPlan) -> AScansTokens:
        """What a ring does not keep, of replayed tokens, is zeros: their outputs are not read."""
        by_place = {id(own): ring_of for own, ring_of in zip(tokens.kept, ring, strict=True)}

        def packed(own: Tensor) -> Tensor:
            if id(own) in by_place:
                return plan.packed(own, by_place[id(own)])
            replayed = own.new_zeros((len(plan.replayed_rings), *own.shape[1:]))
            return torch.cat((replayed, own[: len(plan.own)])).index_select(0, plan.order)

        return type(tokens)(*map(packed, tokens))


class TorchConvReplay:
    """The ConvReplay of causal_conv1d."""

    def plan(
        self, part: DecodeRuns | PrefillSegments, chunk: int, width: int, ring_length: int
    ) -> ReplayPlan:
        """As in Replay, for a convolution of this width."""
        return _plan(part, chunk, ring_length, lambda packed: conv.plan(packed, width))

    def run(
        self,
        tokens: Tensor,
        constants: ConvConstants,
        state: Tensor,
        ring: Tensor,
        plan: ReplayPlan,
        out: Tensor | None = None,
        gates: Gates | None = None,
    ) -> Tensor:
        """As in Replay; gates as in Convolution."""
        out = torch.empty_like(tokens) if out is None else out
        out[len(plan.own) :] = 0
        x, after = conv.gated(tokens, gates)
        y = conv.prefill(plan.packed(x, ring), constants, state, plan.inner)
        after = None if after is None else after[: len(plan.own)]
        out[: len(plan.own)] = conv.multiplied(y.index_select(0, plan.own), after)
        plan.keep(x, ring)
        return out


_CHUNK = 16

TORCH_REPLAYS = Replays(
    conv=TorchConvReplay(),
    mamba1_scan=TorchReplay(mamba1_scan.scan),
    mamba2_scan=TorchReplay(mamba2_scan.scan),
    gated_delta_rule=TorchReplay(gated_delta_rule.scan),
    mamba1_chunk=_CHUNK,
    chunk=_CHUNK,
    rg_lru=TorchReplay(rg_lru.scan),
    wkv=TorchReplay(wkv.scan),
    mlstm=TorchReplay(mlstm.scan),
)
