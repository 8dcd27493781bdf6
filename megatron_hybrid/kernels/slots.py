"""Reading and writing rows of state tensors by slot.

Slot 0 and padding (-1) read as zeros without touching memory, so that NaN in a reused slot can't
leak through a multiplication by zero; writes to them are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.state_rounding.reference import rounded


def indices(values: list[int], device: torch.device) -> Tensor:
    """int64, as torch indexes with."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True)
class SlotReads:
    """Which slots N rows come from; the rows in `fresh` are zeros instead."""

    slots: Tensor  # [N] int64, 0 where fresh
    fresh: Tensor | None  # row numbers, None when no row is fresh
    all_fresh: bool

    @classmethod
    def of(cls, slots: list[int], device: torch.device) -> SlotReads:
        """Of the slots [N]; 0 or less: fresh."""
        fresh = [row for row, slot in enumerate(slots) if slot <= 0]
        return cls(
            slots=indices([max(slot, 0) for slot in slots], device),
            fresh=indices(fresh, device) if fresh else None,
            all_fresh=len(fresh) == len(slots),
        )

    def gather(self, state: Tensor) -> Tensor:
        """state [slots, ...] -> a copy [N, ...]."""
        if self.all_fresh:
            return state.new_zeros((self.slots.shape[0], *state.shape[1:]))
        rows = state.index_select(0, self.slots)
        if self.fresh is not None:
            rows.index_fill_(0, self.fresh, 0)
        return rows


@dataclass(frozen=True, slots=True)
class SlotWrites:
    """Where rows go. `rows` picks those that have a slot; None when all N have one."""

    slots: Tensor  # [M] int64, all positive
    rows: Tensor | None  # [M] int64

    @classmethod
    def of(cls, slots: list[int], device: torch.device) -> SlotWrites:
        """Of the slots [N]; 0 or less: goes nowhere."""
        kept = [row for row, slot in enumerate(slots) if slot > 0]
        rows = None if len(kept) == len(slots) else indices(kept, device)
        return cls(indices([slots[row] for row in kept], device), rows)

    @classmethod
    def some(cls, places: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, SlotWrites]:
        """Of (row, slot): the rows [M] whose slot is not 0 or less, and where these go."""
        kept = [(row, slot) for row, slot in places if slot > 0]
        rows = indices([row for row, _ in kept], device)
        return rows, cls.of([slot for _, slot in kept], device)

    def scatter(
        self, state: Tensor, values: Tensor, seed: int | None = None,
        positions: Tensor | None = None,
    ) -> None:  # fmt: skip
        """values [N, ...] into state [slots, ...], in the state's dtype; with a seed after
        stochastic rounding, of what is there after `positions` [N] tokens."""
        if seed is not None:
            assert positions is not None
            values = rounded(values, seed, positions)
        if self.rows is not None:
            values = values.index_select(0, self.rows)
        state.index_copy_(0, self.slots, values.to(state.dtype))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Reads and writes of one decode step, the same for every recurrent layer.

    `in_place` is (first slot, count) when each row reads and writes the same slot and the slots
    follow one another: the state is then updated where it lies, without a copy.
    """

    reads: SlotReads
    writes: SlotWrites
    in_place: tuple[int, int] | None


def plan_decode(slots: DecodeSlots) -> DecodePlan:
    """Once a step: what the recurrent layers' decode calls need."""
    read: list[int] = slots.read_slot.tolist()
    write: list[int] = slots.write_slot.tolist()
    device = slots.read_slot.device
    first = read[0]
    consecutive = first > 0 and read == list(range(first, first + len(read)))
    return DecodePlan(
        reads=SlotReads.of(read, device),
        writes=SlotWrites.of(write, device),
        in_place=(first, len(read)) if consecutive and read == write else None,
    )
