"""What adapters add, in Triton: two launches for a linear layer, however many adapters there are.

    shrink    partial[split, t] = x[t] A^T       of a share of the columns
    expand    y[t] += (sum of partial[:, t]) B^T

A program is of one tile of tokens and one slot, and ends at once where none of its tokens has that
slot: so an adapter's A and B are loaded once for all its tokens in a tile, be they one token of
each of several requests or a part of a prompt. The columns are shared out by their number alone,
and what is added up is added up in order: bits do not depend on who else is in the step.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.lora.protocol import AdapterWeights

_DEPTH = 128  # columns at once
_SHARE = 512  # columns of a program, at least
_MOST_SPLITS = 16
_FEWEST_TOKENS, _MOST_TOKENS = 16, 64  # of a tile
_MOST_WIDTH = 128  # of what a program makes of a token


def add(y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
    """As in Lora."""
    (tokens, columns), (count, rows, rank) = x.shape, weights.b.shape
    if not tokens:
        return
    low = weights.a.shape[1]
    share = share_of(columns)
    splits = cdiv(columns, share)
    tile = _FEWEST_TOKENS  # float32 is not added up alike in all tiles
    if x.dtype.itemsize == 2:
        tile = min(max(next_power_of_2(tokens), _FEWEST_TOKENS), _MOST_TOKENS)
    tiles = cdiv(tokens, tile)
    # Of few tokens each role has its programs, so that the device is filled; prompts are read once.
    span = low if tiles > 1 and low <= _MOST_WIDTH else rank
    partial = torch.empty(splits, tokens, low, dtype=torch.float32, device=x.device)
    _shrink_kernel[(splits, tiles * (low // span), count)](
        x, weights.a, slots, partial, tokens, columns, low, span, share, x.stride(0),
        tile, max(16, next_power_of_2(span)), _DEPTH, num_warps=4, **OPTIONS,
    )  # fmt: skip
    height = 64 if rows < 8192 else 128
    _expand_kernel[(cdiv(rows, height), tiles, count)](
        y, weights.b, weights.roles, slots, partial, tokens, rows, low, rank, y.stride(0),
        splits, tile, height, max(16, next_power_of_2(rank)), num_warps=4, **OPTIONS,
    )  # fmt: skip


def share_of(columns: int) -> int:
    """Columns that a program adds up."""
    return max(_SHARE, cdiv(cdiv(columns, _MOST_SPLITS), _DEPTH) * _DEPTH)


@launched(do_not_specialize=["tokens"])
def _shrink_kernel(
    x, a, slots, partial, tokens, columns, low, span, share, x_row,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """partial [splits, tokens, low], of tokens that have a slot; `span` of `low` a program."""
    spans = low // span
    t = tl.program_id(1) // spans * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) % spans * span
    own = tl.load(slots + t, mask=t < tokens, other=0) == tl.program_id(2) + 1
    wait_for_inputs()
    let_next_start()
    if tl.max(own.to(tl.int32), 0) > 0:
        w = tl.arange(0, WIDTH)
        inside = w < span
        below = tl.program_id(2).to(tl.int64) * low + first + w
        begin = tl.program_id(0) * share
        total = tl.zeros((TOKENS, WIDTH), tl.float32)
        for start in tl.range(begin, tl.minimum(begin + share, columns), DEPTH, num_stages=3):
            k = start + tl.arange(0, DEPTH)
            there = (k < columns)[None, :]
            inputs = x + t.to(tl.int64)[:, None] * x_row + k[None, :]
            values = tl.load(inputs, mask=own[:, None] & there, other=0.0)
            weights = a + below[:, None] * columns + k[None, :]
            numbers = tl.load(weights, mask=inside[:, None] & there, other=0.0)
            total = tl.dot(values, tl.trans(numbers), total, input_precision="ieee")
        place = (tl.program_id(0) * tokens + t).to(tl.int64)[:, None] * low + first + w[None, :]
        tl.store(partial + place, total, mask=own[:, None] & inside[None, :])


@launched(do_not_specialize=["tokens"])
def _expand_kernel(
    y, b, roles, slots, partial, tokens, rows, low, rank, y_row,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """y [tokens, rows] with what the second product gives, of tokens that have a slot."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    own = tl.load(slots + t, mask=t < tokens, other=0) == tl.program_id(2) + 1
    wait_for_inputs()
    let_next_start()
    if tl.max(own.to(tl.int32), 0) > 0:
        kind: tl.constexpr = b.dtype.element_ty
        r = tl.arange(0, RANK)
        row = tl.minimum(n, rows - 1)
        below = (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * rank
        weights = tl.load(b + below + r[None, :], mask=(r < rank)[None, :], other=0.0)
        role = tl.load(roles + row)
        mask = own[:, None] & (r < rank)[None, :]
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for one in range(tl.min(role, 0), tl.max(role, 0) + 1):
            sums = tl.zeros((TOKENS, RANK), tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * tokens + t).to(tl.int64)[:, None] * low + one * rank + r[None, :]
                sums += tl.load(partial + place, mask=mask, other=0.0)
            product = tl.dot(sums.to(kind), tl.trans(weights), input_precision="ieee")
            total = tl.where((role == one)[None, :], product, total)
        target = y + t.to(tl.int64)[:, None] * y_row + n[None, :]
        there = own[:, None] & (n < rows)[None, :]
        before = tl.load(target, mask=there, other=0.0)
        tl.store(target, (before.to(tl.float32) + total).to(before.dtype), mask=there)
