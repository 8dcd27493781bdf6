"""Products with quantised weights in Triton, and by cuBLASLt where that is faster: many rows of
inputs in 8 bits. The meaning and the roundings are reference.py's.

Few rows: what counts is how fast weights arrive. A program has some rows of the weight, or a part
of their columns, and all inputs; the weight is the left side of its products, so that 16 inputs
fill a tile, and both sides come through tensor descriptors (TMA). Weights of 4 bits become 16-bit
numbers in registers. Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear import few_rows, fp4_few, one_row, one_row_bytes, reference
from megatron_hybrid.kernels.linear.codes import Kept
from megatron_hybrid.kernels.linear.few import can_chunk, multiply_row
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight, WeightFormat
from megatron_hybrid.kernels.linear.products import (
    accumulate,
    counters,
    descriptor,
    finish,
    step_depth,
    sum_of_splits,
    written_out,
)
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.linear.rounding import empty_rows, rounding, store_rounded
from megatron_hybrid.kernels.protocols import Inputs, QuantizedRows


class Tile(NamedTuple):
    """How a program covers a product."""

    tokens: int  # of the inputs
    rows: int  # of the weight
    depth: int  # columns, a step
    warps: int
    stages: int
    splits: int = 1  # parts that the columns are cut into


# Up to so many tokens products with inputs in 16 bits are ours; for more, weights are written out
# in 16 bits first.
FEW_TOKENS = 64


def choose_tile(tokens: int, rows: int, columns: int, format: WeightFormat) -> Tile:
    """Of products in 8 bits, by what was fast on an H200 (tools/benchmark_kernels.py)."""
    by_group = format.columns is not None
    if tokens <= 64:
        across = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
        if rows > 8192:
            return Tile(across, 64, 128, 4, 4)
        splits = _splits(cdiv(rows, 64), 4 if tokens <= 16 or by_group else 2, columns)
        return Tile(across, 64, 128 if by_group else 256, 4, 6 if across == 64 else 4, splits)
    if rows > 8192:
        return Tile(128, 64, 128, 4, 3)
    splits = 2 if tokens > 128 or columns <= 8192 else 4
    return Tile(128, 64, 128, 4, 4, _splits(cdiv(rows, 64), splits, columns))


def _splits(tiles: int, most: int, columns: int) -> int:
    """So many that there are about twice as many programs as processors."""
    return max(1, min(most, 256 // tiles, columns // 1024))


def quantize_rows(x: Tensor, format: WeightFormat, input_scale: Tensor | None) -> QuantizedRows:
    """As in Linear."""
    tokens, columns = x.shape
    if format.columns is not None and format.columns & (format.columns - 1):
        return reference.quantize_rows(x, format, input_scale)  # of blocks unlike all that are used
    out = empty_rows(tokens, columns, format, input_scale, x)
    kind = rounding(format)
    # A row with one scale is one program's; groups are independent.
    block = next_power_of_2(columns)
    if not kind.whole_row:
        block = min(block, 1024)
    block = max(block, kind.group)
    if tokens:
        _quantize_kernel[(tokens, cdiv(columns, block))](
            x, out.values, out.scale, columns, x.stride(0), *out.scale.stride(),
            kind, BLOCK=block, num_warps=min(max(block // 512, 1), 32), **OPTIONS,
        )  # fmt: skip
    return out


def rows_for(x: Inputs, weight: QuantizedWeight) -> tuple[Tensor, Tensor | None, int, int]:
    """Inputs as the format takes them, for kernels: their scales or None, and how far these are
    from row to row and from group to group."""
    format = weight.format
    if format.activations == "none":
        return plain_rows(x).contiguous(), None, 0, 0
    if isinstance(x, Tensor) or not _fits(x, weight):
        x = quantize_rows(plain_rows(x), format, weight.input_scale)
    row, group = x.scale.stride()
    return x.values, x.scale, row, group


def _fits(x: QuantizedRows, weight: QuantizedWeight) -> bool:
    """Whether rows were rounded for this format: a constant scale is each layer's own."""
    format = weight.format
    groups = 1
    if format.activations == "group" and format.columns is not None:
        groups = -(-weight.shape[-1] // format.columns)
    alike = x.values.dtype == weight.values.dtype and x.scale.shape[1] == groups
    return alike and format.activations != "tensor"


def weights_changed() -> None:
    """Nothing is kept of weights."""


def multiply(x: Inputs, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """As in Linear."""
    if isinstance(weight, Tensor):
        x = plain_rows(x)
        if one_row.can_multiply(x, weight):
            return one_row.multiply(x, weight, bias)
        if few_rows.can_multiply(x, weight):
            return few_rows.multiply(x, weight, bias)
        return F.linear(x, weight, bias)
    format = weight.format
    (rows, columns), tokens = weight.shape, x.shape[0]
    if format.activations == "none":
        x = plain_rows(x)
        if fp4_few.can_multiply(x, weight, bias):
            return fp4_few.multiply(x, weight)
        if tokens == 1 and can_chunk(weight):
            return multiply_row(x, weight, bias)
        if tokens <= FEW_TOKENS and columns * format.bits % 128 == 0:  # of tensor descriptors
            return multiply_plain_inputs(x, weight, bias)
        return F.linear(x, written_out(weight, x.dtype), bias)
    if isinstance(x, Tensor):
        x = quantize_rows(x, format, weight.input_scale)
    block = format.columns or 32
    if columns % 16 or block < 32 or block & (block - 1):
        # Tensor descriptors have rows of 16 bytes; nothing that a model has is so narrow.
        return reference.multiply(x, weight, bias)
    if one_row_bytes.can_multiply(x, weight):
        return one_row_bytes.multiply(x, weight, bias)
    if format.numbers == "float8_e4m3fn" and rows % 16 == 0:
        if format.columns is None and (tokens > 256 or (tokens > 128 and rows > 8192)):
            return _scaled_mm_by_row(x, weight, bias)
        if (format.rows, format.columns) == (128, 128) and tokens > 64 and columns % 128 == 0:
            return _scaled_mm_by_block(x, weight, bias)
    return multiply_bytes(x, weight, bias)


def multiply_activated(
    x: Inputs, weight: Weight, bias: Tensor | None, activation: str, gated: bool
) -> Tensor | None:
    """As in Linear."""
    if isinstance(weight, Tensor):
        x = plain_rows(x)
        if one_row.can_multiply(x, weight):
            return one_row.multiply(x, weight, bias, activation=activation, gated=gated)
        if few_rows.can_multiply(x, weight):
            return few_rows.multiply(x, weight, bias, activation=activation, gated=gated)
    return None


def _scaled_mm_by_row(x: QuantizedRows, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    y = torch._scaled_mm(
        x.values, weight.values.t(), x.scale.contiguous(), weight.scale.t(), out_dtype=x.dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return y if bias is None else y.add_(bias)


def _scaled_mm_by_block(x: QuantizedRows, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    scales = weight.scale
    if padding := -scales.shape[1] % 4:  # which cuBLASLt reads
        scales = F.pad(scales, (0, padding))
    tokens, values, mine = x.shape[0], x.values, x.scale
    padded = -(-tokens // 4) * 4  # it takes no other numbers of rows
    if mine.stride() == (1, padded):  # the memory is there: see empty_rows
        values = values.as_strided((padded, values.shape[1]), (values.shape[1], 1))
        mine = mine.as_strided((padded, mine.shape[1]), (1, padded))
    else:
        below = (0, 0, 0, padded - tokens)
        values = F.pad(values.view(torch.uint8), below).view(values.dtype)
        mine = F.pad(mine, below).t().contiguous().t()
    y = F.scaled_mm(
        values, weight.values.t(), mine, F.ScalingType.BlockWise1x128, scales.t(),
        F.ScalingType.BlockWise128x128, output_dtype=x.dtype,
    )  # fmt: skip
    return y[:tokens] if bias is None else y[:tokens].add_(bias)


def _parts(y: Tensor, tile: Tile) -> Tensor:
    """Memory for what the parts of the columns give; unused where there is one."""
    return torch.empty(tile.splits, *y.shape, device=y.device) if tile.splits > 1 else y


def multiply_bytes(
    x: QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """By our own kernel, of inputs and weights in 8 bits."""
    format, (rows, columns), tokens = weight.format, weight.shape, x.shape[0]
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.values.device)
    if not tokens:
        return y
    tile = choose_tile(tokens, rows, columns, format) if tile is None else tile
    group, depth = format.columns or 0, step_depth(format, tile.depth)
    _bytes_kernel[(cdiv(rows, tile.rows), cdiv(tokens, tile.tokens), tile.splits)](
        TensorDescriptor(x.values, [tokens, columns], [columns, 1], [tile.tokens, depth]),
        descriptor(weight, tile.rows, depth),
        x.scale, weight.scale, bias, y, _parts(y, tile), counters(y.device),
        tokens, rows, columns, *x.scale.stride(), weight.scale.stride(0),
        group, format.rows, format.activations == "group",
        tile.tokens, tile.rows, depth, tile.stages, tile.splits, tile.tokens <= 64,
        num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    return y


def multiply_plain_inputs(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """By our own kernel, of inputs in 16 or 32 bits."""
    (rows, columns), tokens = weight.shape, len(x)
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    if tile is None:
        across = max(16, next_power_of_2(min(tokens, 64)))
        splits = _splits(cdiv(rows, 64), 4, columns)
        tile = Tile(across, 64, 128 if x.dtype.itemsize == 2 else 64, 4, 4, splits)
    grid = cdiv(rows, tile.rows), cdiv(tokens, tile.tokens), tile.splits
    _plain_inputs_kernel[grid](
        x, descriptor(weight, tile.rows, tile.depth), weight.scale, weight.zero, weight.row_scale,
        bias, y, _parts(y, tile), counters(y.device),
        tokens, rows, columns, x.stride(0), weight.scale.stride(0), Kept.of(weight, x),
        tile.tokens, tile.rows, tile.depth, columns % tile.depth == 0, tile.stages, tile.splits,
        num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _quantize_kernel(
    x, values, scale, columns, x_row, scale_row, scale_group, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_row + column, mask=column < columns, other=0).to(tl.float32)
    store_rounded(
        numbers, values + row * columns, scale + row * scale_row, scale_group, first, columns,
        KIND, BLOCK,
    )  # fmt: skip


@launched(do_not_specialize=["tokens"])
def _bytes_kernel(
    x, weight, x_scale, scale, bias, y, partial, counter, tokens, rows, columns,
    x_scale_row, x_scale_group, scale_row,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BY_GROUP: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """x, weight: tensor descriptors. GROUP: columns that share a scale (0: all); BY_GROUP: inputs
    have one for each of them. WEIGHT_FIRST: as the left side of the products."""
    first_row = tl.program_id(0) * ROWS
    first_token = tl.program_id(1) * TOKENS
    split = tl.program_id(2)
    n = first_row + tl.arange(0, ROWS)
    m = first_token + tl.arange(0, TOKENS)
    row = tl.minimum(n, rows - 1)
    token = tl.minimum(m, tokens - 1)
    steps = tl.cdiv(columns, DEPTH)
    each = tl.cdiv(steps, SPLITS)
    wait_for_inputs()
    let_next_start()
    kind: tl.constexpr = tl.int32 if weight.dtype == tl.int8 else tl.float32
    if WEIGHT_FIRST:
        total = tl.zeros((ROWS, TOKENS), tl.float32)
    else:
        total = tl.zeros((TOKENS, ROWS), tl.float32)
    for step in tl.range(split * each, tl.minimum(split * each + each, steps), num_stages=STAGES):
        w = weight.load([first_row, step * DEPTH])
        a = x.load([first_token, step * DEPTH])
        # Added up outside of the product: inside, sums of 8-bit products have 14 bits.
        if WEIGHT_FIRST:
            part = tl.dot(w, a.T, out_dtype=kind).to(tl.float32)
        else:
            part = tl.dot(a, w.T, out_dtype=kind).to(tl.float32)
        if GROUP:
            group = step * DEPTH // GROUP
            factor = tl.load(scale + row // BLOCK_ROWS * scale_row + group)
            part *= factor[:, None] if WEIGHT_FIRST else factor[None, :]
            if BY_GROUP:
                factor = tl.load(x_scale + token * x_scale_row + group * x_scale_group)
                part *= factor[None, :] if WEIGHT_FIRST else factor[:, None]
        total += part
    if WEIGHT_FIRST:
        total = total.T
    mask = (m < tokens)[:, None] & (n < rows)[None, :]
    place = m[:, None].to(tl.int64) * rows + n[None, :]
    if SPLITS > 1:
        last, total = sum_of_splits(total, partial, counter, place, mask, tokens, rows, SPLITS)
        if not last:
            return
    if not GROUP:
        total *= tl.load(scale + row * scale_row)[None, :]
    if not BY_GROUP:
        total *= tl.load(x_scale + token * x_scale_row)[:, None]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=mask)


@launched(do_not_specialize=["tokens"])
def _plain_inputs_kernel(
    x, weight, scale, zero, row_scale, bias, y, partial, counter, tokens, rows, columns, x_row,
    scale_row, KEPT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """weight: a tensor descriptor."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.minimum(n, rows - 1)
    token = tl.minimum(m, tokens - 1).to(tl.int64)
    each = tl.cdiv(tl.cdiv(columns, DEPTH), SPLITS) * DEPTH
    begin = tl.program_id(2) * each
    wait_for_inputs()
    let_next_start()
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    total = accumulate(
        total, weight, scale, zero, x + token[None, :] * x_row, None, 0, (m < tokens)[None, :],
        tl.program_id(0) * ROWS, row, begin, tl.minimum(begin + each, columns), columns, scale_row,
        KEPT, DEPTH, EVEN, STAGES,
    )  # fmt: skip
    mask = (m < tokens)[:, None] & (n < rows)[None, :]
    place = m[:, None].to(tl.int64) * rows + n[None, :]
    total = total.T
    if SPLITS > 1:
        last, total = sum_of_splits(total, partial, counter, place, mask, tokens, rows, SPLITS)
        if not last:
            return
    total = finish(total.T, scale, row_scale, row, scale_row, None, None, KEPT).T
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=mask)
