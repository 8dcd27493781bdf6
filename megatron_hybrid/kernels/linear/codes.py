"""How Triton kernels take weights of linear/formats.py apart: codes, scales and zero points, in the
order in which they are loaded, into 16- or 32-bit numbers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.linear.formats import QuantizedWeight

# Of float4_e2m1: its codes in the places of a bfloat16's bits mean 2^-126 of what they stand for.
# With a scale that is 2^119 times too large the products are 2^-7 of the weights, and exact.
FP4_FACTOR = 128.0
FP4_LIFTED = tl.constexpr(0x7B007B00)  # 2^119 as a bfloat16, twice
# Pairs of a word's codes (formats.FP4_PLACES) to the places of two bfloat16. $0 to $7: results as
# in word_numbers; $8: eight codes; $9: their scale twice.
FP4_ASM = """{
.reg .b32 part, sign;
and.b32 part, $8, 0x81C081C0;
mul.bf16x2 part, part, $9;
mov.b32 {$0, $1}, part;
shl.b32 part, $8, 3;
and.b32 part, part, 0x81C081C0;
mul.bf16x2 part, part, $9;
mov.b32 {$2, $3}, part;
shl.b32 part, $8, 6;
and.b32 part, part, 0x01C001C0;
shl.b32 sign, $8, 1;
and.b32 sign, sign, 0x80008000;
or.b32 part, part, sign;
mul.bf16x2 part, part, $9;
mov.b32 {$4, $5}, part;
shr.b32 part, $8, 3;
and.b32 part, part, 0x01C001C0;
shl.b32 sign, $8, 2;
and.b32 sign, sign, 0x80008000;
or.b32 part, part, sign;
mul.bf16x2 part, part, $9;
mov.b32 {$6, $7}, part;
}"""
# A scale's byte, float8_e4m3fn, in the places of a bfloat16's bits means 2^-120 of what it stands
# for; twice in a word, and multiplied by 2^127 and 2^112.
FP4_SCALE_ASM = """{
.reg .b32 scale, lift;
mul.lo.u32 scale, $1, 0x00100010;
mov.b32 lift, 0x7F007F00;
mul.bf16x2 scale, scale, lift;
mov.b32 lift, 0x77807780;
mul.bf16x2 $0, scale, lift;
}"""


class Kept(NamedTuple):
    """How a kernel finds a weight: compile-time constants."""

    numbers: str
    group: int  # columns that share a scale; 0: all
    rows: int  # that share a scale
    in_assembler: bool  # float4_e2m1, four bytes at a time, into bfloat16
    zero_points: bool
    by_group: bool  # inputs have a scale for each group of columns

    @classmethod
    def of(cls, weight: QuantizedWeight, inputs: Tensor) -> Kept:
        """Of a weight [N, K], for these inputs."""
        format = weight.format
        is_fast = inputs.is_cuda and inputs.element_size() == 2
        return cls(
            format.numbers, format.columns or 0, format.rows,
            format.numbers == "float4_e2m1" and is_fast and "bfloat16" in str(inputs.dtype),
            format.zero_points, format.activations == "group",
        )  # fmt: skip

    @property
    def halves(self) -> bool:
        """Whether two codes share a byte."""
        return self.numbers in ("float4_e2m1", "uint4")


@triton.constexpr_function
def scale_by_step(kept: Kept, depth: int) -> bool:
    """Whether all of so many columns have one scale, and others have others."""
    return kept.group > 0 and kept.group % depth == 0 and kept.numbers != "float4_e2m1"


@triton.jit
def places(row, k, columns, scale_row, KEPT: tl.constexpr):
    """Of the scales of columns k, [ROWS, len(k)]."""
    group = tl.minimum(k, columns - 1) // KEPT.group if KEPT.group else k * 0
    return (row // KEPT.rows * scale_row)[:, None] + group[None, :]


@triton.jit
def step_scales(
    scale, zero, row, start, columns, scale_row, KEPT: tl.constexpr, DEPTH: tl.constexpr
):
    """Of DEPTH columns from `start` on: scales [ROWS], or, of codes of 4 bits where they differ,
    [ROWS, DEPTH / 16], as they are kept, and zero points [ROWS, DEPTH / 16] of those codes; 0
    where there is nothing of the kind. Past the end: anything."""
    factor = 0.0
    zeros = 0.0
    if scale_by_step(KEPT, DEPTH):
        group = tl.minimum(start, columns - 1) // KEPT.group
        factor = tl.load(scale + row // KEPT.rows * scale_row + group)
    elif KEPT.halves and KEPT.group != 0:
        factor = chunk_scales(scale, row, start, columns, scale_row, KEPT, DEPTH // 16)
    if KEPT.halves and KEPT.zero_points:
        zeros = chunk_scales(zero, row, start, columns, scale_row, KEPT, DEPTH // 16)
    return factor, zeros


@triton.jit
def chunk_scales(scales, row, start, columns, scale_row, KEPT: tl.constexpr, CHUNKS: tl.constexpr):
    """Scales or zero points [ROWS, CHUNKS] of 16 columns each from `start` on, which share one."""
    chunk = start // 16 + tl.arange(0, CHUNKS)
    inside = (chunk * 16 < columns)[None, :]
    # Written so that the compiler sees which lie side by side, and loads them together.
    group = chunk if KEPT.group == 16 else chunk * 16 // KEPT.group
    place = (row // KEPT.rows * scale_row)[:, None] + group[None, :]
    return tl.load(scales + place, mask=inside, other=0.0)


@triton.jit
def byte_weights(
    codes, scale, zero, row, start, columns, scale_row,
    KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Weights of codes of 8 bits [ROWS, DEPTH], with their scales where these differ in a step."""
    numbers = codes.to(kind)
    k = start + tl.arange(0, DEPTH)
    if KEPT.numbers == "uint8":
        middle = 128.0
        if zero is not None:
            place = places(row, k, columns, scale_row, KEPT)
            middle = tl.load(zero + place).to(tl.float32)
        numbers = (codes.to(tl.float32) - middle).to(kind)
    if KEPT.group != 0 and not scale_by_step(KEPT, DEPTH):
        factor = tl.load(scale + places(row, k, columns, scale_row, KEPT))
        numbers = (numbers.to(tl.float32) * factor).to(kind)
    return numbers


@triton.jit
def column_order(DEPTH: tl.constexpr):
    """Columns [DEPTH / 2] of the first of the two that half_weights gives; the second's are 2 more.
    So a thread of a product on tensor cores has the eight codes of a word, which share a scale."""
    i = tl.arange(0, DEPTH // 2)
    return i // 16 * 32 + i // 4 % 2 * 16 + i // 8 % 2 * 8 + i // 2 % 2 * 4 + i % 2


@triton.jit
def half_weights(codes, factor, zeros, KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr):
    """Weights of codes of 4 bits, words [ROWS, DEPTH / 8], by halves [ROWS, DEPTH / 2]: see
    column_order; with their scales where these differ in a step. factor, zeros: of step_scales."""
    numbers = _of_step(codes, factor, zeros, KEPT, DEPTH, kind)
    first = _joined(numbers[0], numbers[1], numbers[2], numbers[3], DEPTH)
    return first, _joined(numbers[4], numbers[5], numbers[6], numbers[7], DEPTH)


@triton.jit
def ordered_weights(
    codes, factor, zeros, KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr
):
    """As half_weights, in the columns' order, [ROWS, DEPTH]: a thread's lie side by side."""
    numbers = _of_step(codes, factor, zeros, KEPT, DEPTH, kind)
    low = tl.join(tl.join(numbers[0], numbers[1]), tl.join(numbers[4], numbers[5]))
    high = tl.join(tl.join(numbers[2], numbers[3]), tl.join(numbers[6], numbers[7]))
    numbers = tl.join(low, high)
    rows: tl.constexpr = numbers.shape[0]
    # [ROWS, chunks, words, bytes, pairs of bytes, halves of a byte]
    numbers = tl.reshape(numbers, (rows, DEPTH // 16, 2, 2, 2, 2))
    return tl.reshape(tl.permute(numbers, (0, 1, 5, 2, 4, 3)), (rows, DEPTH))


@triton.jit
def _of_step(codes, factor, zeros, KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr):
    """word_numbers of half_weights' arguments."""
    scales = None
    middle = None
    if KEPT.in_assembler:
        scales = of_words(lifted(factor.to(tl.uint8, bitcast=True)))
    elif KEPT.group != 0 and not scale_by_step(KEPT, DEPTH):
        scales = of_words(factor.to(tl.float32))
    if KEPT.zero_points:
        middle = of_words(zeros.to(tl.float32))
    return word_numbers(codes, middle, scales, KEPT, kind)


@triton.jit
def _joined(low_first, low_second, high_first, high_second, DEPTH: tl.constexpr):
    """Of words [ROWS, DEPTH / 8], by half of a byte and byte -> [ROWS, DEPTH / 2]."""
    numbers = tl.join(tl.join(low_first, low_second), tl.join(high_first, high_second))
    rows: tl.constexpr = numbers.shape[0]
    # [ROWS, groups of words, words, bytes, halves of a byte]
    numbers = tl.reshape(numbers, (rows, DEPTH // 32, 4, 2, 2))
    return tl.reshape(tl.permute(numbers, (0, 1, 4, 2, 3)), (rows, DEPTH // 2))


@triton.jit
def of_words(chunks):
    """What chunks of 16 columns have, for each of their two words."""
    rows: tl.constexpr = chunks.shape[0]
    size: tl.constexpr = chunks.shape[1]
    return tl.reshape(tl.broadcast_to(chunks[:, :, None], (rows, size, 2)), (rows, size * 2))


@triton.jit
def word_numbers(words, middle, scales, KEPT: tl.constexpr, kind: tl.constexpr):
    """Words of eight codes -> as many tensors like `words`, by pair of columns, four of columns
    and column: what codes stand for, less `middle` (None: half of their range) and times `scales`
    (None: 1), which are like `words`; in assembler, scales are of `lifted`."""
    if KEPT.in_assembler:
        return tl.inline_asm_elementwise(
            FP4, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scales],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (
            _weight(words, 0, 6, 15, middle, scales, KEPT, kind),
            _weight(words, 8, 22, 31, middle, scales, KEPT, kind),
            _weight(words, 4, 3, 12, middle, scales, KEPT, kind),
            _weight(words, 12, 19, 28, middle, scales, KEPT, kind),
            _weight(words, 16, 0, 14, middle, scales, KEPT, kind),
            _weight(words, 24, 16, 30, middle, scales, KEPT, kind),
            _weight(words, 20, 9, 13, middle, scales, KEPT, kind),
            _weight(words, 28, 25, 29, middle, scales, KEPT, kind),
        )


@triton.jit
def lifted(scales):
    """float8_e4m3fn as uint8 -> int32, bfloat16 twice, 2^119 times as large. Not to be repeated by
    all threads that need one."""
    return tl.inline_asm_elementwise(
        FP4_SCALE, "=r,r", [scales.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _weight(
    words, SHIFT: tl.constexpr, MAGNITUDE: tl.constexpr, SIGN: tl.constexpr, middle, scales,
    KEPT: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Of the code from bit SHIFT on; of float4_e2m1, from bit MAGNITUDE on and with bit SIGN."""
    if KEPT.numbers == "float4_e2m1":
        # The same exponent and mantissa in the places of float8_e4m3fn, whose bias is 6 more.
        bits = (((words >> SIGN) & 1) << 7) | (((words >> MAGNITUDE) & 7) << 2)
        weight = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 64.0
    else:
        weight = ((words >> SHIFT) & 15).to(tl.float32)
    if middle is not None:
        weight -= middle
    elif KEPT.numbers == "uint4":
        weight -= 8.0
    if scales is not None:
        weight *= scales
    return weight.to(kind)


FP4: tl.constexpr = tl.constexpr(FP4_ASM)
FP4_SCALE: tl.constexpr = tl.constexpr(FP4_SCALE_ASM)
