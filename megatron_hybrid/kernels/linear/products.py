"""The inner loop of Triton kernels that multiply quantised weights with inputs in 16 or 32 bits, or
with rounded ones (QuantizedRows)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat

# Of float4_e2m1: its codes in the places of a bfloat16's bits mean 2^-126 of what they stand for.
# With a scale that is 2^119 times too large the products are 2^-7 of the weights, and exact.
FP4_FACTOR = 128.0
_FP4_HALF = """
{prepare}
shr.b32 part, codes, 6;
and.b32 part, part, 0x01C001C0;
and.b32 sign, codes, 0x80008000;
or.b32 part, part, sign;
mul.bf16x2 {result}, part, {factor};"""
# Four bytes are two pairs; of a pair the upper codes are in place as they are put to the front of
# 16 bits each, the lower ones four bits later. (bytes, results of both, factor)
_FP4_PAIRS = (("0x1404", "$2", "$0", "$5"), ("0x3424", "$3", "$1", "$6"))
FP4_ASM = (
    "{\n.reg .b32 codes, part, sign;"
    + "".join(
        _FP4_HALF.format(prepare=f"prmt.b32 codes, $4, 0, {chosen};", result=upper, factor=factor)
        + _FP4_HALF.format(prepare="shl.b32 codes, codes, 4;", result=lower, factor=factor)
        for chosen, upper, lower, factor in _FP4_PAIRS
    )
    + "\n}"
)


class Kept(NamedTuple):
    """How a kernel finds a weight: compile-time constants."""

    numbers: str
    group: int  # columns that share a scale; 0: all
    rows: int  # that share a scale
    in_assembler: bool  # float4_e2m1, four bytes at a time, into bfloat16
    by_group: bool  # inputs have a scale for each group of columns

    @classmethod
    def of(cls, weight: QuantizedWeight, inputs: Tensor) -> Kept:
        """Of a weight [N, K], for these inputs."""
        format = weight.format
        is_fast = inputs.is_cuda and inputs.element_size() == 2
        return cls(
            format.numbers, format.columns or 0, format.rows,
            format.numbers == "float4_e2m1" and is_fast and "bfloat16" in str(inputs.dtype),
            format.activations == "group",
        )  # fmt: skip

    @property
    def halves(self) -> bool:
        """Whether two codes share a byte."""
        return self.numbers in ("float4_e2m1", "uint4")


def descriptor(weight: QuantizedWeight, rows: int, depth: int) -> TensorDescriptor:
    """Of a weight [N, K], for tiles of so many rows and columns. Its rows must be a multiple of 16
    bytes."""
    length, width = weight.values.shape
    return TensorDescriptor(
        weight.values, [length, width], [width, 1], [rows, depth * weight.format.bits // 8]
    )


def step_depth(format: WeightFormat, depth: int) -> int:
    """Columns of a step: of rounded inputs those of one step share a scale."""
    by_step = format.activations != "none" and format.columns is not None
    return min(depth, format.columns) if by_step and format.columns is not None else depth


def written_out(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A weight [N, K] or [experts, N, K] in 16 or 32 bits: for many inputs a product with that is
    faster than one that unpacks codes again and again. Rows must be as `descriptor` says."""
    flat = weight if len(weight.shape) == 2 else weight.flat()
    rows, columns = flat.shape
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    _write_out_kernel[(triton.cdiv(rows, 32), triton.cdiv(columns, 256))](
        flat.values, flat.scale, flat.zero, flat.row_scale, values, rows, columns,
        flat.scale.stride(0), Kept.of(flat, values), ROWS=32, DEPTH=256, num_warps=4,
    )  # fmt: skip
    return values


@triton.jit
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
        byte = tl.arange(0, DEPTH // 2)
        k = start + byte // 8 * 16 + byte % 8
        mask = (n < rows)[:, None] & (k < columns)[None, :]
        source = weight + row.to(tl.int64)[:, None] * (columns // 2) + start // 2 + byte[None, :]
        codes = tl.load(source, mask=mask, other=0)
        low, high = _halves(codes, scale, zero, row, start, columns, scale_row, KEPT, DEPTH, kind)
        if KEPT.group >= DEPTH and KEPT.numbers == "uint4":
            factor *= tl.load(scale + row * scale_row + start // KEPT.group)[:, None]
        elif KEPT.group == 0:
            factor *= tl.load(scale + row * scale_row)[:, None]
        tl.store(target + k[None, :], (low.to(tl.float32) * factor).to(kind), mask=mask)
        tl.store(target + k[None, :] + 8, (high.to(tl.float32) * factor).to(kind), mask=mask)
    else:
        k = start + tl.arange(0, DEPTH)
        mask = (n < rows)[:, None] & (k < columns)[None, :]
        source = weight + row.to(tl.int64)[:, None] * columns + k[None, :]
        numbers = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        place = _places(row, k, columns, scale_row, KEPT)
        if KEPT.numbers == "uint8":
            middle = 128.0
            if zero is not None:
                middle = tl.load(zero + place).to(tl.float32)
            numbers -= middle
        numbers *= tl.load(scale + place)
        tl.store(target + k[None, :], numbers.to(kind), mask=mask)


@triton.jit
def accumulate(
    total, weight, scale, zero, inputs, input_scale, input_group, valid, first_row, row, columns,
    scale_row, KEPT: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """total [ROWS, TOKENS] float32 + W[rows] x[tokens]^T, without what is the same for a whole row
    of W or x: see `finish`. weight: a descriptor; row [ROWS]: numbers of the rows from `first_row`
    on, all of them there; inputs, valid [1, TOKENS]: where the tokens' rows begin, and whether they
    are there; input_scale: the same of scales that are `input_group` apart, or None."""
    kind: tl.constexpr = inputs.dtype.element_ty
    for start in tl.range(0, columns, DEPTH, num_stages=STAGES):
        if KEPT.halves:
            codes = weight.load([first_row, start // 2])
            byte = tl.arange(0, DEPTH // 2)
            k = start + byte // 8 * 16 + byte % 8
            inside = valid & (k < columns)[:, None]
            low_inputs = tl.load(inputs + k[:, None], mask=inside, other=0)
            high_inputs = tl.load(inputs + k[:, None] + 8, mask=inside, other=0)
            low, high = _halves(
                codes, scale, zero, row, start, columns, scale_row, KEPT, DEPTH, kind
            )
            if KEPT.group >= DEPTH and KEPT.numbers == "uint4":
                part = tl.dot(low, low_inputs, input_precision="ieee")
                part = tl.dot(high, high_inputs, part, input_precision="ieee")
                total += part * tl.load(scale + row * scale_row + start // KEPT.group)[:, None]
            else:
                total = tl.dot(low, low_inputs, total, input_precision="ieee")
                total = tl.dot(high, high_inputs, total, input_precision="ieee")
        elif kind == tl.float8e4nv or kind == tl.int8:
            codes = weight.load([first_row, start])
            k = start + tl.arange(0, DEPTH)
            inside = valid & (k < columns)[:, None]
            values = tl.load(inputs + k[:, None], mask=inside, other=0.0)
            sums: tl.constexpr = tl.int32 if kind == tl.int8 else tl.float32
            part = tl.dot(codes, values, out_dtype=sums).to(tl.float32)
            if KEPT.group:
                group = start // KEPT.group
                part *= tl.load(scale + row // KEPT.rows * scale_row + group)[:, None]
                if KEPT.by_group:
                    part *= tl.load(input_scale + group * input_group, mask=valid, other=0.0)
            total += part
        else:
            codes = weight.load([first_row, start])
            k = start + tl.arange(0, DEPTH)
            inside = valid & (k < columns)[:, None]
            values = tl.load(inputs + k[:, None], mask=inside, other=0)
            numbers = codes.to(kind)
            if KEPT.numbers == "uint8":
                numbers = codes.to(tl.float32)
                middle = 128.0
                if zero is not None:
                    place = _places(row, k, columns, scale_row, KEPT)
                    middle = tl.load(zero + place).to(tl.float32)
                numbers = (numbers - middle).to(kind)
            if KEPT.group == 0:
                total = tl.dot(numbers, values, total, input_precision="ieee")
            elif KEPT.group >= DEPTH:
                part = tl.dot(numbers, values, input_precision="ieee")
                place = row // KEPT.rows * scale_row + start // KEPT.group
                total += part * tl.load(scale + place)[:, None]
            else:
                factor = tl.load(scale + _places(row, k, columns, scale_row, KEPT))
                numbers = (numbers.to(tl.float32) * factor).to(kind)
                total = tl.dot(numbers, values, total, input_precision="ieee")
    return total


@triton.jit
def finish(
    total, scale, row_scale, row, scale_row, input_scale, input_group, valid, KEPT: tl.constexpr
):
    """What `accumulate` gave, times what is the same for a whole row of W or x. valid [TOKENS]."""
    if KEPT.group == 0:
        total *= tl.load(scale + row // KEPT.rows * scale_row)[:, None]
    if input_scale is not None and not KEPT.by_group:
        total *= tl.load(input_scale, mask=valid[None, :], other=0.0)
    if row_scale is not None:
        factor = tl.load(row_scale + row)[:, None]
        total *= factor * 128.0 if KEPT.in_assembler else factor
    return total


@triton.jit
def _places(row, k, columns, scale_row, KEPT: tl.constexpr):
    """Of the scales of columns k, [ROWS, DEPTH]."""
    group = tl.minimum(k, columns - 1) // KEPT.group if KEPT.group else k * 0
    return (row // KEPT.rows * scale_row)[:, None] + group[None, :]


@triton.jit
def _halves(
    codes, scale, zero, row, start, columns, scale_row,
    KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Weights of the lower and of the upper codes of bytes [ROWS, DEPTH / 2]."""
    # Eight bytes at a time, which share scales.
    eights: tl.constexpr = DEPTH // 16
    rows: tl.constexpr = codes.shape[0]
    place = _places(row, start + tl.arange(0, eights) * 16, columns, scale_row, KEPT)
    codes = tl.reshape(codes, (rows, eights, 8))
    if KEPT.in_assembler:
        lift: tl.constexpr = 2.0**119
        factor = (tl.load(scale + place).to(tl.float32) * lift).to(tl.bfloat16)
        factor = tl.broadcast_to(factor[:, :, None], (rows, eights, 8))
        low, high = tl.inline_asm_elementwise(
            FP4, "=r,=r,=r,=r,r,r,r", [codes, factor], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
        return tl.reshape(low, (rows, DEPTH // 2)), tl.reshape(high, (rows, DEPTH // 2))
    low = _number(codes & 15, KEPT)
    high = _number(codes >> 4, KEPT)
    if KEPT.numbers == "uint4":
        middle = 8.0
        if zero is not None:
            middle = tl.load(zero + place).to(tl.float32)[:, :, None]
        low -= middle
        high -= middle
    if KEPT.numbers == "float4_e2m1" or (KEPT.group != 0 and KEPT.group < DEPTH):
        factor = tl.load(scale + place).to(tl.float32)[:, :, None]
        low *= factor
        high *= factor
    low = tl.reshape(low.to(kind), (rows, DEPTH // 2))
    return low, tl.reshape(high.to(kind), (rows, DEPTH // 2))


@triton.jit
def _number(code, KEPT: tl.constexpr):
    """What 4 bits mean, float32."""
    if KEPT.numbers == "float4_e2m1":
        # The same exponent and mantissa in the places of float8_e4m3fn, whose bias is 6 more.
        bits = ((code & 8) << 4) | ((code & 7) << 2)
        return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 64.0
    else:
        return code.to(tl.float32)


FP4: tl.constexpr = tl.constexpr(FP4_ASM)
