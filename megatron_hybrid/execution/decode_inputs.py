"""The decodes' part of a step's inputs: the figures that go to the device for them alone, and what
kernels are told with these. SingleDecodes are of one token each, DraftedDecodes of one and drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron_hybrid.execution.cuda_graphs import GraphSize
from megatron_hybrid.execution.figures import (
    DraftFigures,
    SingleFigures,
    StepFigures,
    filled,
)
from megatron_hybrid.execution.head_drafts import HeadDrafter
from megatron_hybrid.execution.plan import MOST_STOP_IDS, NO_DRAFT, StepPlan
from megatron_hybrid.execution.rows import RowTable
from megatron_hybrid.execution.runs import Draft, LastSteps, take_up
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots, Ints, PagedHost


class DecodeInputs(NamedTuple):
    """`take_up`, `longest_run`: of StepInputs and PagedSequences. `host`: the step's figures."""

    decode: DecodeSlots | DecodeRuns | None
    host: PagedHost
    take_up: Callable[[], None] | None = None
    longest_run: int = 0


class SingleDecodes:
    """`write_interval`: a row has fewer unfolded tokens than that. `as_runs`: kernels are given
    DecodeRuns, for which the caches have rings."""

    def __init__(self, rows: RowTable, write_interval: int, as_runs: bool) -> None:
        self._rows = rows
        self._as_runs = as_runs
        self._write_interval = write_interval

    def figures(self, plan: StepPlan, room: GraphSize) -> SingleFigures[Ints] | None:
        """None where kernels are given DecodeSlots."""
        if not self._as_runs:
            return None
        rows, decodes = self._rows, plan.decode_rows
        return SingleFigures(
            cu_seqlens=np.minimum(np.arange(room.decodes + 1), len(decodes)),
            position=filled(rows.position[decodes], room.decodes),
            unfolded=filled(rows.unfolded[decodes], room.decodes),
            nothing=np.zeros(room.decodes, dtype=np.int64),
        )

    def padding(self, decodes: int) -> SingleFigures[Ints] | None:
        """Of a step in which nobody decodes."""
        if not self._as_runs:
            return None
        zeros = np.zeros(decodes, dtype=np.int64)
        return SingleFigures(np.zeros(decodes + 1, dtype=np.int64), zeros, zeros, zeros)

    def write(self, own: SingleFigures[Ints], plan: StepPlan) -> None:
        """Overwrite the figures of a step with those of this one."""
        rows, decodes = self._rows, plan.decode_rows
        count = len(decodes)
        own.cu_seqlens[:count] = np.arange(count)
        own.cu_seqlens[count:] = count
        own.position[:count], own.position[count:] = rows.position[decodes], 0
        own.unfolded[:count], own.unfolded[count:] = rows.unfolded[decodes], 0

    def inputs(self, step: StepFigures[Tensor], host: PagedHost) -> DecodeInputs:
        """Of a step with the decodes' figures."""
        return DecodeInputs(self.on_device(step), host)

    def on_device(self, step: StepFigures[Tensor]) -> DecodeSlots | DecodeRuns | None:
        """What kernels are given; None: there are no decodes."""
        slots, own = (step.read_slot, step.write_slot), step.decodes
        if not len(step.decode_rows):
            return None
        if own is None:
            return DecodeSlots(*slots)
        assert isinstance(own, SingleFigures)
        return DecodeRuns(
            own.cu_seqlens, own.position, own.unfolded, *slots, step.decode_rows,
            own.nothing, own.nothing, most_unfolded=self._write_interval - 1,
        )  # fmt: skip


class DraftedDecodes:
    """`head`: where the model's own head makes the drafts."""

    def __init__(
        self, rows: RowTable, last_steps: LastSteps, head: HeadDrafter | None, block_size: int
    ) -> None:
        self._rows = rows
        self._last = last_steps
        self._head = head
        self._block_size = block_size

    @property
    def most_of_a_request(self) -> int:
        """Numbers in the tables of DraftFigures."""
        return self._last.window_width + MOST_STOP_IDS

    def figures(self, plan: StepPlan, room: GraphSize) -> DraftFigures[Ints]:
        """With zeros in the place of what only the device knows."""
        rows, drafts, last = plan.decode_rows, plan.drafts, self._last
        n, count = len(rows), room.decodes
        windows = np.full((count, last.window_width), NO_DRAFT, dtype=np.int64)
        stop_ids = np.full((count, MOST_STOP_IDS), NO_DRAFT, dtype=np.int64)
        lengths, window_start, position, slot, nothing = np.zeros((5, count), dtype=np.int64)
        lengths[:n] = 1
        if drafts is not None:
            lengths[:n] += drafts.num_drafts
            windows[:n, : drafts.windows.shape[1]] = drafts.windows
            window_start[:n] = drafts.window_start
            position[:n], slot[:n] = drafts.checkpoint_position, drafts.checkpoint_slot
            if drafts.stop_ids is not None:
                stop_ids[:n] = drafts.stop_ids
        sequence = np.repeat(np.arange(count), lengths)
        offset = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return DraftFigures(
            places=filled(last.places(rows), count, last.nobody),
            certain=filled(self._rows.position[rows], count),
            unfolded=filled(self._rows.unfolded[rows], count),
            sequence=filled(sequence, room.decode_tokens, -1),
            offset=filled(offset, room.decode_tokens),
            window_start=window_start,
            windows=windows,
            checkpoint_position=position,
            checkpoint_slot=slot,
            stop_ids=stop_ids,
            position_now=nothing,
            unfolded_now=nothing,
        )

    def inputs(
        self, step: StepFigures[Tensor], host: PagedHost, plan: StepPlan, size: GraphSize | None
    ) -> DecodeInputs:
        """Of a step with the decodes' figures. size: of the graph that computes it."""
        last, own, on_cpu = self._last, step.decodes, step.kv_length.device.type == "cpu"
        assert isinstance(own, DraftFigures)
        draft = self._draft(step, host, plan, size)
        put_in_place = partial(take_up, step, own, last, self._block_size, draft)
        decode = DecodeRuns(
            step.cu_seqlens[: len(own.places) + 1], own.position_now, own.unfolded_now,
            step.read_slot, step.write_slot, step.decode_rows,
            own.checkpoint_position, own.checkpoint_slot,
        )  # fmt: skip
        if on_cpu:  # whose kernels are planned with exact lengths
            put_in_place()
            host = host._replace(kv_length=step.kv_length.numpy())
        later = None if on_cpu and size is None else put_in_place
        return DecodeInputs(decode, host, later, 1 + last.longest)

    def _draft(
        self, step: StepFigures[Tensor], host: PagedHost, plan: StepPlan, size: GraphSize | None
    ) -> Draft | None:
        """What makes as many drafts as any row has; in a graph, as each has room for."""
        widest = 0 if plan.drafts is None else plan.drafts.widest
        count = widest if size is None else size.drafts // size.decodes
        assert count >= widest
        return partial(self._head.draft, step, host, count) if self._head and count else None
