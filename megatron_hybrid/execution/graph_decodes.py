"""Inputs of steps of decodes alone, of one token each, for one CUDA graph.

Step after step the same rows decode in the same graph, and the device may wait for nothing but the
host. So what depends on the graph's size alone is made once: the arrays of the figures, as they lie
on the device, and the tensors there. A step writes what is new into the arrays and sends them in
one copy, with the tables of its requests behind them.
"""

from __future__ import annotations

import numpy as np

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.decode_inputs import SingleDecodes
from megatron_hybrid.execution.figures import (
    SingleFigures,
    StepFigures,
    Uploads,
    paged_sequences,
)
from megatron_hybrid.execution.plan import StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.windows import WindowBatches, window_sequences
from megatron_hybrid.kernels.contract import Ints, PagedHost
from megatron_hybrid.layers.inputs import StepInputs


class GraphDecodes:
    """Builds what BatchBuilder would, which see; tensors lie at the same places."""

    def __init__(
        self,
        rows: RowTable,
        singles: SingleDecodes,
        block_size: int,
        size: GraphSize,
        uploads: Uploads,
        windows: WindowBatches | None = None,
    ) -> None:
        self._rows = rows
        self._windows = windows
        self._singles = singles
        self._block_size = block_size
        self._size = size
        self._uploads = uploads
        self._kept = uploads.keep(_padding(size, singles, windows))
        self._first_of_each = np.arange(size.decodes + 1)
        self._count = 0  # of decodes in the last step
        device = self._kept.device
        self._device = device._replace(kv_indices=uploads.to_the_end(device.kv_indices))
        self._decode = singles.on_device(self._device)

    @staticmethod
    def can_build(plan: StepPlan, size: GraphSize) -> bool:
        """Whether a step is one of these: nothing is moved in the caches, either."""
        return not (
            size.prompts
            or size.drafts
            or plan.prefills
            or plan.resumed
            or plan.drafts is not None
            or plan.copies
            or plan.window_copies
            or plan.packs
            or plan.unpacks
        )

    def build(self, plan: StepPlan) -> StepInputs:
        """As of BatchBuilder, of a step that there is room for."""
        rows, decodes, block_size = self._rows, plan.decode_rows, self._block_size
        count = len(decodes)
        assert count <= self._size.decodes, (count, self._size)
        if count < self._count:
            self._clear(count)
        self._count = count
        host = self._kept.host
        position = rows.position[decodes]
        last_block, within = np.divmod(position, block_size)
        host.token_ids[:count] = rows.last_token[decodes]
        host.positions[:count] = position
        host.kv_slot[:count] = rows.block_table[decodes, last_block] * block_size + within
        host.kv_length[:count] = position + 1
        host.last_block_length[:count] = within + 1
        host.decode_rows[:count] = decodes
        host.read_slot[:count] = rows.read_slot[decodes]
        write_slot = rows.write_slot[decodes]
        host.write_slot[:count] = write_slot if plan.writes is None else write_slot * plan.writes
        if host.adapters is not None:
            host.adapters[:count] = rows.adapter[decodes]
        blocks = last_block + 1
        indptr = host.kv_indptr
        np.cumsum(blocks, dtype=indptr.dtype, out=indptr[1 : count + 1])
        indptr[count:] = indptr[count] + self._first_of_each[: len(indptr) - count]
        if host.decodes is not None:
            assert isinstance(host.decodes, SingleFigures)
            self._singles.write(host.decodes, plan)
        if self._windows is not None and host.window is not None:
            own = self._windows.figures(plan, self._host(indptr), self._size, static=True)
            for view, part in zip(host.window, own, strict=True):
                view[:] = part
        kv_indices = self._uploads.upload_again(
            self._kept, self._tables(decodes, blocks), int(indptr[-1])
        )
        return self._inputs(kv_indices)

    def _tables(self, decodes: Ints, blocks: Ints) -> Ints:
        """The blocks of these rows, which have so many, one row's behind the other's."""
        table = self._rows.block_table
        if len(decodes) == 1:
            return table[decodes[0], : blocks[0]]
        width = int(blocks.max(initial=0))
        used = np.arange(width) < blocks[:, None]
        return table[decodes, :width][used]

    def _host(self, kv_indices: Ints) -> PagedHost:
        figures = self._kept.host
        return PagedHost(
            figures.cu_seqlens,
            figures.kv_length,
            figures.kv_indptr,
            kv_indices,
            figures.last_block_length,
        )

    def _inputs(self, kv_indices: Ints) -> StepInputs:
        device, size = self._device, self._size
        host = self._host(kv_indices)
        if kv_indices.dtype != np.int32:  # on a CPU
            host = PagedHost(*(part.astype(np.int32) for part in host))
        paged, own = (
            paged_sequences(
                device,
                host,
                size.decodes,
                static=True,
                most_blocks=self._rows.block_table.shape[1],
            ),  # fmt: skip
            self._kept.host.window,
        )
        return StepInputs(
            token_ids=device.token_ids,
            positions=device.positions,
            num_decodes=size.decodes,
            paged=paged,
            window=None if own is None else window_sequences(device, own, paged),
            decode=self._decode,
            prefill=None,
            logits_index=device.logits_index,
            decode_rows=device.decode_rows,
            sampled_rows=device.decode_rows[: self._count],
            adapters=device.adapters,
        )

    def _clear(self, count: int) -> None:
        """From the decode `count` on there is padding."""
        host = self._kept.host
        of_tokens = host.token_ids, host.positions, host.kv_slot, host.adapters
        for part in (*of_tokens, host.decode_rows, host.read_slot, host.write_slot):
            if part is not None:
                part[count:] = 0
        for part in (host.kv_length, host.last_block_length):
            part[count:] = 1


def _padding(
    size: GraphSize, singles: SingleDecodes, windows: WindowBatches | None
) -> StepFigures[Ints]:
    """Of a step in which nobody decodes; each has one token of KV, the first of block 0."""
    decodes = size.decodes
    zeros, ones = np.zeros(decodes, dtype=np.int64), np.ones(decodes, dtype=np.int64)
    places = np.arange(decodes + 1)
    window = None
    if windows is not None:
        nobody = StepPlan(step=0, decode_rows=zeros[:0])
        host = PagedHost(places, ones, places, zeros, ones)
        window = windows.figures(nobody, host, size, static=True)
    return StepFigures(
        token_ids=zeros,
        positions=zeros,
        kv_slot=zeros,
        cu_seqlens=places,
        kv_length=ones,
        kv_indptr=places,
        last_block_length=ones,
        decode_rows=zeros,
        read_slot=zeros,
        write_slot=zeros,
        # all tokens': a graph of decodes alone takes their logits as they come
        logits_index=places[:decodes],
        prefill=None,
        chunk_bounds=(),
        decodes=singles.padding(decodes),
        adapters=zeros if size.adapters else None,
        window=window,
        kv_indices=zeros[:0],
    )
