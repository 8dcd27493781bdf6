"""The product of one row of inputs with a weight in 16 bits: what counts is how fast the weight
arrives.

A program has a few rows of the weight and goes through their columns; every thread multiplies and
adds what it loads, without tensor cores, and the next step's weights are on their way meanwhile.
Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import apply_activation
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2

# Of longer rows cuBLAS brings as many bytes a second.
_MOST_COLUMNS = 16384


class Tile(NamedTuple):
    """How a program covers a weight."""

    rows: int
    depth: int  # columns, a step


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is for such inputs, and faster than cuBLAS."""
    in_16_bits = x.dtype.itemsize == weight.dtype.itemsize == 2
    return in_16_bits and x.shape[0] == 1 and weight.shape[1] <= _MOST_COLUMNS


def choose_tile(rows: int, columns: int) -> Tile:
    """By what was fast on an H200, in a CUDA graph over the weights of many layers."""
    if rows < 1024:  # or few processors have anything to do
        return Tile(1, 2048)
    if rows > 8192:
        return Tile(2, 2048) if columns >= 2048 else Tile(4, 512)
    return Tile(2, 1024) if columns <= 4096 else Tile(4, 512)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """x W^T + bias: x [1, columns], weight [rows, columns] (rows may be strided) -> [1, rows].
    `activation`: of the result; `gated`: of its first half, which the other half is multiplied by:
    -> [1, rows / 2]. Either is what Activation.activate makes of the product."""
    rows, columns = weight.shape
    parts = 2 if gated else 1
    y = torch.empty(1, rows // parts, dtype=x.dtype, device=x.device)
    tile = choose_tile(rows, columns) if tile is None else tile
    depth = min(tile.depth, next_power_of_2(columns))
    each = max(tile.rows, parts)
    _one_row_kernel[(cdiv(rows, each),)](
        x.contiguous(), weight, bias, y, rows, columns, weight.stride(0),
        activation, parts, each, depth, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _one_row_kernel(
    x, weight, bias, y, rows, columns, weight_row,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight a program, of each of PARTS equal parts as many: the i-th row of one
    part next to those of the others."""
    each: tl.constexpr = ROWS // PARTS
    n = tl.program_id(0) * each + tl.arange(0, each)
    of_part = rows // PARTS
    place = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * each + place // PARTS, of_part - 1)
    row += place % PARTS * of_part
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    weights = weight + row.to(tl.int64)[:, None] * weight_row
    loaded = load_columns(weights, 0, columns, DEPTH)
    wait_for_inputs()
    let_next_start()
    total = add_products(total, loaded, weights, x, columns, DEPTH)
    value = tl.sum(total, axis=1)
    if bias is not None:
        value += tl.load(bias + row).to(tl.float32)
    kind: tl.constexpr = y.dtype.element_ty
    # Rounded where two kernels would round.
    if PARTS == 2:
        first, second = tl.split(tl.reshape(value.to(kind).to(tl.float32), (each, 2)))
        first = apply_activation(first, ACTIVATION).to(kind).to(tl.float32)
        value = first * second
    elif ACTIVATION != "none":
        value = apply_activation(value.to(kind).to(tl.float32), ACTIVATION)
    tl.store(y + n, value.to(kind), mask=n < of_part)


@triton.jit
def add_products(total, loaded, weights, x, columns, DEPTH: tl.constexpr):
    """total [ROWS, DEPTH] float32, whose rows' sums are the result, + the products of `columns`
    numbers from x on with those from `weights` [ROWS, 1] on, the first of which are `loaded`."""
    for start in range(0, columns, DEPTH):
        following = load_columns(weights, start + DEPTH, columns, DEPTH)
        k = start + tl.arange(0, DEPTH)
        inputs = tl.load(x + k, mask=k < columns, other=0.0).to(tl.float32)
        total += loaded.to(tl.float32) * inputs[None, :]
        loaded = following
    return total


@triton.jit
def load_columns(rows, start, columns, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] from column `start` on of rows that begin at `rows` [ROWS, 1] and have so many
    columns; zeros behind them."""
    k = start + tl.arange(0, DEPTH)[None, :]
    return tl.load(rows + k, mask=k < columns, other=0.0)
