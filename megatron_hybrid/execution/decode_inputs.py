"""The decodes' part of a step's inputs: the figures that go to the device for them alone, and what
kernels are told with these. SingleDecodes are of one token each, DraftedDecodes of one and drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.head_drafts import DraftTables, HeadDrafter
from megatron_hybrid.execution.plan import MOST_STOP_IDS, NO_DRAFT, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import Draft, LastSteps, RunTables, take_up
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots, PagedHost

Ints = npt.NDArray[np.int64]


class StepTensors(NamedTuple):
    """What decodes and prompts have in common, on the device; decodes come first."""

    token_ids: Tensor
    positions: Tensor
    kv_slot: Tensor
    cu_seqlens: Tensor
    kv_length: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_block_length: Tensor
    rows: Tensor  # [decodes]
    read_slot: Tensor  # [decodes]
    write_slot: Tensor  # [decodes]
    host: PagedHost


class DecodeInputs(NamedTuple):
    """`take_up`, `longest_run`: of StepInputs and PagedSequences. `host`: the step's figures."""

    decode: DecodeSlots | DecodeRuns | None
    host: PagedHost
    take_up: Callable[[], None] | None = None
    longest_run: int = 0


class SingleDecodes:
    """`write_interval`: fewer tokens than that are unfolded of a row."""

    def __init__(self, rows: RowTable, write_interval: int) -> None:
        self._rows = rows
        self._write_interval = write_interval

    def most_figures(self, requests: int, max_tokens: int) -> int:
        return 4 * requests + 16 if self._write_interval > 1 else 0

    def parts(self, plan: StepPlan, room: GraphSize) -> list[Ints]:
        """What DecodeRuns has of the host; nothing where all states are written in every step."""
        if self._write_interval == 1:
            return []
        rows, decodes = self._rows, plan.decode_rows
        return [
            np.minimum(np.arange(room.decodes + 1), len(decodes)),
            filled(rows.position[decodes], room.decodes),
            filled(rows.unfolded[decodes], room.decodes),
            np.zeros(room.decodes, dtype=np.int64),  # positions and slots of checkpoints
        ]

    def inputs(self, step: StepTensors, own: list[Tensor], decodes: int) -> DecodeInputs:
        """own: the `parts`; decodes: with padding."""
        slots = step.read_slot, step.write_slot
        if not decodes:
            return DecodeInputs(None, step.host)
        if self._write_interval == 1:
            return DecodeInputs(DecodeSlots(*slots), step.host)
        cu_seqlens, position, unfolded, nothing = own
        runs = DecodeRuns(
            cu_seqlens, position, unfolded, *slots, step.rows, nothing, nothing,
            most_unfolded=self._write_interval - 1,
        )  # fmt: skip
        return DecodeInputs(runs, step.host)


class DraftedDecodes:
    """`head`: where the model's own head makes the drafts."""

    def __init__(
        self, rows: RowTable, last_steps: LastSteps, head: HeadDrafter | None, block_size: int
    ) -> None:
        self._rows = rows
        self._last = last_steps
        self._head = head
        self._block_size = block_size

    def most_figures(self, requests: int, max_tokens: int) -> int:
        """Two of a token, and what RunTables and DecodeRuns have of each request."""
        width = self._last.window_width + MOST_STOP_IDS + 9
        return 2 * max_tokens + requests * width + 64

    def parts(self, plan: StepPlan, room: GraphSize) -> list[Ints]:
        """What RunTables and DecodeRuns have of the host, and room for what they have not."""
        n, runs, last = len(plan.decode_rows), plan.drafts, self._last
        windows = np.full((room.decodes, last.window_width), NO_DRAFT, dtype=np.int64)
        stop_ids = np.full((room.decodes, MOST_STOP_IDS), NO_DRAFT, dtype=np.int64)
        lengths, window_start, position, slot = np.zeros((4, room.decodes), dtype=np.int64)
        lengths[:n] = 1
        if runs is not None:
            lengths[:n] += runs.num_drafts
            windows[:n, : runs.windows.shape[1]] = runs.windows
            window_start[:n] = runs.window_start
            position[:n], slot[:n] = runs.checkpoint_position, runs.checkpoint_slot
            if runs.stop_ids is not None:
                stop_ids[:n] = runs.stop_ids
        sequence = np.repeat(np.arange(room.decodes), lengths)
        offset = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        nothing = np.zeros(room.decodes, dtype=np.int64)
        return [
            filled(plan.decode_rows, room.decodes, last.nobody),
            filled(self._rows.position[plan.decode_rows], room.decodes),
            filled(self._rows.unfolded[plan.decode_rows], room.decodes),
            filled(sequence, room.decode_tokens, -1),
            filled(offset, room.decode_tokens),
            window_start,
            windows.reshape(-1),
            nothing,
            nothing,
            position,
            slot,
            stop_ids.reshape(-1),
        ]

    def inputs(
        self, step: StepTensors, own: list[Tensor], plan: StepPlan, size: GraphSize | None
    ) -> DecodeInputs:
        """own: the `parts`; size: of the graph that computes the step."""
        last, block_size, on_cpu = self._last, self._block_size, step.kv_length.device.type == "cpu"
        who, certain, kept, sequence, offset, start, windows, *figures = own
        position, unfolded, checkpoint_position, checkpoint_slot, stop_ids = figures
        decodes = len(position)
        windows, stop_ids = (table.view(decodes, -1) for table in (windows, stop_ids))
        cu_seqlens = step.cu_seqlens[: decodes + 1]
        tables = RunTables(who, certain, kept, cu_seqlens, sequence, offset, start, windows)
        paged = step.kv_indptr, step.kv_indices
        of_rows = cu_seqlens, step.read_slot, step.rows, stop_ids
        for_head = DraftTables(*of_rows, *paged, step.last_block_length, step.host)
        draft = self._draft(for_head, plan, size)
        targets = (
            step.token_ids, step.positions, step.kv_slot, step.kv_length, position, unfolded
        )  # fmt: skip

        def put_in_place() -> None:
            taken = take_up(tables, last, *paged, block_size, draft)
            for target, values in zip(targets, taken, strict=True):
                target[: len(values)].copy_(values)

        decode = DecodeRuns(
            cu_seqlens, position, unfolded, step.read_slot, step.write_slot, step.rows,
            checkpoint_position, checkpoint_slot,
        )  # fmt: skip
        host = step.host
        if on_cpu:  # whose kernels are planned with exact lengths
            put_in_place()
            host = host._replace(kv_length=step.kv_length.numpy())
        later = None if on_cpu and size is None else put_in_place
        return DecodeInputs(decode, host, later, 1 + last.longest)

    def _draft(self, tables: DraftTables, plan: StepPlan, size: GraphSize | None) -> Draft | None:
        """What makes as many drafts as any row has; in a graph, as each has room for."""
        widest = 0 if plan.drafts is None else plan.drafts.widest
        count = widest if size is None else size.drafts // size.decodes
        assert count >= widest
        return partial(self._head.draft, tables, count) if self._head and count else None


def filled(values: Ints | list[int], length: int, filler: int = 0) -> Ints:
    """Behind the values as many fillers as are lacking."""
    whole = np.full(length, filler, dtype=np.int64)
    whole[: len(values)] = values
    return whole
