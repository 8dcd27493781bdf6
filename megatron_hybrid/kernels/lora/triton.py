"""What adapters add, in Triton: two launches for a linear layer, however many adapters there are;
for wide layers there is triton_wide.py.

    shrink    partial[split, t] = x[t] A^T       of a share of the columns
    expand    y[t] += (sum of partial[:, t]) B^T

A program is of one tile of tokens and one slot, and ends at once where none of its tokens has that
slot: so an adapter's A and B are loaded once for all its tokens in a tile, be they one token of
each of several requests or a part of a prompt. The columns are shared out by their number alone,
and what is added up is added up in order: bits do not depend on who else is in the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts.pairs import Groups
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.lora.protocol import AdapterWeights
from megatron_hybrid.kernels.lora.triton_wide import multiply

__all__ = ["add", "add_to_pairs", "multiply", "share_of"]

_DEPTH = 256  # columns at once, or half of them where more would not fit
_SHARE = 512  # columns of a program, at least
_MOST_SPLITS = 16
_FEWEST_TOKENS, _MOST_TOKENS = 16, 64  # of a tile
_MOST_WIDTH = 128  # of what a program makes of a token


def add(y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
    """As in Lora."""
    tokens, low, rank = len(x), weights.a.shape[1], weights.rank
    if not tokens:
        return
    tile = _FEWEST_TOKENS  # float32 is not added up alike in all tiles
    if x.dtype.itemsize == 2:
        tile = min(max(next_power_of_2(tokens), _FEWEST_TOKENS), _MOST_TOKENS)
    tiles = cdiv(tokens, tile)
    # Of few tokens each role has its programs, so that the device is filled; prompts are read once.
    span = low if tiles > 1 and low <= _MOST_WIDTH else rank
    _launch(y, x, weights, slots, None, tile, tiles, span, 1, 1)


def add_to_pairs(
    y: Tensor,
    x: Tensor,
    weights: AdapterWeights,
    slots: Tensor,
    groups: Groups,
    rows: int,
    chosen: int,
    each: int,
) -> None:
    """`add` of experts, whose adapters are of as many copies of a layer: y [tokens * chosen, N] of
    pairs, grouped by expert in blocks of so many rows; x [pairs / each, K]; slots [tokens]."""
    _launch(y, x, weights, slots, groups, rows, groups.blocks.shape[1], weights.rank, chosen, each)


def _launch(
    y: Tensor,
    x: Tensor,
    weights: AdapterWeights,
    slots: Tensor,
    groups: Groups | None,
    tile: int,
    tiles: int,
    span: int,
    chosen: int,
    each: int,
) -> None:
    """`tiles` of `tile` rows of y, which come in their order or in that of groups."""
    (count, rows, rank), (_, low, columns) = weights.b.shape, weights.a.shape
    copies, order, blocks = 1, None, None
    if groups is not None:
        copies, order, blocks = weights.copies, groups.order, groups.blocks
    share = share_of(columns)
    splits, total = cdiv(columns, share), len(y)
    width = max(16, next_power_of_2(span))
    depth = _DEPTH if tile + width <= _MOST_TOKENS else _DEPTH // 2
    partial = torch.empty(splits, total, low, dtype=torch.float32, device=x.device)
    _shrink_kernel[(splits, tiles * (low // span), count // copies)](
        x, weights.a, slots, partial, order, blocks, tiles, total, columns, low, span, share,
        x.stride(0), copies, chosen, each, tile, width, depth,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    height = _height(rows)
    _expand_kernel[(cdiv(rows, height), tiles, count // copies)](
        y, weights.b, weights.roles, slots, partial, order, blocks, tiles, total, rows, low, rank,
        y.stride(0), copies, chosen, splits, tile, height, max(16, next_power_of_2(rank)),
        num_warps=4, **OPTIONS,
    )  # fmt: skip


def _height(rows: int) -> int:
    """Of what a program expands: each of them adds up all shares of the columns."""
    return 64 if rows < 8192 else 128


def share_of(columns: int) -> int:
    """Columns that a program adds up."""
    return max(_SHARE, cdiv(cdiv(columns, _MOST_SPLITS), _DEPTH) * _DEPTH)


@triton.jit
def _rows_of_tile(order, blocks, tiles, total, tile, TOKENS: tl.constexpr):
    """Numbers of a tile's rows, which of them there are, and their copy of the layer."""
    if blocks is None:
        t = tile * TOKENS + tl.arange(0, TOKENS)
        return t, t < total, tile * 0
    else:
        row = tl.load(blocks + tiles + tile) + tl.arange(0, TOKENS)
        there = row < tl.load(blocks + 2 * tiles + tile)
        return tl.load(order + row, mask=there, other=0), there, tl.load(blocks + tile)


@launched(do_not_specialize=["tiles", "total"])
def _shrink_kernel(
    x, a, slots, partial, order, blocks, tiles, total, columns, low, span, share, x_row, copies,
    chosen, each, TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """partial [splits, total, low], of rows that have a slot; `span` of `low` a program."""
    spans = low // span
    # Slots and groups are no results of the kernel before this one, which is the layer's product.
    tile = tl.program_id(1) // spans
    t, there, copy = _rows_of_tile(order, blocks, tiles, total, tile, TOKENS)
    slot = tl.program_id(2)
    own = there & (tl.load(slots + t // chosen, mask=there, other=0) == slot + 1)
    wait_for_inputs()
    let_next_start()
    if tl.max(own.to(tl.int32), 0) > 0:
        w = tl.arange(0, WIDTH)
        inside = w < span
        first = tl.program_id(1) % spans * span
        below = (slot * copies + copy).to(tl.int64) * low + first + w
        begin = tl.program_id(0) * share
        sums = tl.zeros((TOKENS, WIDTH), tl.float32)
        for start in tl.range(begin, tl.minimum(begin + share, columns), DEPTH, num_stages=3):
            k = start + tl.arange(0, DEPTH)
            within = (k < columns)[None, :]
            inputs = x + (t // each).to(tl.int64)[:, None] * x_row + k[None, :]
            values = tl.load(inputs, mask=own[:, None] & within, other=0.0)
            weights = a + below[:, None] * columns + k[None, :]
            numbers = tl.load(weights, mask=inside[:, None] & within, other=0.0)
            sums = tl.dot(values, tl.trans(numbers), sums, input_precision="ieee")
        row = tl.program_id(0).to(tl.int64) * total + t
        place = row[:, None] * low + first + w[None, :]
        tl.store(partial + place, sums, mask=own[:, None] & inside[None, :])


@launched(do_not_specialize=["tiles", "total"])
def _expand_kernel(
    y, b, roles, slots, partial, order, blocks, tiles, total, rows, low, rank, y_row, copies,
    chosen, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """y [total, rows] with what the second product gives, of rows that have a slot."""
    # The kernel before this one made `partial` alone.
    t, there, copy = _rows_of_tile(order, blocks, tiles, total, tl.program_id(1), TOKENS)
    slot = tl.program_id(2)
    own = there & (tl.load(slots + t // chosen, mask=there, other=0) == slot + 1)
    if tl.max(own.to(tl.int32), 0) == 0:
        wait_for_inputs()  # or the next kernel would not wait for those before
        let_next_start()
    else:
        kind: tl.constexpr = b.dtype.element_ty
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        r = tl.arange(0, RANK)
        row = tl.minimum(n, rows - 1)
        below = ((slot * copies + copy).to(tl.int64) * rows + row)[:, None] * rank
        weights = tl.load(b + below + r[None, :], mask=(r < rank)[None, :], other=0.0)
        role = tl.load(roles + row)
        target = y + t.to(tl.int64)[:, None] * y_row + n[None, :]
        mine = own[:, None] & (n < rows)[None, :]
        before = tl.load(target, mask=mine, other=0.0)
        wait_for_inputs()
        let_next_start()
        mask = own[:, None] & (r < rank)[None, :]
        added = tl.zeros((TOKENS, ROWS), tl.float32)
        for one in tl.range(tl.min(role, 0), tl.max(role, 0) + 1, num_stages=1):
            sums = tl.zeros((TOKENS, RANK), tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * total + t).to(tl.int64)[:, None] * low + one * rank + r[None, :]
                sums += tl.load(partial + place, mask=mask, other=0.0)
            product = tl.dot(sums.to(kind), tl.trans(weights), input_precision="ieee")
            added = tl.where((role == one)[None, :], product, added)
        tl.store(target, (before.to(tl.float32) + added).to(before.dtype), mask=mine)
