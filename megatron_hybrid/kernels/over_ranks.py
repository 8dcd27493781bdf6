"""Kernels that read other ranks' GPUs: how they take turns, and the gathering of columns."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 8192  # columns that one program copies


class SharedRows(Protocol):
    """Memory of this rank that the other ranks' GPUs read and write, and theirs.

    Kernels take turns between two halves of `data`: what a row's program writes in its turn is read
    by the others until they begin their next turn, which is before this one begins its next but
    one. Different kernels may use the same rows, if all ranks launch them in the same order.
    """

    @property
    def rank(self) -> int:
        """Which of the ranks this one is."""

    @property
    def size(self) -> int:
        """Ranks."""

    @property
    def rows(self) -> int:
        """That each half of `data` has room for."""

    @property
    def data(self) -> Tensor:
        """[ranks] int64: addresses of the ranks' [2, rows, width]."""

    @property
    def flags(self) -> Tensor:
        """[ranks] int64: addresses of the ranks' [rows, ranks] int32: turns begun."""

    @property
    def turns(self) -> Tensor:
        """[rows] int32: this rank's turns begun."""


def num_pieces(x: Tensor) -> int:
    """Rows of PIECE columns that `gather_columns` needs."""
    return x.shape[0] * triton.cdiv(x.shape[1], PIECE)


def gather_columns(x: Tensor, shared: SharedRows) -> Tensor:
    """[rows, columns] of every rank -> [rows, ranks * columns], in the order of the ranks.

    Rows may be strided. `shared` has rows of PIECE columns, at least `num_pieces(x)`.
    """
    rows, columns = x.shape
    out = torch.empty((rows, shared.size * columns), dtype=x.dtype, device=x.device)
    if x.numel():
        _gather_columns_kernel[(rows, triton.cdiv(columns, PIECE))](
            x, out, shared.data, shared.flags, shared.turns, columns, x.stride(0), shared.rows,
            RANK=shared.rank, RANKS=shared.size, BLOCK=PIECE, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _gather_columns_kernel(
    x, out, data, flags, turns, columns, x_row, rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    piece = row * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    target = out + row * RANKS * columns + column
    turn = tl.load(turns + piece) + 1
    place = ((turn & 1) * rows + piece) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + column, mask=mask, other=0)
    tl.store(address(data + RANK, x) + place, values, mask=mask)
    begin_turn(flags, turns, piece, turn, RANK, RANKS)
    tl.store(target + RANK * columns, values, mask=mask)
    wait_for_turns(flags, piece, turn, RANK, RANKS)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = load_theirs(address(data + peer, x) + place, mask)
            tl.store(target + peer * columns, theirs, mask=mask)


@triton.jit
def address(where, like):
    """The pointer that is kept there, to elements `like` another one's. Said to be aligned: values
    would travel from GPU to GPU one by one otherwise."""
    return tl.multiple_of(tl.load(where).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def begin_turn(flags, turns, row, turn, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell the others that this rank's row is written."""
    tl.debug_barrier()  # the whole of it, by all threads
    tl.store(turns + row, turn)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_add(theirs + row * RANKS + RANK, 1, sem="release", scope="sys")


@triton.jit
def wait_for_turns(flags, row, turn, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Until the others' rows are written."""
    told = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + row * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:  # turns may wrap around: their difference does not
            while tl.atomic_add(told + peer, 0, sem="acquire", scope="sys") - turn < 0:
                pass
    tl.debug_barrier()


@triton.jit
def load_theirs(where, mask):
    """Past the first cache, which knows nothing of other GPUs' writes."""
    return tl.load(where, mask=mask, other=0, cache_modifier=".cg")
