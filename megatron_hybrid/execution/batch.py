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

Then some figures are known to the device alone: see decode_inputs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.decode_inputs import (
    DraftedDecodes,
    SingleDecodes,
    StepTensors,
    filled,
)
from megatron_hybrid.execution.head_drafts import HeadDrafter
from megatron_hybrid.execution.plan import PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import LastSteps
from megatron_hybrid.kernels.contract import (
    PagedHost,
    PagedSequences,
    PrefillSegments,
    chunk_bounds,
)
from megatron_hybrid.layers.inputs import CacheMoves, StepInputs

Ints = npt.NDArray[np.int64]
_ALIGNMENT = 4  # int32 in 16 bytes


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
    ) -> None:
        """`chunk_sizes`: kernel chunks whose bounds prefill kernels want to know. `last_steps`:
        where decodes have drafts. `write_interval`: decodes have fewer tokens than that unfolded.
        `head`: where the model's own head makes the drafts."""
        self._rows = rows
        self._singles = SingleDecodes(rows, write_interval)
        self._drafted = None
        if last_steps is not None:
            self._drafted = DraftedDecodes(rows, last_steps, head, block_size)
        self._block_size = block_size
        self._chunk_sizes = tuple(chunk_sizes)
        requests, blocks = rows.block_table.shape
        # What no graph reads, and what varies in length, lies before a fixed origin. A request has
        # at most one block copied.
        self._origin = _ALIGNMENT * (requests * (block_size // 2 + 3) + 8)
        of_decodes = self._singles.most_figures(requests, max_tokens)
        if self._drafted is not None:
            of_decodes += self._drafted.most_figures(requests, max_tokens)
        self._buffer = torch.empty(
            self._origin
            + (8 + len(self._chunk_sizes)) * max_tokens
            + (32 + 2 * len(self._chunk_sizes)) * requests
            + requests * blocks
            + of_decodes
            + 128,
            dtype=torch.int64 if device.type == "cpu" else torch.int32,
            device=device,
        )

    def build(self, plan: StepPlan, size: GraphSize | None = None) -> StepInputs:
        """`size`: of the captured step that will compute it; it must have room for the plan."""
        rows, block_size = self._rows, self._block_size
        decodes, chunks = plan.decode_rows, plan.prefills
        n = len(decodes)
        lengths = np.asarray([chunk.length for chunk in chunks], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        checkpoints = _checkpoints(chunks)
        used = GraphSize(n, int(starts[-1]), len(chunks), len(checkpoints), plan.num_drafts)
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

        write_slot = rows.write_slot[decodes]
        if plan.writes is not None:
            write_slot = write_slot * plan.writes
        paged = self._paged(plan, lengths, room)
        logits_index = _logits_index(chunks, used.decode_tokens, room.decode_tokens + starts)
        if size is not None:
            logits_index = filled(logits_index, room.rows)
        cu_checkpoints = np.cumsum([0, *(len(chunk.checkpoints) for chunk in chunks)])
        parts: list[npt.NDArray[np.integer]] = [
            token_ids,
            positions,
            kv_slot,
            paged.cu_seqlens,
            paged.kv_length,
            paged.kv_indptr,
            paged.last_block_length,
            filled(decodes, room.decodes),
            filled(rows.read_slot[decodes], room.decodes),
            filled(write_slot, room.decodes),
            filled(starts, room.prompts + 1, used.prefill_tokens),
            filled([chunk.start for chunk in chunks], room.prompts),
            filled([chunk.read_slot for chunk in chunks], room.prompts),
            filled([chunk.write_slot for chunk in chunks], room.prompts),
            filled(cu_checkpoints, room.prompts + 1, used.checkpoints),
            *(filled(column, room.checkpoints) for column in checkpoints.T),
            filled(np.repeat(np.arange(len(chunks)), lengths), room.prefill_tokens, -1),
            logits_index,
            *self._chunk_bounds(chunks, lengths, room),
            *(drafted or self._singles).parts(plan, room),
            paged.kv_indices,
        ]
        loose, tensors = self._upload([plan.sampled_rows, *self._moves(plan)], parts)
        (
            token_ids_t, positions_t, kv_slot_t, cu_t, kv_length_t, indptr_t, last_block_t,
            rows_t, decode_read, decode_write, starts_t, start_t, read_t, write_t, cu_ck,
            ck_sequence, ck_position, ck_slot, sequence_t, logits_t, *others, indices_t,
        ) = tensors  # fmt: skip
        bounds_t, own = others[: len(self._chunk_sizes)], others[len(self._chunk_sizes) :]
        if size is not None:  # a later step of this size may have more blocks
            indices_t = self._buffer[indices_t.storage_offset() :]
        sampled_t, *moves = loose
        step = StepTensors(
            token_ids_t, positions_t, kv_slot_t, cu_t, kv_length_t, indptr_t, indices_t,
            last_block_t, rows_t, decode_read, decode_write, paged,
        )  # fmt: skip
        if drafted is None:
            decode = self._singles.inputs(step, own, room.decodes)
        else:
            decode = drafted.inputs(step, own, plan, size)
        return StepInputs(
            token_ids=token_ids_t,
            positions=positions_t,
            num_decodes=room.decodes,
            paged=PagedSequences(
                cu_seqlens=cu_t,
                kv_length=kv_length_t,
                kv_indptr=indptr_t,
                kv_indices=indices_t,
                last_block_length=last_block_t,
                kv_slot=kv_slot_t,
                num_decodes=room.decodes,
                host=decode.host,
                static=size is not None,
                longest_run=decode.longest_run,
            ),
            decode=decode.decode,
            prefill=PrefillSegments(
                cu_seqlens=starts_t,
                start_position=start_t,
                read_slot=read_t,
                write_slot=write_t,
                cu_checkpoints=cu_ck,
                checkpoint_sequence=ck_sequence,
                checkpoint_position=ck_position,
                checkpoint_slot=ck_slot,
                sequence_of_token=sequence_t,
                longest=int(lengths.max()) if size is None else size.prefill_tokens,
                cu_chunk_seqlens=dict(zip(self._chunk_sizes, bounds_t, strict=True)),
            )
            if room.prompts
            else None,
            logits_index=logits_t,
            decode_rows=rows_t,
            sampled_rows=sampled_t,
            moves=CacheMoves(*moves) if moves else None,
            num_drafts=room.drafts,
            take_up=decode.take_up,
        )

    def build_dummy(self, size: GraphSize) -> StepInputs:
        """A step for nobody, which is all padding: it reads zeros and changes nothing."""
        nobody = np.zeros(0, dtype=np.int64)
        return self.build(StepPlan(step=0, decode_rows=nobody), size)

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
    ) -> list[Ints]:
        """PrefillSegments.cu_chunk_seqlens for each kernel chunk, filled up with empty chunks."""
        starts = np.asarray([chunk.start for chunk in chunks], dtype=np.int64)
        found = []
        for size in self._chunk_sizes:
            bounds = chunk_bounds(starts, lengths, size)
            # a prompt has at most one chunk more than its tokens fill, and one that was cut
            most = room.prefill_tokens // size + 2 * room.prompts
            found.append(filled(bounds, most + 1, int(bounds[-1])))
        return found

    def _moves(self, plan: StepPlan) -> list[Ints]:
        """The parts of CacheMoves in their order; none when the step moves nothing."""
        # the logits of prompts that end come right after those of the decodes
        ended = [chunk for chunk in plan.prefills if chunk.samples]
        first = len(plan.decode_rows) + plan.num_drafts
        stored = [(first + i, c.logits_slot) for i, c in enumerate(ended) if c.logits_slot]
        if not (plan.copies or plan.resumed or stored):
            return []
        copies = np.asarray(plan.copies, dtype=np.int64).reshape(-1, 3)
        source, destination, count = copies.T
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        stored_rows, stored_slots = np.asarray(stored, dtype=np.int64).reshape(-1, 2).T
        return [
            np.repeat(source * self._block_size, count) + offset,
            np.repeat(destination * self._block_size, count) + offset,
            stored_rows,
            stored_slots,
            np.asarray([resumed.logits_slot for resumed in plan.resumed], dtype=np.int64),
        ]

    def _upload(
        self, loose: list[Ints], parts: list[npt.NDArray[np.integer]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Both as tensors on the device: `loose` before the origin, `parts` from there on, so that
        their places depend on nothing but their lengths."""
        every = (*loose, *parts)
        # Every part begins at a multiple of 16 bytes: Triton compiles a kernel once more for
        # pointers that don't.
        sizes = [size for part in every for size in (len(part), -len(part) % _ALIGNMENT)]
        total, before = sum(sizes), sum(sizes[: 2 * len(loose)])
        first = self._origin - before
        assert first >= 0 and first + total <= len(self._buffer), "the step is too large"
        # pinned memory comes from torch's cache, which waits until the copy from it is done
        host = torch.empty(total, dtype=self._buffer.dtype, pin_memory=self._buffer.is_cuda)
        numbers, start = host.numpy(), 0
        for part in every:
            numbers[start : start + len(part)] = part
            start += len(part) + -len(part) % _ALIGNMENT
        target = self._buffer[first : first + total]
        target.copy_(host, non_blocking=True)
        tensors = target.split(sizes)[::2]  # the others are gaps
        return list(tensors[: len(loose)]), list(tensors[len(loose) :])


def _logits_index(chunks: list[PrefillChunk], num_decodes: int, starts: Ints) -> Ints:
    """`starts`: the first token of each chunk, and the end of the last one."""
    last = [starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
    index = [np.arange(num_decodes), np.asarray(last, dtype=np.int64)]
    for chunk, start in zip(chunks, starts, strict=False):
        if chunk.logprob_targets is not None:
            index.append(start + np.arange(len(chunk.logprob_targets)))
    return np.concatenate(index)


def _checkpoints(chunks: list[PrefillChunk]) -> Ints:
    """[checkpoints, 3]: sequence, position, slot."""
    entries = [(i, p, slot) for i, chunk in enumerate(chunks) for p, slot in chunk.checkpoints]
    return np.asarray(entries, dtype=np.int64).reshape(-1, 3)
