"""Plan -> tensors. Every integer of a step goes to the device in ONE copy.

tokens   d0 d1 d2 | p0 p0 p0 p0 | p1 p1        decodes first, then prefill chunks
logits    0  1  2            6        8        rows that sample, then (if any) every row of
                                               prompts whose log-probabilities are wanted

Resumed rows compute nothing: they are no part of the batch, only of its cache moves.

A step of a captured CUDA graph is padded to the graph's size, so that every tensor lies where the
graph reads it: padded decodes read and write slot 0 and the first place of block 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.execution.plan import PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.kernels.contract import (
    DecodeSlots,
    PagedHost,
    PagedSequences,
    PrefillSegments,
)
from megatron_hybrid.layers.inputs import CacheMoves, StepInputs

Ints = npt.NDArray[np.int64]
_ALIGNMENT = 4  # int32 in 16 bytes


class BatchBuilder:
    """Builds the inputs of a step from its plan and the row table."""

    def __init__(
        self, rows: RowTable, block_size: int, device: torch.device, max_tokens: int
    ) -> None:
        self._rows = rows
        self._block_size = block_size
        self._device = device
        self._buffer: Tensor | None = None
        if device.type == "cuda":  # one place for all steps: graphs read it there
            requests, blocks = rows.block_table.shape
            capacity = 8 * max_tokens + 32 * requests + requests * blocks
            self._buffer = torch.empty(capacity, dtype=torch.int32, device=device)

    def build(self, plan: StepPlan, padded_decodes: int = 0) -> StepInputs:
        """`padded_decodes`: how many decodes a step of decodes alone, which moves nothing in the
        caches, is filled up to."""
        rows, size = self._rows, self._block_size
        decodes = plan.decode_rows
        chunks = plan.prefills
        n = len(decodes)
        padding = max(padded_decodes - n, 0)
        assert not padded_decodes or plan.decodes_only

        position = _padded(rows.position[decodes], padding)
        table = rows.block_table[decodes]
        block = _padded(table[np.arange(n), position[:n] // size], padding)
        token_ids: list[Ints] = [_padded(rows.last_token[decodes], padding)]
        positions: list[Ints] = [position]
        kv_slot: list[Ints] = [block * size + position % size]
        for chunk in chunks:
            span = np.arange(chunk.start, chunk.end)
            blocks = rows.block_table[chunk.row, span // size]
            token_ids.append(chunk.tokens.astype(np.int64))
            positions.append(span)
            # block 0 takes the writes of positions whose KV is shared
            kv_slot.append(np.where(span < chunk.write_from, 0, blocks * size + span % size))
        n += padding

        lengths = np.asarray([chunk.length for chunk in chunks], dtype=np.int64)
        chunk_starts = np.concatenate([[0], np.cumsum(lengths)])
        paged = self._paged(plan, position, lengths, padding)
        segments = _Segments.of(chunks)
        parts: list[npt.NDArray[np.integer]] = [
            np.concatenate(token_ids),
            np.concatenate(positions),
            np.concatenate(kv_slot),
            paged.cu_seqlens,
            paged.kv_length,
            paged.kv_indptr,
            paged.last_block_length,
            _padded(decodes, padding),
            _padded(rows.read_slot[decodes], padding),
            _padded(rows.write_slot[decodes], padding),
            chunk_starts,
            segments.start,
            segments.read_slot,
            segments.write_slot,
            segments.cu_checkpoints,
            segments.checkpoints[:, 0],
            segments.checkpoints[:, 1],
            segments.checkpoints[:, 2],
            np.repeat(np.arange(len(chunks)), lengths),
            self._logits_index(n, chunks, chunk_starts),
            _padded(plan.sampled_rows, padding),
            *self._moves(plan),
            paged.kv_indices,
        ]
        (
            tokens_t, positions_t, kv_slot_t, cu_t, kv_length_t, indptr_t, last_block_t,
            rows_t, decode_read, decode_write, starts_t, start_t, read_t, write_t, cu_ck,
            ck_sequence, ck_position, ck_slot, sequence_t, logits_t, sampled_t, *moves, indices_t,
        ) = self._to_device(parts, keep_rest=padded_decodes > 0)  # fmt: skip
        return StepInputs(
            token_ids=tokens_t,
            positions=positions_t,
            num_decodes=n,
            paged=PagedSequences(
                cu_seqlens=cu_t,
                kv_length=kv_length_t,
                kv_indptr=indptr_t,
                kv_indices=indices_t,
                last_block_length=last_block_t,
                kv_slot=kv_slot_t,
                num_decodes=n,
                host=paged,
                static=padded_decodes > 0,
            ),
            decode=DecodeSlots(decode_read, decode_write) if n else None,
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
                longest=int(lengths.max()),
            )
            if chunks
            else None,
            logits_index=logits_t,
            decode_rows=rows_t,
            sampled_rows=sampled_t,
            moves=CacheMoves(*moves) if moves else None,
        )

    def build_dummy(self, padded_decodes: int = 1) -> StepInputs:
        """A step for nobody: decodes that read zeros and write nowhere."""
        nobody = np.zeros(0, dtype=np.int64)
        return self.build(StepPlan(step=0, decode_rows=nobody), padded_decodes)

    def _paged(self, plan: StepPlan, position: Ints, lengths: Ints, padding: int) -> PagedHost:
        rows, chunks = self._rows, plan.prefills
        kv_length = np.concatenate([position + 1, [chunk.end for chunk in chunks]]).astype(np.int64)
        all_rows = np.concatenate([plan.decode_rows, [chunk.row for chunk in chunks]])
        width = int(-(-kv_length.max(initial=1) // self._block_size))
        table = rows.block_table[all_rows.astype(np.int64), :width]
        if padding:
            table = np.concatenate([table, np.zeros((padding, width), dtype=np.int64)])
        queries = np.concatenate([np.ones(len(position), dtype=np.int64), lengths])
        return PagedHost.of(queries, kv_length, table, self._block_size)

    def _logits_index(self, n: int, chunks: list[PrefillChunk], starts: Ints) -> Ints:
        last = [n + starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
        index = np.concatenate([np.arange(n), np.asarray(last, dtype=np.int64)])
        for i, chunk in enumerate(chunks):
            if chunk.logprob_targets is not None:
                count = len(chunk.logprob_targets)
                index = np.concatenate([index, n + starts[i] + np.arange(count)])
        return index.astype(np.int64)

    def _moves(self, plan: StepPlan) -> list[Ints]:
        """The parts of CacheMoves in their order; none when the step moves nothing."""
        # the logits of prompts that end come right after those of the decodes
        ended = [chunk for chunk in plan.prefills if chunk.samples]
        first = len(plan.decode_rows)
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

    def _to_device(self, parts: list[npt.NDArray[np.integer]], keep_rest: bool) -> list[Tensor]:
        """The parts as tensors on the device; with `keep_rest` the last one has all the room that
        is left."""
        sizes = [len(part) for part in parts]
        if self._buffer is None:
            return list(torch.from_numpy(np.concatenate(parts, dtype=np.int64)).split(sizes))
        # Every part begins at a multiple of 16 bytes: Triton compiles a kernel once more for
        # pointers that don't.
        starts = np.cumsum([0] + [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
        # pinned memory comes from torch's cache, which waits until the copy from it is done
        host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True)
        numbers = host.numpy()
        for start, part in zip(starts, parts, strict=False):
            numbers[start : start + len(part)] = part
        self._buffer[: starts[-1]].copy_(host, non_blocking=True)
        tensors = [
            self._buffer.narrow(0, start, size) for start, size in zip(starts, sizes, strict=False)
        ]
        if keep_rest:
            tensors[-1] = self._buffer[starts[-2] :]
        return tensors


@dataclass(frozen=True, slots=True)
class _Segments:
    """PrefillSegments' figures of the chunks."""

    start: Ints
    read_slot: Ints
    write_slot: Ints
    cu_checkpoints: Ints
    checkpoints: Ints  # [checkpoints, 3]: sequence, position, slot

    @classmethod
    def of(cls, chunks: list[PrefillChunk]) -> _Segments:
        def column(values: list[int]) -> Ints:
            return np.asarray(values, dtype=np.int64)

        checkpoints = [(i, p, slot) for i, c in enumerate(chunks) for p, slot in c.checkpoints]
        return cls(
            start=column([chunk.start for chunk in chunks]),
            read_slot=column([chunk.read_slot for chunk in chunks]),
            write_slot=column([chunk.write_slot for chunk in chunks]),
            cu_checkpoints=column([0, *np.cumsum([len(c.checkpoints) for c in chunks])]),
            checkpoints=np.asarray(checkpoints, dtype=np.int64).reshape(-1, 3),
        )


def _padded(values: Ints, padding: int) -> Ints:
    return np.concatenate([values, np.zeros(padding, dtype=np.int64)]) if padding else values
