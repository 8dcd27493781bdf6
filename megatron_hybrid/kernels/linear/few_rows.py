"""The product of a few rows of inputs with a weight in 16 bits: decodes of small batches, and of
one sequence with drafts. What counts is how fast the weight arrives, as for one_row, but here the
multiplications are tensor cores'.

A program has some rows of the weight, or a part of their columns, and all inputs; the weight is
the left side of its products, so that 16 inputs fill a tile:

                    columns, a step at a time
    rows of W  [ step 0 | step 1 | ... ]  x  inputs^T  ->  [rows, tokens] float32
                 on their way before the inputs are there

A weight of few rows is cut into parts of its columns, too; the last program of a tile that is done
adds up what all of them have. Sums are in float32 and in an order that only the weight's shape
decides: a token has the same bits beside any others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.activation.triton import apply_activation
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.products import counters, sum_of_splits

# Up to so many rows of inputs products are this kernel's. 1: none are, since nobody has measured it
# yet; LARGEST would be all that it can do.
MOST_ROWS = 1
LARGEST = 64
_WARPS = 4
_PROCESSORS = 132  # of an H200


class Tile(NamedTuple):
    """How a program covers a weight."""

    rows: int
    depth: int  # columns, a step
    stages: int  # one more than the steps whose weights are on their way
    splits: int = 1  # parts that the columns are cut into
    # The first steps' weights are asked for before the inputs are there. Later steps' inputs come
    # through registers then, one step ahead; otherwise like weights, as many steps ahead as these.
    weights_first: bool = True
    by_descriptor: bool = True  # weights come by TMA, if their rows begin at multiples of 16 bytes

    def __str__(self) -> str:
        ahead = "weights first" if self.weights_first else "wait first"
        way = "descriptor" if self.by_descriptor else "pointers"
        return f"{self.rows}x{self.depth}, {self.stages}, 1/{self.splits}, {ahead}, {way}"


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is for such inputs, and faster than cuBLAS. That it is was measured of
    none: MOST_ROWS says so."""
    return 2 <= x.shape[0] <= min(MOST_ROWS, LARGEST) and fits(x, weight)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether inputs and weight have types and places that come in pieces of 16 bytes."""
    in_16_bits = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    rows_apart = x.stride(0) % 8 == 0 and x.stride(1) == 1
    return in_16_bits and rows_apart and weight.shape[1] % 16 == 0 and _in_pieces(weight)


def choose_tile(rows: int, columns: int) -> Tile:
    """Of a weight. By its shape alone: a token's bits are the same among any number of others.
    All programs should be there at once: a few that begin when others have ended would leave the
    memory idle. A processor has memory for two of 64 rows, or for six of 32."""
    tiles = cdiv(rows, 64)
    if tiles > 2 * _PROCESSORS:
        return Tile(32, 128, 4)
    return Tile(64, 128, 5, splits=max(1, min(8, 2 * _PROCESSORS // tiles, columns // 512)))


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """x W^T + bias: x [tokens, columns], up to LARGEST tokens; weight [rows, columns]; rows of both
    may be strided -> [tokens, rows]. `activation`: of the result; `gated`: of its first half, which
    the other half is multiplied by: -> [tokens, rows / 2]. Either is what Activation.activate makes
    of the product."""
    (rows, columns), tokens = weight.shape, x.shape[0]
    if tokens > LARGEST:
        raise ValueError(f"x has {tokens} rows, must have at most {LARGEST}")
    parts = 2 if gated else 1
    y = torch.empty(tokens, rows // parts, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    tile = choose_tile(rows, columns) if tile is None else tile
    depth = min(tile.depth, max(16, next_power_of_2(columns)))
    splits = min(tile.splits, cdiv(columns, depth))  # each has a step
    by_descriptor = tile.by_descriptor and not gated and _in_pieces(weight)
    given = weight
    if by_descriptor:
        stride = [weight.stride(0), 1]
        given = TensorDescriptor(weight, [rows, columns], stride, [tile.rows, depth])
    sums = y if splits == 1 else torch.empty(splits, tokens, rows, device=x.device)
    _few_rows_kernel[(cdiv(rows // parts, tile.rows // parts), 1, splits)](
        x, given, bias, y, sums, counters(x.device), tokens, rows, columns, x.stride(0),
        weight.stride(0), activation, parts, max(16, next_power_of_2(tokens)), tile.rows, depth,
        tile.stages, splits, tile.weights_first, by_descriptor, num_warps=_WARPS, **OPTIONS,
    )  # fmt: skip
    return y


def _in_pieces(weight: Tensor) -> bool:
    """Whether its rows begin at multiples of 16 bytes, as tensor descriptors have it."""
    return weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


@launched(do_not_specialize=["tokens"])
def _few_rows_kernel(
    x, weight, bias, y, partial, counter, tokens, rows, columns, x_row, weight_row,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight a program, of each of PARTS equal parts as many: the i-th row of one
    part next to those of the others. weight: a tensor descriptor (of one part), or a pointer."""
    each: tl.constexpr = ROWS // PARTS
    of_part = rows // PARTS
    place = tl.arange(0, ROWS)
    in_part = tl.program_id(0) * each + place // PARTS
    n = in_part + place % PARTS * of_part
    row = tl.minimum(in_part, of_part - 1) + place % PARTS * of_part
    m = tl.arange(0, TOKENS)
    inputs = x + m.to(tl.int64)[:, None] * x_row
    if not BY_DESCRIPTOR:
        weights = weight + row.to(tl.int64)[:, None] * weight_row
    steps = tl.cdiv(columns, DEPTH)
    begin = tl.program_id(2) * steps // SPLITS
    end = (tl.program_id(2) + 1) * steps // SPLITS
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    values = tl.zeros((TOKENS, DEPTH), x.dtype.element_ty)
    if not WEIGHTS_FIRST:
        wait_for_inputs()
        let_next_start()
    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * DEPTH + tl.arange(0, DEPTH)
        if BY_DESCRIPTOR:
            loaded = weight.load([tl.program_id(0) * ROWS, step * DEPTH])
        else:
            loaded = tl.load(weights + k[None, :], mask=(k < columns)[None, :], other=0.0)
        if WEIGHTS_FIRST:
            # In here, because before the first step the compiler puts the loads of the first
            # weights. It does so with those that a product of the same step takes, which the
            # inputs' therefore may not be.
            if step == begin:
                wait_for_inputs()
                let_next_start()
                values = _load_inputs(inputs, m < tokens, k, columns)
            valid = m < tl.where(step + 1 < end, tokens, 0)
            following = _load_inputs(inputs, valid, k + DEPTH, columns)
            total = tl.dot(loaded, values.T, total)
            values = following
        else:
            values = _load_inputs(inputs, m < tokens, k, columns)
            total = tl.dot(loaded, values.T, total)
    total = total.T
    mask = (m < tokens)[:, None] & (in_part < of_part)[None, :]
    if SPLITS > 1:
        of_sums = m[:, None].to(tl.int64) * rows + n[None, :]
        last, total = sum_of_splits(total, partial, counter, of_sums, mask, tokens, rows, SPLITS)
        if not last:
            return
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    kind: tl.constexpr = y.dtype.element_ty
    # Rounded where two kernels would round.
    if PARTS == 2:
        pairs = tl.reshape(total.to(kind).to(tl.float32), (TOKENS, each, 2))
        first, second = tl.split(pairs)
        total = apply_activation(first, ACTIVATION).to(kind).to(tl.float32) * second
    elif ACTIVATION != "none":
        total = apply_activation(total.to(kind).to(tl.float32), ACTIVATION)
    n = tl.program_id(0) * each + tl.arange(0, each)
    mask = (m < tokens)[:, None] & (n < of_part)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * of_part + n[None, :], total.to(kind), mask=mask)


@triton.jit
def _load_inputs(inputs, valid, k, columns):
    """Columns k [DEPTH] of the tokens whose rows begin at `inputs` [TOKENS, 1]; zeros for those
    that are not valid [TOKENS] and behind the columns."""
    mask = valid[:, None] & (k < columns)[None, :]
    return tl.load(inputs + k[None, :], mask=mask, other=0.0)
