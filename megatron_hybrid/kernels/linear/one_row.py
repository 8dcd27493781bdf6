"""The product of one row of inputs with a weight in 16 bits: what counts is how fast the weight
arrives.

A program has a few rows of the weight and goes through their columns; every thread multiplies and
adds what it loads, without tensor cores, and the next steps' weights are on their way meanwhile.
Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import apply_activation, limited
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2

# Of longer rows there would be too much code: all steps are written out.
_MOST_COLUMNS = 32768


class Tile(NamedTuple):
    """How a program covers a weight."""

    rows: int
    depth: int  # columns, a step
    steps: int  # whose weights are on their way at a time


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is for such inputs, and faster than cuBLAS."""
    in_16_bits = x.dtype.itemsize == weight.dtype.itemsize == 2
    return in_16_bits and x.shape[0] == 1 and weight.shape[1] <= _MOST_COLUMNS


def choose_tile(columns: int) -> Tile:
    """By what was fast on an H100, in a CUDA graph over the weights of many layers."""
    if columns >= 4096:
        return Tile(2, 1024, 2)
    return Tile(4, 256, 8 if columns > 2048 else 4)  # a warp has a row


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
    tile = choose_tile(columns) if tile is None else tile
    depth = min(tile.depth, next_power_of_2(columns))
    each = max(tile.rows, parts)
    _one_row_kernel[(cdiv(rows, each),)](
        x.contiguous(), weight, bias, y, rows, weight.stride(0),
        activation, parts, columns, each, depth, tile.steps, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _one_row_kernel(
    x, weight, bias, y, rows, weight_row,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight a program, of each of PARTS equal parts as many: the i-th row of one
    part next to those of the others."""
    each: tl.constexpr = ROWS // PARTS
    n = tl.program_id(0) * each + tl.arange(0, each)
    of_part = rows // PARTS
    place = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * each + place // PARTS, of_part - 1)
    row += place % PARTS * of_part
    weights = weight + row.to(tl.int64)[:, None] * weight_row
    same = x + tl.zeros((ROWS, 1), tl.int32)  # the inputs of every row, see add_products
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    loaded = _load_steps(weights, 0, COLUMNS, DEPTH, STEPS)
    wait_for_inputs()
    let_next_start()
    for begin in tl.static_range(0, COLUMNS, STEPS * DEPTH):
        following = _load_steps(weights, begin + STEPS * DEPTH, COLUMNS, DEPTH, STEPS)
        for i in tl.static_range(STEPS):
            if begin + i * DEPTH < COLUMNS:
                inputs = load_columns(same, begin + i * DEPTH, COLUMNS, DEPTH)
                total += loaded[i].to(tl.float32) * inputs.to(tl.float32)
        loaded = following
    value = tl.sum(total, axis=1)
    if bias is not None:
        value += tl.load(bias + row).to(tl.float32)
    kind: tl.constexpr = y.dtype.element_ty
    # Rounded where two kernels would round.
    if PARTS == 2:
        first, second = tl.split(tl.reshape(value.to(kind).to(tl.float32), (each, 2)))
        first = apply_activation(first, ACTIVATION).to(kind).to(tl.float32)
        value = first * limited(second, ACTIVATION)
    elif ACTIVATION != "none":
        value = apply_activation(value.to(kind).to(tl.float32), ACTIVATION)
    tl.store(y + n, value.to(kind), mask=n < of_part)


@triton.jit
def _load_steps(
    rows, begin: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """[ROWS, DEPTH] of so many steps from column `begin` on, or up to the last."""
    loaded = ()
    for i in tl.static_range(STEPS):
        if begin + i * DEPTH < COLUMNS:
            loaded = loaded + (load_columns(rows, begin + i * DEPTH, COLUMNS, DEPTH),)
    return loaded


@triton.jit
def add_products(total, loaded, weights, x, columns, DEPTH: tl.constexpr):
    """total [ROWS, DEPTH] float32, whose rows' sums are the result, + the products of `columns`
    numbers from x on with those from `weights` [ROWS, 1] on, the first of which are `loaded`."""
    same = x + tl.zeros((total.shape[0], 1), tl.int32)
    for start in range(0, columns, DEPTH):
        following = load_columns(weights, start + DEPTH, columns, DEPTH)
        # Loaded for every row, so that each thread loads what it multiplies: from thread to thread
        # they would go through shared memory, and all would wait.
        inputs = load_columns(same, start, columns, DEPTH)
        total += loaded.to(tl.float32) * inputs.to(tl.float32)
        loaded = following
    return total


@triton.jit
def load_columns(rows, start, columns, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] from column `start` on of rows that begin at `rows` [ROWS, 1] and have so many
    columns; zeros behind them."""
    k = start + tl.arange(0, DEPTH)[None, :]
    return tl.load(rows + k, mask=k < columns, other=0.0)
