"""What Replays on a GPU know of a part of a step, on the device, and what they leave in rings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.launching import cdiv, launched

# Of `figures`, in their order. They differ from step to step, and so would their alignment: no
# compilation for each of those.
POINTERS = (
    "cu_ptr start_ptr unfolded_ptr read_ptr write_ptr ring_ptr cu_checkpoints_ptr position_ptr "
    "slot_ptr"
).split()


class ReplaySegments(NamedTuple):
    """The decodes of a step, or its prompts; S sequences."""

    cu_seqlens: Tensor  # [S + 1]
    start: Tensor  # [S] positions of the first own tokens
    unfolded: Tensor  # [S] tokens before them that states are without; of prompts not read
    read_slot: Tensor  # [S]
    write_slot: Tensor  # [S]
    ring: Tensor  # [S]
    cu_checkpoints: Tensor  # [S + 1]: those of a sequence, ascending, among
    checkpoint_position: Tensor  # [checkpoints]
    checkpoint_slot: Tensor  # [checkpoints]
    is_prompt: int  # all of whose tokens are certain; unfolded are those since the last chunk's end
    chunk: int
    sequence_of_token: Tensor | None  # [T] of prompts
    is_single: bool = False  # decodes of one token each, or none

    @classmethod
    def of(cls, part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int) -> ReplaySegments:
        """Nothing is read here: kernels do it on the device."""
        assert part.ring is not None
        if isinstance(part, PrefillSegments):
            return cls(
                part.cu_seqlens, part.start_position, part.start_position, part.read_slot,
                part.write_slot, part.ring, part.cu_checkpoints, part.checkpoint_position,
                part.checkpoint_slot, 1, chunk, part.sequence_of_token,
            )  # fmt: skip
        count = part.read_slot.shape[0]
        return cls(
            part.cu_seqlens, part.position, part.unfolded, part.read_slot, part.write_slot,
            part.ring, _numbers(count + 1, part.read_slot.device, part.read_slot.dtype),
            part.checkpoint_position, part.checkpoint_slot, 0, chunk, None,
            part.most_unfolded is not None,
        )  # fmt: skip

    @property
    def figures(self) -> tuple[Tensor, ...]:
        """For a kernel's launch: see POINTERS."""
        return self[:9]

    @property
    def sequences(self) -> int:
        """S"""
        return self.read_slot.shape[0]


@functools.cache
def _numbers(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """0, 1, 2, ...: kept, because graphs read them."""
    return torch.arange(count, device=device, dtype=dtype)


@triton.jit
def of_sequence(cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, CHUNK: tl.constexpr):
    """Of a sequence the row of its first own token; the positions of that one, of the end, of the
    first token that its state is without; and after how many tokens its last state is."""
    begin = tl.load(cu_ptr + sequence)
    count = tl.load(cu_ptr + sequence + 1) - begin
    start = tl.load(start_ptr + sequence)
    unfolded = tl.load(unfolded_ptr + sequence)
    unfolded = tl.where(is_prompt != 0, start % CHUNK, unfolded)
    certain = tl.where(is_prompt != 0, count, tl.minimum(count, 1))
    last = (start + certain) // CHUNK * CHUNK
    return begin.to(tl.int64), start, start + count, start - unfolded, last


@triton.jit
def checkpoint_at(position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i, count, first, last):
    """The i-th of the states that a sequence leaves, whose number is count + 1: checkpoints and,
    behind them, its own. After how many tokens, from `first` to `last`, and the slot; 0: nowhere.
    """
    is_own = i >= count
    position = tl.load(position_ptr + i, mask=i < count, other=0).to(tl.int32)
    slot = tl.load(slot_ptr + i, mask=i < count, other=0).to(tl.int64)
    is_passed = (position > first) & (position <= last)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    changes = (last > first) | (tl.load(read_ptr + sequence) != write)
    slot = tl.where(is_own, tl.where(changes, write, 0), tl.where(is_passed, slot, 0))
    position = tl.where(is_own, last, tl.where(is_passed, position, first))
    return position, slot


def keep(values: Sequence[Tensor], ring: Sequence[Tensor], plan: ReplaySegments) -> None:
    """What the last chunks of prompts have brought, up to four of [T, ...] (rows may be strided),
    into rings [rows, R, ...]. In a launch of its own: programs of a scan may still read a ring."""
    widths = [part[0].numel() for part in ring]
    block = 1024
    parts: list[object] = []
    for number in range(4):
        if number < len(ring):
            parts += [values[number], ring[number], values[number].stride(0), widths[number]]
        else:
            parts += [None, None, 0, 0]
    width = max(widths)
    _keep_kernel[(cdiv(width // ring[0].shape[1], block), plan.chunk, plan.sequences)](
        *plan.figures, *parts, plan.is_prompt,
        COUNT=len(ring), RING=ring[0].shape[1], CHUNK=plan.chunk, BLOCK=block, num_warps=4,
    )  # fmt: skip


@launched(do_not_specialize_on_alignment=POINTERS)
def _keep_kernel(
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr,
    a, ring_a, a_row, a_width, b, ring_b, b_row, b_width, c, ring_c, c_row, c_width,
    d, ring_d, d_row, d_width, is_prompt,
    COUNT: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a token of the last chunk some columns of each; widths are those of a ring [R, ...]."""
    sequence = tl.program_id(2)
    begin, start, end, _, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, CHUNK
    )
    position = last + tl.program_id(1)
    if (position >= start) & (position < end):
        row = begin + position - start
        place = tl.load(ring_ptr + sequence).to(tl.int64) * RING + position % RING
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        _copy(a, ring_a, row * a_row, place, column, a_width // RING)
        if COUNT > 1:
            _copy(b, ring_b, row * b_row, place, column, b_width // RING)
        if COUNT > 2:
            _copy(c, ring_c, row * c_row, place, column, c_width // RING)
        if COUNT > 3:
            _copy(d, ring_d, row * d_row, place, column, d_width // RING)


@triton.jit
def _copy(values, ring, row, place, column, width):
    mask = column < width
    tl.store(ring + place * width + column, tl.load(values + row + column, mask=mask), mask=mask)
