"""What Replays in Triton share whose programs hold some rows of a head's state and walk over a
sequence's chunks of TILE tokens: Mamba2's and the gated delta rule's."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.launching import next_power_of_2
from megatron_hybrid.kernels.replay_triton.segments import ReplaySegments

TILE = 16


class Tiling(NamedTuple):
    """How a program covers a head."""

    rows: int  # of the state
    num_warps: int
    num_stages: int = 1


def plan(part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int) -> ReplaySegments:
    """As in Replay; the chunk is TILE."""
    assert chunk == TILE, chunk
    return ReplaySegments.of(part, chunk, ring_length)


def tiling_of(rows: int, dtype: torch.dtype, is_single: bool) -> Tiling:
    """For heads of so many rows, inputs of this type, and decodes of one token each or others: by
    these alone."""
    if dtype == torch.float32:  # no tensor cores
        return Tiling(min(rows, 16), 4)
    return Tiling(min(rows & -rows, 64), 4, 1 if is_single else 3)  # a power of two divides them


def rows_of(state: Tensor, rows: int) -> TensorDescriptor:
    """So many rows of states [slots, heads, rows, columns] at a time, which come by TMA; zeros
    behind their columns, up to a power of two."""
    columns = state.shape[-1]
    every = state.view(-1, columns)
    return TensorDescriptor(every, [*every.shape], [columns, 1], [rows, next_power_of_2(columns)])


@triton.jit
def store_padding(y_ptr, cu_ptr, sequences, tokens, y_row, column):
    """Zeros in these columns of the rows behind all sequences."""
    for token in range(tl.load(cu_ptr + sequences), tokens):
        y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + column
        tl.store(y_ptrs, tl.zeros(column.shape, y_ptr.dtype.element_ty))
