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

Then some figures are known to the device alone: they are put in place there, see runs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.head_drafts import DraftTables, HeadDrafter
from megatron_hybrid.execution.plan import MOST_STOP_IDS, NO_DRAFT, PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import Draft, LastSteps, RunTables, take_up
from megatron_hybrid.kernels.contract import (
    DecodeRuns,
    DecodeSlots,
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
        where decodes have drafts. `write_interval`: decodes have fewer tokens than that pending.
        `head`: where the model's own head makes the drafts."""
        self._rows = rows
        self._last_steps = last_steps
        self._write_interval = write_interval
        self._head = head
        self._block_size = block_size
        self._chunk_sizes = tuple(chunk_sizes)
        requests, blocks = rows.block_table.shape
        # What no graph reads, and what varies in length, lies before a fixed origin. A request has
        # at most one block copied.
        self._origin = _ALIGNMENT * (requests * (block_size // 2 + 3) + 8)
        of_runs = 4 * requests + 16 if write_interval > 1 else 0
        if last_steps is not None:  # two figures a token, and what RunTables has of each request
            width = last_steps.window_width + MOST_STOP_IDS + 9
            of_runs += 2 * max_tokens + requests * width + 64
        self._buffer = torch.empty(
            self._origin
            + (8 + len(self._chunk_sizes)) * max_tokens
            + (32 + 2 * len(self._chunk_sizes)) * requests
            + requests * blocks
            + of_runs
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
        has_runs = plan.runs is not None or room.drafts > 0

        token_ids, positions, kv_slot = np.zeros((3, room.tokens), dtype=np.int64)
        if not has_runs:
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
            logits_index = _filled(logits_index, room.rows)
        cu_checkpoints = np.cumsum([0, *(len(chunk.checkpoints) for chunk in chunks)])
        parts: list[npt.NDArray[np.integer]] = [
            token_ids,
            positions,
            kv_slot,
            paged.cu_seqlens,
            paged.kv_length,
            paged.kv_indptr,
            paged.last_block_length,
            _filled(decodes, room.decodes),
            _filled(rows.read_slot[decodes], room.decodes),
            _filled(write_slot, room.decodes),
            _filled(starts, room.prompts + 1, used.prefill_tokens),
            _filled([chunk.start for chunk in chunks], room.prompts),
            _filled([chunk.read_slot for chunk in chunks], room.prompts),
            _filled([chunk.write_slot for chunk in chunks], room.prompts),
            _filled(cu_checkpoints, room.prompts + 1, used.checkpoints),
            *(_filled(column, room.checkpoints) for column in checkpoints.T),
            _filled(np.repeat(np.arange(len(chunks)), lengths), room.prefill_tokens, -1),
            logits_index,
            *self._chunk_bounds(chunks, lengths, room),
            *(self._run_parts(plan, room) if has_runs else self._single_parts(plan, room)),
            paged.kv_indices,
        ]
        loose, tensors = self._upload([plan.sampled_rows, *self._moves(plan)], parts)
        (
            token_ids_t, positions_t, kv_slot_t, cu_t, kv_length_t, indptr_t, last_block_t,
            rows_t, decode_read, decode_write, starts_t, start_t, read_t, write_t, cu_ck,
            ck_sequence, ck_position, ck_slot, sequence_t, logits_t, *others, indices_t,
        ) = tensors  # fmt: skip
        bounds_t, run_tensors = others[: len(self._chunk_sizes)], others[len(self._chunk_sizes) :]
        if size is not None:  # a later step of this size may have more blocks
            indices_t = self._buffer[indices_t.storage_offset() :]
        sampled_t, *moves = loose
        decode: DecodeSlots | DecodeRuns | None = None
        take_up_runs: Callable[[], None] | None = None
        longest_run = 0
        if has_runs:
            last = self._last_steps
            assert last is not None
            who, certain, unwritten, sequence, offset, start, windows, *figures = run_tensors
            position_t, pending_t, at, slot, stop_ids = figures
            longest_run = 1 + last.longest
            cu_runs = cu_t[: room.decodes + 1]
            windows, stop_ids = (table.view(room.decodes, -1) for table in (windows, stop_ids))
            tables = RunTables(who, certain, unwritten, cu_runs, sequence, offset, start, windows)
            of_rows = (cu_runs, decode_read, rows_t, stop_ids)
            draft = self._draft(
                DraftTables(*of_rows, indptr_t, indices_t, last_block_t, paged), plan, size
            )
            targets = (token_ids_t, positions_t, kv_slot_t, kv_length_t, position_t, pending_t)

            def put_in_place() -> None:
                taken = take_up(tables, last, indptr_t, indices_t, block_size, draft)
                for target, values in zip(targets, taken, strict=True):
                    target[: len(values)].copy_(values)

            decode = DecodeRuns(
                cu_runs, position_t, pending_t, decode_read, decode_write, rows_t, at, slot
            )
            take_up_runs = put_in_place
            if kv_length_t.device.type == "cpu":  # whose kernels are planned with exact lengths
                put_in_place()
                take_up_runs = put_in_place if size is not None else None
                paged = paged._replace(kv_length=kv_length_t.numpy())
        elif room.decodes and self._write_interval > 1:
            cu_runs, position_t, pending_t, nothing = run_tensors
            decode = DecodeRuns(
                cu_runs, position_t, pending_t, decode_read, decode_write, rows_t, nothing, nothing,
                most_pending=self._write_interval - 1,
            )  # fmt: skip
        elif room.decodes:
            decode = DecodeSlots(decode_read, decode_write)
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
                host=paged,
                static=size is not None,
                longest_run=longest_run,
            ),
            decode=decode,
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
            take_up=take_up_runs,
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
        queries[room.decodes :] = _filled(lengths, room.prompts)
        if room.drafts:
            queries[len(plan.decode_rows) : room.decodes] = 0
        if plan.runs is not None:
            queries[decodes] += plan.runs.num_drafts
        # of runs: as long as they may be
        kv_length[decodes] = rows.next_position(plan.decode_rows) + queries[decodes]
        kv_length[prompts] = [chunk.end for chunk in chunks]
        width = int(-(-kv_length.max(initial=1) // self._block_size))
        table = np.zeros((sequences, width), dtype=np.int64)
        table[decodes] = rows.block_table[plan.decode_rows, :width]
        table[prompts] = rows.block_table[[chunk.row for chunk in chunks], :width]
        return PagedHost.of(queries, kv_length, table, self._block_size)

    def _run_parts(self, plan: StepPlan, room: GraphSize) -> list[Ints]:
        """What RunTables and DecodeRuns have of the host, and room for what they have not."""
        n, runs, last = len(plan.decode_rows), plan.runs, self._last_steps
        assert last is not None
        windows = np.full((room.decodes, last.window_width), NO_DRAFT, dtype=np.int64)
        lengths, window_start, position, slot = np.zeros((4, room.decodes), dtype=np.int64)
        stop_ids = np.full((room.decodes, MOST_STOP_IDS), NO_DRAFT, dtype=np.int64)
        lengths[:n] = 1
        if runs is not None and runs.stop_ids is not None:
            stop_ids[:n] = runs.stop_ids
        if runs is not None:
            lengths[:n] += runs.num_drafts
            windows[:n, : runs.windows.shape[1]] = runs.windows
            window_start[:n] = runs.window_start
            position[:n], slot[:n] = runs.checkpoint_position, runs.checkpoint_slot
        sequence = np.repeat(np.arange(room.decodes), lengths)
        offset = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        nothing = np.zeros(room.decodes, dtype=np.int64)
        return [
            _filled(plan.decode_rows, room.decodes, last.nobody),
            _filled(self._rows.position[plan.decode_rows], room.decodes),
            _filled(self._rows.unwritten[plan.decode_rows], room.decodes),
            _filled(sequence, room.decode_tokens, -1),
            _filled(offset, room.decode_tokens),
            window_start,
            windows.reshape(-1),
            nothing,
            nothing,
            position,
            slot,
            stop_ids.reshape(-1),
        ]

    def _draft(self, tables: DraftTables, plan: StepPlan, size: GraphSize | None) -> Draft | None:
        """What makes as many drafts as any row has; in a graph, as each has room for."""
        widest = 0 if plan.runs is None else plan.runs.widest
        count = widest if size is None else size.drafts // size.decodes
        assert count >= widest
        return partial(self._head.draft, tables, count) if self._head and count else None

    def _single_parts(self, plan: StepPlan, room: GraphSize) -> list[Ints]:
        """What DecodeRuns has of decodes of one token each; nothing where all states are written in
        every step."""
        if self._write_interval == 1:
            return []
        rows, decodes = self._rows, plan.decode_rows
        return [
            np.minimum(np.arange(room.decodes + 1), len(decodes)),
            _filled(rows.position[decodes], room.decodes),
            _filled(rows.unwritten[decodes], room.decodes),
            np.zeros(room.decodes, dtype=np.int64),  # positions and slots of checkpoints
        ]

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
            found.append(_filled(bounds, most + 1, int(bounds[-1])))
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


def _filled(values: Ints | list[int], length: int, filler: int = 0) -> Ints:
    filled = np.full(length, filler, dtype=np.int64)
    filled[: len(values)] = values
    return filled
