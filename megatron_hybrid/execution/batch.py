"""Plan -> tensors. Every integer of a step goes to the device in ONE copy.

tokens   d0 d1 d2 | p0 p0 p0 p0 | p1 p1        decodes first, then prefill chunks
logits    0  1  2            6        8        rows that sample, then (if any) every row of
                                               prompts whose log-probabilities are wanted

Resumed rows compute nothing: they are no part of the batch, only of its cache moves.

A step of a captured CUDA graph is filled up to the graph's size, so that every tensor lies where
the graph reads it:

tokens   d0 d1 -- -- | p0 p0 p0 p1 p1 -- -- --
logits    0  1            6     8     0  0     what nobody asked for comes last

Padded decodes read and write slot 0 and the first place of block 0; padded prompts have no tokens,
and padded tokens after the last prompt belong to none.

Decodes with drafts have several tokens each, and a row of logits for each:

tokens   n0 d0 d0 | n1 | n2 d2 | p0 p0 p0 p0

Then some figures are known to the device alone: see runs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_hybrid.cache.lease import TailCopy
from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.decode_inputs import DraftedDecodes, SingleDecodes
from megatron_hybrid.execution.figures import (
    SegmentFigures,
    StepFigures,
    Uploads,
    filled,
    paged_sequences,
)
from megatron_hybrid.execution.graph_decodes import GraphDecodes
from megatron_hybrid.execution.head_drafts import HeadDrafter
from megatron_hybrid.execution.plan import PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import LastSteps
from megatron_hybrid.execution.windows import WindowBatches, window_sequences
from megatron_hybrid.kernels.contract import (
    Ints,
    PagedHost,
    PrefillSegments,
    chunk_bounds,
)
from megatron_hybrid.layers.inputs import CacheMoves, StepInputs


class BatchBuilder:
    """Builds the inputs of a step from its plan and the row table. They last until the next ones
    are built: all steps use the same memory, where graphs read them."""

    def __init__(
        self,
        rows: RowTable,
        block_size: int,
        device: torch.device,
        max_tokens: int,
        chunk_sizes: Sequence[int] = (),
        last_steps: LastSteps | None = None,
        write_interval: int = 1,
        head: HeadDrafter | None = None,
        as_runs: bool = False,
        window_quota: int = 0,
    ) -> None:
        """`chunk_sizes`: kernel chunks whose bounds prefill kernels want to know. `last_steps`:
        where decodes have drafts. `write_interval`: decodes have fewer unfolded tokens than that.
        `head`: where the model's own head makes the drafts. `as_runs`: of SingleDecodes.
        `window_quota`: of CacheGeometry."""
        self._rows = rows
        self._singles = SingleDecodes(rows, write_interval, as_runs)
        self._drafted = None
        if last_steps is not None:
            self._drafted = DraftedDecodes(rows, last_steps, head, block_size)
        self._graph_decodes: dict[GraphSize, GraphDecodes] = {}
        self._block_size = block_size
        self._chunk_sizes = tuple(chunk_sizes)
        requests, blocks = rows.block_table.shape
        # What no graph reads, and what varies in length, lies before the origin. A request has at
        # most one block copied, and one window block.
        tables = blocks + (self._drafted.most_of_a_request if self._drafted is not None else 0)
        self._windows, most_of_windows, copied = None, 0, block_size // 2
        if rows.window_table is not None:
            self._windows = WindowBatches(rows, block_size, window_quota)
            most_of_windows, copied = self._windows.most_numbers(max_tokens), block_size
        self._uploads = Uploads(
            4 * (requests * (copied + 5) + 16),
            StepFigures.most(max_tokens, requests, len(self._chunk_sizes))
            + requests * tables
            + most_of_windows,
            device,
        )

    def build(self, plan: StepPlan, size: GraphSize | None = None) -> StepInputs:
        """`size`: of the captured step that will compute it; it must have room for the plan."""
        if size is not None and GraphDecodes.can_build(plan, size):
            return self._decodes_of(size).build(plan)
        rows, block_size = self._rows, self._block_size
        decodes, chunks = plan.decode_rows, plan.prefills
        n = len(decodes)
        lengths = np.asarray([chunk.length for chunk in chunks], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        checkpoints = sum(len(chunk.checkpoints) for chunk in chunks)
        drafts, pairs = plan.num_drafts, plan.num_pairs
        counts = n, int(starts[-1]), len(chunks), checkpoints, drafts, pairs
        used = GraphSize(*counts, adapters=int(plan.adapters))
        room = used if size is None else size
        assert all(a <= b for a, b in zip(used, room, strict=True)), (used, room)
        drafted = self._drafted if plan.drafts is not None or room.drafts else None

        token_ids, positions, kv_slot = np.zeros((3, room.tokens), dtype=np.int64)
        if drafted is None:
            position = rows.position[decodes]
            token_ids[:n] = rows.last_token[decodes]
            positions[:n] = position
            block = rows.block_table[decodes, position // block_size]
            kv_slot[:n] = block * block_size + position % block_size
        for chunk, start in zip(chunks, room.decode_tokens + starts, strict=False):
            span = np.arange(chunk.start, chunk.end)
            here = slice(start, start + chunk.length)
            blocks = rows.block_table[chunk.row, span // block_size]
            token_ids[here] = chunk.tokens
            positions[here] = span
            # block 0 takes the writes of positions whose KV is shared
            place = blocks * block_size + span % block_size
            kv_slot[here] = np.where(span < chunk.write_from, 0, place)

        adapters = None
        if room.adapters:
            behind = 0 if plan.drafts is None else plan.drafts.num_drafts
            adapters = np.zeros(room.tokens, dtype=np.int64)
            adapters[: used.decode_tokens] = np.repeat(rows.adapter[decodes], 1 + behind)
            of_prompts = np.repeat(rows.adapter[[chunk.row for chunk in chunks]], lengths)
            adapters[room.decode_tokens :][: len(of_prompts)] = of_prompts
        write_slot = rows.write_slot[decodes]
        if plan.writes is not None:
            write_slot = write_slot * plan.writes
        paged, window = self._paged(plan, lengths, room), None
        if self._windows is not None:
            window = self._windows.figures(plan, paged, room, static=size is not None)
        logits_index = _logits_index(chunks, used.decode_tokens, room.decode_tokens + starts)
        if size is not None:
            logits_index = filled(logits_index, room.rows)
        figures = StepFigures(
            token_ids=token_ids,
            positions=positions,
            kv_slot=kv_slot,
            cu_seqlens=paged.cu_seqlens,
            kv_length=paged.kv_length,
            kv_indptr=paged.kv_indptr,
            last_block_length=paged.last_block_length,
            decode_rows=filled(decodes, room.decodes),
            read_slot=filled(rows.read_slot[decodes], room.decodes),
            write_slot=filled(write_slot, room.decodes),
            logits_index=logits_index,
            prefill=_segments(chunks, starts, room) if room.prompts else None,
            chunk_bounds=self._chunk_bounds(chunks, lengths, room) if room.prompts else (),
            decodes=(drafted or self._singles).figures(plan, room),
            adapters=adapters,
            window=window,
            kv_indices=paged.kv_indices,
        )
        (sampled, *moves), step = self._uploads.upload(
            [plan.sampled_rows, *self._moves(plan)], figures
        )
        if size is not None:  # a later step of this size may have more blocks
            step = step._replace(kv_indices=self._uploads.to_the_end(step.kv_indices))
        if drafted is None:
            decode = self._singles.inputs(step, paged)
        else:
            decode = drafted.inputs(step, paged, plan, size)
        prefill = None
        if step.prefill is not None:
            longest = int(lengths.max()) if size is None else size.prefill_tokens
            bounds = dict(zip(self._chunk_sizes, step.chunk_bounds, strict=True))
            prefill = PrefillSegments(
                *step.prefill[:-1],
                longest=longest,
                ring=step.prefill.ring,
                cu_chunk_seqlens=bounds,
            )
        static, run = size is not None, decode.longest_run
        whole = paged_sequences(
            step, decode.host, room.decodes, static=static, longest_run=run,
            most_blocks=rows.block_table.shape[1],
        )  # fmt: skip
        return StepInputs(
            token_ids=step.token_ids,
            positions=step.positions,
            num_decodes=room.decodes,
            paged=whole,
            window=None if window is None else window_sequences(step, window, whole),
            decode=decode.decode,
            prefill=prefill,
            logits_index=step.logits_index,
            decode_rows=step.decode_rows,
            sampled_rows=sampled,
            moves=CacheMoves(*moves) if moves else None,
            num_drafts=room.drafts,
            take_up=decode.take_up,
            adapters=step.adapters,
        )

    def build_dummy(self, size: GraphSize) -> StepInputs:
        """A step for nobody, which is all padding: it reads zeros and changes nothing."""
        nobody = np.zeros(0, dtype=np.int64)
        return self.build(StepPlan(step=0, decode_rows=nobody), size)

    def _decodes_of(self, size: GraphSize) -> GraphDecodes:
        found = self._graph_decodes.get(size)
        if found is None:
            found = GraphDecodes(
                self._rows, self._singles, self._block_size, size, self._uploads, self._windows
            )
            self._graph_decodes[size] = found
        return found

    def _paged(self, plan: StepPlan, lengths: Ints, room: GraphSize) -> PagedHost:
        """Padded sequences have one token of KV, the first of block 0."""
        rows, chunks = self._rows, plan.prefills
        decodes = slice(len(plan.decode_rows))
        prompts = slice(room.decodes, room.decodes + len(chunks))
        sequences = room.decodes + room.prompts
        queries, kv_length = np.ones((2, sequences), dtype=np.int64)
        queries[room.decodes :] = filled(lengths, room.prompts)
        if room.drafts:
            queries[len(plan.decode_rows) : room.decodes] = 0
        if plan.drafts is not None:
            queries[decodes] += plan.drafts.num_drafts
        # of runs: as long as they may be
        kv_length[decodes] = rows.next_position(plan.decode_rows) + queries[decodes]
        kv_length[prompts] = [chunk.end for chunk in chunks]
        width = int(-(-kv_length.max(initial=1) // self._block_size))
        table = np.zeros((sequences, width), dtype=np.int64)
        table[decodes] = rows.block_table[plan.decode_rows, :width]
        table[prompts] = rows.block_table[[chunk.row for chunk in chunks], :width]
        return PagedHost.of(queries, kv_length, table, self._block_size)

    def _chunk_bounds(
        self, chunks: list[PrefillChunk], lengths: Ints, room: GraphSize
    ) -> tuple[Ints, ...]:
        """PrefillSegments.cu_chunk_seqlens for each kernel chunk, filled up with empty chunks."""
        starts = np.asarray([chunk.start for chunk in chunks], dtype=np.int64)
        found = []
        for size in self._chunk_sizes:
            bounds = chunk_bounds(starts, lengths, size)
            # a prompt has at most one chunk more than its tokens fill, and one that was cut
            most = room.prefill_tokens // size + 2 * room.prompts
            found.append(filled(bounds, most + 1, int(bounds[-1])))
        return tuple(found)

    def _moves(self, plan: StepPlan) -> list[Ints]:
        """The parts of CacheMoves in their order; none when the step moves nothing."""
        # the logits of prompts that end come right after those of the decodes
        ended = [chunk for chunk in plan.prefills if chunk.samples]
        first = len(plan.decode_rows) + plan.num_drafts
        stored = [(first + i, c.logits_slot) for i, c in enumerate(ended) if c.logits_slot]
        copied = plan.copies or plan.window_copies
        if not (copied or plan.resumed or stored or plan.packs or plan.unpacks):
            return []
        stored_rows, stored_slots = np.asarray(stored, dtype=np.int64).reshape(-1, 2).T
        return [
            *self._copied(plan.copies),
            stored_rows,
            stored_slots,
            np.asarray([resumed.logits_slot for resumed in plan.resumed], dtype=np.int64),
            *np.asarray(plan.packs, dtype=np.int64).reshape(-1, 2).T,
            *np.asarray(plan.unpacks, dtype=np.int64).reshape(-1, 2).T,
            *self._copied(plan.window_copies),
        ]

    def _copied(self, copies: list[TailCopy]) -> tuple[Ints, Ints]:
        """Places that tokens are copied from, and those that they go to, [copied tokens]."""
        source, destination, count = np.asarray(copies, dtype=np.int64).reshape(-1, 3).T
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        places = (
            np.repeat(blocks * self._block_size, count) + offset for blocks in (source, destination)
        )
        first, second = places
        return first, second


def _logits_index(chunks: list[PrefillChunk], num_decodes: int, starts: Ints) -> Ints:
    """`starts`: the first token of each chunk, and the end of the last one."""
    last = [starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
    index = [np.arange(num_decodes), np.asarray(last, dtype=np.int64)]
    for chunk, start in zip(chunks, starts, strict=False):
        if chunk.logprob_targets is not None:
            first = start + chunk.logprobs_from
            index.append(np.arange(first, first + len(chunk.logprob_targets)))
    return np.concatenate(index)


def _segments(chunks: list[PrefillChunk], starts: Ints, room: GraphSize) -> SegmentFigures[Ints]:
    """Filled up with empty prompts behind the last one. `starts`: the first token of each chunk
    among those of all, and the end of the last one."""
    entries = [(i, p, slot) for i, chunk in enumerate(chunks) for p, slot in chunk.checkpoints]
    sequence, position, slot = np.asarray(entries, dtype=np.int64).reshape(-1, 3).T
    cu_checkpoints = np.cumsum([0, *(len(chunk.checkpoints) for chunk in chunks)])
    return SegmentFigures(
        cu_seqlens=filled(starts, room.prompts + 1, int(starts[-1])),
        start_position=filled([chunk.start for chunk in chunks], room.prompts),
        read_slot=filled([chunk.read_slot for chunk in chunks], room.prompts),
        write_slot=filled([chunk.write_slot for chunk in chunks], room.prompts),
        cu_checkpoints=filled(cu_checkpoints, room.prompts + 1, len(entries)),
        checkpoint_sequence=filled(sequence, room.checkpoints),
        checkpoint_position=filled(position, room.checkpoints),
        checkpoint_slot=filled(slot, room.checkpoints),
        sequence_of_token=filled(
            np.repeat(np.arange(len(chunks)), np.diff(starts)), room.prefill_tokens, -1
        ),
        ring=filled([chunk.row for chunk in chunks], room.prompts),
    )
