"""The product of one row of inputs in 8 bits with a weight in 8 bits: as in one_row.py, what counts
is how fast the weight arrives, and threads multiply and add what they load.

A thread loads 16 columns at a time, of one row or of several, for which it loads and converts its
inputs once. A program's threads lie side by side in one row, or in several shorter ones:

    columns of a step                 | 16 | 16 | 16 | ...
    one row of 2048 columns after     thread 0, 1, ...                                127
    the other
    four rows of 512, then the        thread 0, 1, ...   31
    next four                         thread 32, 33, ... 63
                                      ...

Products of float8 are exact in float32, the sums of 16 products of int8 in int32. All other sums
are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.protocols import QuantizedRows

# Of longer rows there would be too much code: all steps are written out.
_MOST_COLUMNS = 32768
_WARPS = 4
_CHUNK = 16  # columns that a thread loads at a time
_PROGRAM = 32 * _WARPS * _CHUNK  # that a program's threads do


class Tile(NamedTuple):
    """How a program covers a weight."""

    rows: int
    depth: int  # columns, a step; a program loads 2048 / depth rows at a time
    steps: int  # whose weights are on their way at a time

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}, {self.steps}"


def can_multiply(x: QuantizedRows, weight: QuantizedWeight) -> bool:
    """Whether this kernel is for such inputs, which were rounded for the weight's format; columns
    that share a scale are a multiple of 16."""
    return x.shape[0] == 1 and weight.shape[1] <= _MOST_COLUMNS


def choose_tile(columns: int) -> Tile:
    """Of a weight, by what was fast on an H100 (docs/performance.md). Sums are in an order that the
    columns alone decide."""
    if columns >= 4096:
        return Tile(2, 2048, 2 if columns >= 8192 else 1)
    if columns > 2048:
        return Tile(4, 512, 8)
    return Tile(4, 1024, 1)


def multiply(
    x: QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """x W^T + bias: x [1, columns], weight [rows, columns] (rows may be strided) -> [1, rows]."""
    (rows, columns), format = weight.shape, weight.format
    y = torch.empty(1, rows, dtype=x.dtype, device=x.values.device)
    tile = choose_tile(columns) if tile is None else tile
    depth = min(tile.depth, max(_CHUNK, next_power_of_2(columns)))
    beside = _PROGRAM // depth
    below = cdiv(tile.rows, beside)
    _one_row_bytes_kernel[(cdiv(rows, beside * below),)](
        x.values, x.scale, weight.values, weight.scale, bias, y, rows, weight.values.stride(0),
        weight.scale.stride(0), x.scale.stride(1), format.columns or 0, format.rows,
        format.activations == "group", columns, beside, below, depth, tile.steps,
        num_warps=_WARPS, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _one_row_bytes_kernel(
    x, x_scale, weight, scale, bias, y, rows, weight_row, scale_row, x_scale_group,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BY_GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    BESIDE: tl.constexpr, BELOW: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """BESIDE times BELOW rows a program: a thread has one of every BESIDE. GROUP: columns that
    share a scale (0: all), BLOCK_ROWS: rows; BY_GROUP: inputs have one for each group."""
    n = tl.program_id(0) * (BESIDE * BELOW)
    n += tl.arange(0, BESIDE)[:, None] + tl.arange(0, BELOW)[None, :] * BESIDE
    row = tl.minimum(n, rows - 1).to(tl.int64)
    weights = weight + row[:, :, None] * weight_row
    scales = scale + row // BLOCK_ROWS * scale_row
    # Each thread loads the inputs that it multiplies: none go from thread to thread.
    same = tl.zeros((BESIDE, 1, 1), tl.int32)
    kind: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BESIDE, BELOW, DEPTH // 16), tl.float32)
    loaded = _load_steps(weights, scales, 0, COLUMNS, GROUP, DEPTH, STEPS)
    # Asked for before they are needed, like the weights.
    factor = 1.0 if GROUP else tl.load(scales)
    added = 0.0 if bias is None else tl.load(bias + row).to(tl.float32)
    wait_for_inputs()
    let_next_start()
    if not BY_GROUP:
        factor *= tl.load(x_scale)
    for begin in tl.static_range(0, COLUMNS, STEPS * DEPTH):
        following = _load_steps(
            weights, scales, begin + STEPS * DEPTH, COLUMNS, GROUP, DEPTH, STEPS
        )
        for i in tl.static_range(STEPS):
            if begin + i * DEPTH < COLUMNS:
                inputs = _load_columns(x + same, begin + i * DEPTH, COLUMNS, DEPTH)
                sums = _chunk_sums(loaded[2 * i], inputs, kind).to(tl.float32)
                if GROUP:
                    sums *= loaded[2 * i + 1]
                if BY_GROUP:
                    of_inputs = x_scale + tl.zeros((BESIDE, 1), tl.int32)
                    sums *= _load_scales(
                        of_inputs, x_scale_group, begin + i * DEPTH, COLUMNS, GROUP, DEPTH
                    )
                total += sums
        loaded = following
    value = tl.sum(total, axis=2) * factor + added
    tl.store(y + n, value.to(y.dtype.element_ty), mask=n < rows)


@triton.jit
def _load_steps(
    weights, scales, begin: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of so many steps from column `begin` on, or up to the last: codes [BESIDE, BELOW, DEPTH] of
    the first, its chunks' scales (0 if there are none), those of the second, ..."""
    loaded = ()
    for i in tl.static_range(STEPS):
        if begin + i * DEPTH < COLUMNS:
            codes = _load_columns(weights, begin + i * DEPTH, COLUMNS, DEPTH)
            if GROUP:
                factor = _load_scales(scales, 1, begin + i * DEPTH, COLUMNS, GROUP, DEPTH)
                loaded = loaded + (codes, factor)
            else:
                loaded = loaded + (codes, 0.0)
    return loaded


@triton.jit
def _load_columns(rows, start: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """[.., .., DEPTH] from column `start` on of rows that begin at `rows` [.., .., 1]; zeros behind
    the last column."""
    k = start + tl.arange(0, DEPTH)[None, None, :]
    return tl.load(rows + k, mask=k < COLUMNS, other=0.0)


@triton.jit
def _load_scales(
    scales, stride, start: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """[.., .., DEPTH / 16]: for each 16 columns from `start` on the scale of their group, of which
    the first are at `scales` [.., ..], and others so far behind them."""
    k = start + tl.arange(0, DEPTH // 16)[:, None, None] * 16
    factor = tl.load(scales[None, :, :] + k // GROUP * stride, mask=k < COLUMNS, other=0.0)
    # Of numbers that are not side by side Triton gives threads the first dimension's first: in this
    # order each has its own chunks' scales.
    return tl.permute(factor, (1, 2, 0))


@triton.jit
def _chunk_sums(codes, inputs, KIND: tl.constexpr):
    """codes [BESIDE, BELOW, DEPTH] times inputs [BESIDE, 1, DEPTH], summed up for each 16 columns:
    [BESIDE, BELOW, DEPTH / 16]."""
    beside: tl.constexpr = codes.shape[0]
    below: tl.constexpr = codes.shape[1]
    chunks: tl.constexpr = codes.shape[2] // 16
    codes = tl.reshape(codes, (beside, below, chunks, 16)).to(KIND)
    inputs = tl.reshape(inputs, (beside, 1, chunks, 16)).to(KIND)
    return tl.sum(codes * inputs, axis=3)
