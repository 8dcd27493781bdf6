"""Plans for kernels of libraries: prefill kernels that leave a state only where a segment ends, and
decode kernels that update states where they lie.

The engine ends chunks where a state is kept (`prefill_checkpoint_mode` break), so a checkpoint in
the middle of a segment is a mistake of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.slots import SlotReads, SlotWrites


@dataclass(frozen=True, slots=True)
class WholeSegments:
    """A step's prompts, each of which is a call of its own."""

    bounds: tuple[tuple[int, int], ...]  # [S]: each segment's first token, and the one past it
    reads: SlotReads  # [S]
    last: Tensor  # [writes]: which segment's last state goes
    writes: SlotWrites  # to these slots
    size: int  # as given: the kernel chunk, or a convolution's width

    @classmethod
    def of(cls, segments: PrefillSegments, size: int) -> WholeSegments:
        """Waits for the device once a step: the libraries' calls are shaped by lengths. Raises
        ValueError for a checkpoint in the middle of a segment."""
        device = segments.cu_seqlens.device
        cu_seqlens: list[int] = segments.cu_seqlens.tolist()
        bounds = tuple(zip(cu_seqlens, cu_seqlens[1:], strict=False))
        starts: list[int] = segments.start_position.tolist()
        places = list(enumerate(segments.write_slot.tolist()))
        for sequence, position, slot in segments.checkpoints():
            begin, end = bounds[sequence]
            if position != starts[sequence] + end - begin:
                raise ValueError(
                    f"A state is wanted after position {position} of a segment that ends at "
                    f"{starts[sequence] + end - begin}; these kernels leave one at its end only."
                )
            places.append((sequence, slot))
        last, writes = SlotWrites.some(places, device)
        reads = SlotReads.of(segments.read_slot.tolist(), device)
        return cls(bounds, reads, last, writes, size)

    def filled(self) -> Iterator[tuple[int, slice]]:
        """The segments that have tokens, by number, and their tokens."""
        for number, (begin, end) in enumerate(self.bounds):
            if end > begin:
                yield number, slice(begin, end)

    def store(self, states: Tensor, pool: Tensor) -> None:
        """The segments' last states [S, ...] into the slots [slots, ...]."""
        self.writes.scatter(pool, states.index_select(0, self.last))

    def clear_padding(self, out: Tensor) -> None:
        """Zeros for tokens past the last segment."""
        out[self.bounds[-1][1] :] = 0


@dataclass(frozen=True, slots=True)
class UpdatedSlots:
    """A step's decodes. `in_place`: the slots, int32, where each row updates the one that it reads;
    else None, and the states are copied, updated and written back."""

    in_place: Tensor | None
    reads: SlotReads
    writes: SlotWrites
    padded: Tensor | None  # rows that neither read nor write

    @classmethod
    def of(cls, slots: DecodeSlots) -> UpdatedSlots:
        """Waits for the device once a step."""
        read: list[int] = slots.read_slot.tolist()
        write: list[int] = slots.write_slot.tolist()
        device = slots.read_slot.device
        padded = [row for row, pair in enumerate(zip(read, write, strict=True)) if max(pair) <= 0]
        return cls(
            in_place=slots.read_slot.int() if read == write and min(read) > 0 else None,
            reads=SlotReads.of(read, device),
            writes=SlotWrites.of(write, device),
            padded=torch.tensor(padded, device=device) if padded else None,
        )

    def states(self, pool: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What a library updates, in a type that it takes, and the rows' places in it."""
        if self.in_place is not None and pool.dtype == dtype:
            return pool, self.in_place
        return self.reads.gather(pool).to(dtype), None

    def store(self, states: Tensor, pool: Tensor) -> None:
        """The updated states into the slots, unless they lie there."""
        if states is not pool:
            self.writes.scatter(pool, states)

    def outputs(self, y: Tensor, out: Tensor | None) -> Tensor:
        """Zeros for padded rows; in `out` if that is given."""
        if self.padded is not None:
            y.index_fill_(0, self.padded, 0)
        return y if out is None else out.copy_(y)
