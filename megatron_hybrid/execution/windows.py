"""What kernels of layers with a sliding window are told of a step: sequences that begin with the
first block that is still there.

    positions       0 ........ first * block_size ........ position
    in the cache    given back |  kept: kv_length - first * block_size tokens

A token sees as many tokens before it as the window has, wherever its sequence begins, and keys lie
in the cache with their rotation. So nothing else is told of what was given back.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.figures import StepFigures, WindowFigures, filled
from megatron_hybrid.execution.plan import StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.kernels.contract import Ints, PagedHost, PagedSequences


class WindowBatches:
    """Of one engine whose model has such layers. `quota`: window blocks of a request at most,
    beside those of a chunk of its prompt."""

    def __init__(self, rows: RowTable, block_size: int, quota: int) -> None:
        assert rows.window_table is not None
        self._rows, self._table = rows, rows.window_table
        self._block_size = block_size
        self._quota = quota

    def most_numbers(self, max_tokens: int) -> int:
        """Of the tables of a step. (A graph has prompts beside as many decodes as there can be.)"""
        sequences = 2 * len(self._table)
        return sequences * (self._quota + 1) + max_tokens // self._block_size + 1

    def figures(
        self, plan: StepPlan, host: PagedHost, room: GraphSize, *, static: bool
    ) -> WindowFigures[Ints]:
        """`host`: of the whole sequences, of which padded ones have one token. static: as long as
        a graph of this size needs them."""
        rows, size, chunks = self._rows, self._block_size, plan.prefills
        decodes = plan.decode_rows
        sequences = np.zeros(room.decodes + room.prompts, dtype=np.int64)
        sequences[: len(decodes)] = decodes
        prompts = slice(room.decodes, room.decodes + len(chunks))
        sequences[prompts] = [chunk.row for chunk in chunks]
        is_real = np.zeros(len(sequences), dtype=bool)
        is_real[: len(decodes)] = is_real[prompts] = True
        first = rows.window_first[sequences] * is_real
        kv_length = host.kv_length - first * size
        columns = np.arange(int(-(-kv_length.max(initial=1) // size)))
        within = np.minimum(first[:, None] + columns, self._table.shape[1] - 1)
        table = self._table[sequences[:, None], within] * is_real[:, None]
        own = PagedHost.of(np.diff(host.cu_seqlens), kv_length, table, size)
        kv_slot = np.zeros(room.tokens, dtype=np.int64)
        if plan.drafts is None and not room.drafts:
            kv_slot[: len(decodes)] = self._places(decodes, rows.position[decodes])
        start = room.decode_tokens
        for chunk in chunks:
            span = np.arange(chunk.start, chunk.end)
            kv_slot[start : start + chunk.length] = self._places(chunk.row, span)
            start += chunk.length
        indices = own.kv_indices
        if static:
            most = room.prefill_tokens // size + len(sequences) * (self._quota + 1)
            indices = filled(indices, most)
        return WindowFigures(
            kv_slot, own.kv_length, own.kv_indptr, own.last_block_length, first * size, indices
        )

    def _places(self, rows: Ints | int, positions: Ints) -> Ints:
        block = self._table[rows, positions // self._block_size]
        places: Ints = block * self._block_size + positions % self._block_size
        return places


def window_sequences(
    step: StepFigures[Tensor], own: WindowFigures[Ints], whole: PagedSequences
) -> PagedSequences:
    """Of a step's figures. own: on the host. whole: the same step's whole sequences."""
    there = step.window
    assert there is not None
    numbers = own.kv_length, own.kv_indptr, own.kv_indices, own.last_block_length
    host = PagedHost(whole.host.cu_seqlens, *(part.astype(np.int32) for part in numbers))
    if whole.longest_run and not whole.static and there.kv_length.device.type == "cpu":
        host = host._replace(kv_length=there.kv_length.numpy())  # exact, as those of the whole ones
    return replace(
        whole,
        kv_length=there.kv_length,
        kv_indptr=there.kv_indptr,
        kv_indices=there.kv_indices,
        last_block_length=there.last_block_length,
        kv_slot=there.kv_slot,
        host=host,
    )
