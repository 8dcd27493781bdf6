"""Runs a HybridModel over token sequences without the engine: builds StepInputs for any mixture
of decodes and prefill segments, with caches of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import (
    DecodeRuns,
    DecodeSlots,
    PagedHost,
    PagedSequences,
    PrefillSegments,
)
from megatron_hybrid.layers.inputs import StepInputs, allocate_caches
from megatron_hybrid.models.hybrid_model import HybridModel


@dataclass
class Sequence:
    """A sequence's place in the caches. `slot` is read and written."""

    slot: int
    blocks: list[int]
    length: int = 0  # tokens computed so far
    read_slot: int = 0  # of the next segment; its own slot once it has run
    unfolded: int = 0  # tokens that are in its ring and not in its state

    def holds(self, drafts: int) -> None:
        """So many of the last step's drafts are the sequence's."""
        self.length += drafts
        self.unfolded += drafts


@dataclass
class Segment:
    """Tokens to run in one step, and (position, slot) of the checkpoints in them."""

    sequence: Sequence
    tokens: list[int]
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    drafts: int = 0  # the last of the tokens, for a driver with rings
    writes: bool = True  # else such a driver leaves the state as it is


class Driver:
    def __init__(
        self,
        model: HybridModel,
        *,
        slots: int = 12,
        blocks: int = 64,
        block_size: int = 16,
        ring_length: int = 0,
    ) -> None:
        """`ring_length`: not 0 where decodes have drafts."""
        self.model = model
        self.block_size = block_size
        self.ring_length = ring_length
        self.caches = allocate_caches(
            model.kv_specs,
            model.state_specs,
            blocks,
            block_size,
            slots,
            torch.device("cpu"),
            num_rings=slots if ring_length else 0,
            ring_length=ring_length,
        )
        # What was never written must never matter.
        for kv in self.caches.kv.values():
            kv.key.fill_(float("nan"))
            kv.value.fill_(float("nan"))
        for state in self.caches.state.values():
            state.conv.fill_(float("nan"))
            state.ssm.fill_(float("nan"))
        for rings in self.caches.rings.values():
            for ring in (rings.conv, *rings.inputs):
                ring.fill_(float("nan"))
        # In no order, as after a while in a real cache.
        shuffled = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._free_blocks: list[int] = shuffled.tolist()
        self._next_slot = 1

    def sequence(self) -> Sequence:
        self._next_slot += 1
        return Sequence(slot=self._next_slot - 1, blocks=[])

    def step(self, segments: list[Segment], rows: list[int] | None = None) -> list[Tensor]:
        """Run the segments in one step: those of one token on a running sequence as decodes, which
        come first. Returns each segment's logits [tokens, vocab], in the order given; with `rows`
        the logits of these tokens of the only segment."""
        decodes = [s for s in segments if len(s.tokens) == 1 + s.drafts and s.sequence.length > 0]
        prefills = [s for s in segments if s not in decodes]
        ordered = decodes + prefills
        for segment in ordered:
            needed = segment.sequence.length + len(segment.tokens)
            while len(segment.sequence.blocks) * self.block_size < needed:
                segment.sequence.blocks.append(self._free_blocks.pop())
        inputs = self._inputs(ordered, len(decodes))
        if rows is not None:
            inputs = replace(inputs, logits_index=_int(rows))
        logits = self.model.forward(inputs, self.caches)
        for segment in ordered:
            sequence, certain = segment.sequence, len(segment.tokens) - segment.drafts
            sequence.length += certain
            sequence.unfolded = 0 if segment.writes else sequence.unfolded + certain
            sequence.read_slot = sequence.slot
        if rows is not None:
            return [logits]
        parts = logits.split([len(s.tokens) for s in ordered])
        return [parts[ordered.index(segment)] for segment in segments]

    def _inputs(self, ordered: list[Segment], num_decodes: int) -> StepInputs:
        prefills = ordered[num_decodes:]
        positions, kv_slot = [], []
        for segment in ordered:
            sequence = segment.sequence
            for position in range(sequence.length, sequence.length + len(segment.tokens)):
                positions.append(position)
                block = sequence.blocks[position // self.block_size]
                kv_slot.append(block * self.block_size + position % self.block_size)
        checkpoints = [
            (index, position, slot)
            for index, segment in enumerate(prefills)
            for position, slot in segment.checkpoints
        ]
        decode: DecodeSlots | DecodeRuns | None = None
        prefill = None
        decodes = ordered[:num_decodes]
        if num_decodes and self.ring_length:
            checkpoint = [next(iter(s.checkpoints), (0, 0)) for s in decodes]
            decode = DecodeRuns(
                cu_seqlens=_bounds(decodes),
                position=_int([s.sequence.length for s in decodes]),
                unfolded=_int([s.sequence.unfolded for s in decodes]),
                read_slot=_int([s.sequence.read_slot for s in decodes]),
                write_slot=_int([s.sequence.slot if s.writes else 0 for s in decodes]),
                ring=_int([s.sequence.slot for s in decodes]),
                checkpoint_position=_int([position for position, _ in checkpoint]),
                checkpoint_slot=_int([slot for _, slot in checkpoint]),
            )
        elif num_decodes:
            slots = _int([s.sequence.slot for s in decodes])
            decode = DecodeSlots(slots, slots.clone())
        if prefills:
            prefill = PrefillSegments(
                cu_seqlens=_bounds(prefills),
                start_position=_int([s.sequence.length for s in prefills]),
                read_slot=_int([s.sequence.read_slot for s in prefills]),
                write_slot=_int([s.sequence.slot for s in prefills]),
                cu_checkpoints=_int([0, *accumulate(len(s.checkpoints) for s in prefills)]),
                checkpoint_sequence=_int([c[0] for c in checkpoints]),
                checkpoint_position=_int([c[1] for c in checkpoints]),
                checkpoint_slot=_int([c[2] for c in checkpoints]),
                sequence_of_token=torch.arange(len(prefills)).repeat_interleave(
                    _int([len(s.tokens) for s in prefills])
                ),
                longest=max(len(s.tokens) for s in prefills),
            )
        return StepInputs(
            token_ids=_int([token for s in ordered for token in s.tokens]),
            positions=_int(positions),
            num_decodes=num_decodes,
            paged=self._paged(ordered, kv_slot, num_decodes),
            decode=decode,
            prefill=prefill,
            logits_index=torch.arange(len(positions)),
            decode_rows=_int(range(num_decodes)),
            sampled_rows=_int(range(len(ordered))),
            num_drafts=sum(s.drafts for s in decodes),
        )

    def _paged(
        self, ordered: list[Segment], kv_slot: list[int], num_decodes: int
    ) -> PagedSequences:
        widest = max(len(s.sequence.blocks) for s in ordered)
        host = PagedHost.of(
            np.asarray([len(s.tokens) for s in ordered]),
            np.asarray([s.sequence.length + len(s.tokens) for s in ordered]),
            np.asarray(
                [s.sequence.blocks + [0] * (widest - len(s.sequence.blocks)) for s in ordered]
            ),
            self.block_size,
        )
        on_device = (torch.from_numpy(part) for part in host)
        return PagedSequences(*on_device, _int(kv_slot), num_decodes, host)


def run_in_segments(model: HybridModel, tokens: list[int], lengths: list[int]) -> Tensor:
    """Logits [tokens, vocab] of one sequence, run in steps of these lengths and a last one with
    the rest."""
    driver = Driver(model)
    sequence = driver.sequence()
    outputs, begin = [], 0
    for length in [*lengths, len(tokens) - sum(lengths)]:
        if length:
            outputs += driver.step([Segment(sequence, tokens[begin : begin + length])])
            begin += length
    return torch.cat(outputs)


def _int(values: Iterable[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _bounds(segments: list[Segment]) -> Tensor:
    lengths = _int([0] + [len(s.tokens) for s in segments])
    return lengths.cumsum(0)
