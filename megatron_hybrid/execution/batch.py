"""Plan -> tensors. Every integer of a step goes to the device in ONE copy.

tokens   d0 d1 d2 | p0 p0 p0 p0 | p1 p1        decodes first, then prefill chunks
logits    0  1  2            6        8        rows that sample, then (if any) every row of
                                               prompts whose log-probabilities are wanted

Resumed rows compute nothing: they are no part of the batch, only of its cache moves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from megatron_hybrid.execution.plan import PrefillChunk, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.kernels.contract import DecodeSlots, PagedSequences, PrefillSegments
from megatron_hybrid.layers.inputs import CacheMoves, StepInputs

Ints = npt.NDArray[np.int64]


class BatchBuilder:
    """Builds the inputs of a step from its plan and the row table."""

    def __init__(self, rows: RowTable, block_size: int, device: torch.device) -> None:
        self._rows = rows
        self._block_size = block_size
        self._device = device
        self._pinned = device.type == "cuda"
        self._host = self._allocate(4096)

    def build(self, plan: StepPlan) -> StepInputs:
        rows, size = self._rows, self._block_size
        decodes = plan.decode_rows
        chunks = plan.prefills
        n = len(decodes)

        position = rows.position[decodes]
        block = rows.block_table[decodes, position // size]
        token_ids: list[Ints] = [rows.last_token[decodes]]
        positions: list[Ints] = [position]
        kv_slot: list[Ints] = [block * size + position % size]
        for chunk in chunks:
            span = np.arange(chunk.start, chunk.end)
            blocks = rows.block_table[chunk.row, span // size]
            token_ids.append(chunk.tokens.astype(np.int64))
            positions.append(span)
            # block 0 takes the writes of positions whose KV is shared
            kv_slot.append(np.where(span < chunk.write_from, 0, blocks * size + span % size))

        lengths = np.asarray([chunk.length for chunk in chunks], dtype=np.int64)
        chunk_starts = np.concatenate([[0], np.cumsum(lengths)])
        kv_length = np.concatenate([position + 1, [chunk.end for chunk in chunks]]).astype(np.int64)
        all_rows = np.concatenate([decodes, [chunk.row for chunk in chunks]]).astype(np.int64)
        width = int(-(-kv_length.max(initial=0) // size))
        cu_seqlens = np.concatenate([np.arange(n), n + chunk_starts])
        checkpoints = np.asarray(
            [(i, p, slot) for i, chunk in enumerate(chunks) for p, slot in chunk.checkpoints],
            dtype=np.int64,
        ).reshape(-1, 3)

        parts: list[Ints] = [
            np.concatenate(token_ids),
            np.concatenate(positions),
            np.concatenate(kv_slot),
            cu_seqlens,
            kv_length,
            rows.block_table[all_rows, :width].reshape(-1),
            rows.read_slot[decodes],
            rows.write_slot[decodes],
            chunk_starts,
            np.asarray([chunk.start for chunk in chunks], dtype=np.int64),
            np.asarray([chunk.read_slot for chunk in chunks], dtype=np.int64),
            np.asarray([chunk.write_slot for chunk in chunks], dtype=np.int64),
            checkpoints[:, 0],
            checkpoints[:, 1],
            checkpoints[:, 2],
            self._logits_index(n, chunks, chunk_starts),
        ]
        (
            tokens_t, positions_t, kv_slot_t, cu_t, kv_length_t, table_t, decode_read, decode_write,
            starts_t, start_t, read_t, write_t, ck_sequence, ck_position, ck_slot, logits_t,
            *moves,
        ) = self._to_device(parts + self._moves(plan))  # fmt: skip
        return StepInputs(
            token_ids=tokens_t,
            positions=positions_t,
            num_decodes=n,
            paged=PagedSequences(
                cu_seqlens=cu_t,
                kv_length=kv_length_t,
                block_table=table_t.view(len(all_rows), width),
                kv_slot=kv_slot_t,
                num_decodes=n,
            ),
            decode=DecodeSlots(decode_read, decode_write) if n else None,
            prefill=PrefillSegments(
                cu_seqlens=starts_t,
                start_position=start_t,
                read_slot=read_t,
                write_slot=write_t,
                checkpoint_sequence=ck_sequence,
                checkpoint_position=ck_position,
                checkpoint_slot=ck_slot,
                longest=int(lengths.max()),
            )
            if chunks
            else None,
            logits_index=logits_t,
            moves=CacheMoves(*moves) if moves else None,
        )

    def build_dummy(self) -> StepInputs:
        """One decode that reads zeros and writes nowhere: the null slot and the dummy block."""
        one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        token, cu, length, slot = self._to_device([zero, np.arange(2), one, zero])
        paged = PagedSequences(cu, length, slot.view(1, 1), slot, num_decodes=1)
        return StepInputs(token, slot, 1, paged, DecodeSlots(slot, slot), None, slot)

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

    def _to_device(self, parts: list[Ints]) -> tuple[torch.Tensor, ...]:
        sizes = [len(part) for part in parts]
        total = sum(sizes)
        if total > len(self._host):
            self._host = self._allocate(2 * total)
        np.concatenate(parts, out=self._host.numpy()[:total])
        # on a CPU these are views of the host buffer, which the next step overwrites
        device = self._host[:total].to(self._device, non_blocking=True)
        return device.split(sizes)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
