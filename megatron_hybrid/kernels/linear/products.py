"""The inner loop of Triton kernels that multiply quantised weights with inputs in 16 or 32 bits, or
with rounded ones (QuantizedRows)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.codes import (
    Kept,
    byte_weights,
    column_order,
    half_weights,
    ordered_weights,
    places,
    scale_by_step,
    step_scales,
)
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat

# Programs that count those of their tile that are done: tiles of one product at most.
COUNTERS = 65536


def descriptor(weight: QuantizedWeight, rows: int, depth: int) -> TensorDescriptor:
    """Of a weight [N, K], for tiles of so many rows and columns. Its rows must be a multiple of 16
    bytes."""
    values = weight.words()
    depth = depth // 8 if weight.format.bits == 4 else depth
    length, width = values.shape
    return TensorDescriptor(values, [length, width], [width, 1], [rows, depth])


def step_depth(format: WeightFormat, depth: int) -> int:
    """Columns of a step: of rounded inputs those of one step share a scale."""
    by_step = format.activations != "none" and format.columns is not None
    return min(depth, format.columns) if by_step and format.columns is not None else depth


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros, which every product leaves as zeros: products of a device run one after the other."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def written_out(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A weight [N, K] or [experts, N, K] in 16 or 32 bits: for many inputs a product with that is
    faster than one that unpacks codes again and again. Rows must be as `descriptor` says."""
    flat = weight if len(weight.shape) == 2 else weight.flat()
    rows, columns = flat.shape
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    depth = min(1024, next_power_of_2(columns))
    height = 8192 // depth
    _write_out_kernel[(cdiv(rows, height), cdiv(columns, depth))](
        flat.words(), flat.scale, flat.zero, flat.row_scale, values, rows, columns,
        flat.scale.stride(0), Kept.of(flat, values), ROWS=height, DEPTH=depth, num_warps=4,
    )  # fmt: skip
    return values


@launched
def _write_out_kernel(
    weight, scale, zero, row_scale, values, rows, columns, scale_row,
    KEPT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, rows - 1)
    start = tl.program_id(1) * DEPTH
    kind: tl.constexpr = values.dtype.element_ty
    factor = tl.full((ROWS, 1), 1.0, tl.float32)
    if row_scale is not None:
        factor = tl.load(row_scale + row)[:, None]
        factor = factor * 128.0 if KEPT.in_assembler else factor
    target = values + n.to(tl.int64)[:, None] * columns
    if KEPT.halves:
        word = start // 8 + tl.arange(0, DEPTH // 8)
        mask = (n < rows)[:, None] & (word * 8 < columns)[None, :]
        source = weight + row.to(tl.int64)[:, None] * (columns // 8) + word[None, :]
        codes = tl.load(source, mask=mask, other=0)
        scales, zeros = step_scales(scale, zero, row, start, columns, scale_row, KEPT, DEPTH)
        if scale_by_step(KEPT, DEPTH):
            factor *= scales[:, None]
        elif KEPT.group == 0:
            factor *= tl.load(scale + row * scale_row)[:, None]
        numbers = ordered_weights(codes, scales, zeros, KEPT, DEPTH, kind)
        k = start + tl.arange(0, DEPTH)
        mask = (n < rows)[:, None] & (k < columns)[None, :]
        tl.store(target + k[None, :], (numbers.to(tl.float32) * factor).to(kind), mask=mask)
    else:
        k = start + tl.arange(0, DEPTH)
        mask = (n < rows)[:, None] & (k < columns)[None, :]
        source = weight + row.to(tl.int64)[:, None] * columns + k[None, :]
        numbers = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        place = places(row, k, columns, scale_row, KEPT)
        if KEPT.numbers == "uint8":
            middle = 128.0
            if zero is not None:
                middle = tl.load(zero + place).to(tl.float32)
            numbers -= middle
        numbers *= tl.load(scale + place)
        tl.store(target + k[None, :], numbers.to(kind), mask=mask)


@triton.jit
def accumulate(
    total, weight, scale, zero, inputs, input_scale, input_group, valid, first_row, row, begin,
    end, columns, scale_row, KEPT: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """total [ROWS, TOKENS] float32 + W[rows] x[tokens]^T of the columns from `begin` to `end`,
    without what is the same for a whole row of W or x: see `finish`. weight: a descriptor; row
    [ROWS]: numbers of the rows from `first_row` on, all of them there; inputs [1, TOKENS]: where
    the tokens' rows begin, all of them there; valid [1, TOKENS]: those that count; input_scale:
    where their scales begin, which are `input_group` apart, or None; EVEN: DEPTH divides the
    columns."""
    total, _ = accumulate_both(
        total, 0.0, weight, scale, zero, inputs, input_scale, input_group, valid, first_row, row,
        None, begin, end, columns, scale_row, KEPT, DEPTH, EVEN, STAGES,
    )  # fmt: skip
    return total


@triton.jit
def accumulate_both(
    total, other, weight, scale, zero, inputs, input_scale, input_group, valid, first_row, row,
    distance, begin, end, columns, scale_row, KEPT: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """accumulate, and `other` of the rows that are `distance` further down (None: of none), with
    inputs that are loaded once."""
    kind: tl.constexpr = inputs.dtype.element_ty
    # The next step's scales and zero points are loaded while this one's columns are multiplied.
    factor, zeros = step_scales(scale, zero, row, begin, columns, scale_row, KEPT, DEPTH)
    if distance is not None:
        other_factor, other_zeros = step_scales(
            scale, zero, row + distance, begin, columns, scale_row, KEPT, DEPTH
        )
    input_factor = 1.0
    if KEPT.by_group:
        group = begin // KEPT.group
        input_factor = tl.load(input_scale + group * input_group, mask=valid, other=0.0)
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        after = start + DEPTH
        next_factor, next_zeros = step_scales(
            scale, zero, row, after, columns, scale_row, KEPT, DEPTH
        )
        if distance is not None:
            next_other_factor, next_other_zeros = step_scales(
                scale, zero, row + distance, after, columns, scale_row, KEPT, DEPTH
            )
        next_input_factor = 1.0
        if KEPT.by_group:
            group = tl.minimum(after, columns - 1) // KEPT.group
            next_input_factor = tl.load(input_scale + group * input_group, mask=valid, other=0.0)
        column = start // 8 if KEPT.halves else start
        codes = weight.load([first_row, column])
        if distance is not None:
            other_codes = weight.load([first_row + distance, column])
        k = start + (column_order(DEPTH) if KEPT.halves else tl.arange(0, DEPTH))
        values = _inputs(inputs, k, columns, EVEN)
        more_values = values
        if KEPT.halves:  # in two parts: one product the compiler cuts into many small ones
            more_values = _inputs(inputs, k + 2, columns, EVEN)
        total = _add(
            total, codes, factor, zeros, values, more_values, input_factor, scale, zero, row,
            start, columns, scale_row, KEPT, DEPTH, kind,
        )  # fmt: skip
        if distance is not None:
            other = _add(
                other, other_codes, other_factor, other_zeros, values, more_values, input_factor,
                scale, zero, row + distance, start, columns, scale_row, KEPT, DEPTH, kind,
            )  # fmt: skip
            other_factor = next_other_factor
            other_zeros = next_other_zeros
        factor = next_factor
        zeros = next_zeros
        input_factor = next_input_factor
    return total, other


@triton.jit
def _add(
    total, codes, factor, zeros, values, more_values, input_factor, scale, zero, row, start,
    columns, scale_row, KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """total + what a step's codes and inputs give."""
    by_step: tl.constexpr = scale_by_step(KEPT, DEPTH)
    if KEPT.halves:
        first, second = half_weights(codes, factor, zeros, KEPT, DEPTH, kind)
        before = tl.zeros_like(total) if by_step else total
        part = tl.dot(first, values, before, input_precision="ieee")
        part = tl.dot(second, more_values, part, input_precision="ieee")
        if not by_step:
            return part
    elif kind == tl.float8e4nv or kind == tl.int8:
        sums: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
        # Added up outside of the product: inside, sums of 8-bit products have 14 bits.
        part = tl.dot(codes, values, out_dtype=sums).to(tl.float32)
    else:
        numbers = byte_weights(
            codes, scale, zero, row, start, columns, scale_row, KEPT, DEPTH, kind
        )
        before = tl.zeros_like(total) if by_step else total
        part = tl.dot(numbers, values, before, input_precision="ieee")
        if not by_step:
            return part
    if by_step:
        part *= factor[:, None]
        if KEPT.by_group:
            part *= input_factor
    return total + part


@triton.jit
def sum_of_splits(
    total, partial, counter, place, mask, tokens, rows, SPLITS: tl.constexpr
):  # fmt: skip
    """What a program made of its columns -> whether it is the last of its tile, and the sum of all
    parts, in their order. partial [SPLITS, tokens, rows]; place: in [tokens, rows]."""
    size = tokens.to(tl.int64) * rows
    tl.store(partial + tl.program_id(2) * size + place, total, mask=mask)
    tl.debug_barrier()
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    last = tl.atomic_add(counter + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        total = tl.zeros_like(total)
        for part in tl.static_range(SPLITS):
            values = partial + part * size + place
            total += tl.load(values, mask=mask, other=0, cache_modifier=".cg")
        tl.store(counter + tile, 0)
    return last, total


@triton.jit
def _inputs(inputs, k, columns, EVEN: tl.constexpr):
    """Columns k of the tokens whose rows begin at `inputs` [1, TOKENS]."""
    if EVEN:
        return tl.load(inputs + k[:, None])
    else:
        return tl.load(inputs + k[:, None], mask=(k < columns)[:, None], other=0.0)


@triton.jit
def finish(total, scale, row_scale, row, scale_row, input_scale, valid, KEPT: tl.constexpr):
    """What `accumulate` gave, times what is the same for a whole row of W or x. valid [TOKENS]."""
    if KEPT.group == 0:
        total *= tl.load(scale + row // KEPT.rows * scale_row)[:, None]
    if input_scale is not None and not KEPT.by_group:
        total *= tl.load(input_scale, mask=valid[None, :], other=0.0)
    if row_scale is not None:
        factor = tl.load(row_scale + row)[:, None]
        total *= factor * 128.0 if KEPT.in_assembler else factor
    return total
