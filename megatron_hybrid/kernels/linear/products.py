"""The inner loop of Triton kernels that multiply quantised weights with inputs in 16 or 32 bits, or
with rounded ones (QuantizedRows)."""

from __future__ import annotations

import functools
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
FP4_LIFTED = tl.constexpr(0x7B007B00)  # 2^119 as a bfloat16, twice
# A word's bytes 0 and 1, or 2 and 3, are brought to the upper halves of 16 bits each; their upper
# codes are in place then, the lower ones four bits later. $0 to $7: results by byte pair, half and
# byte; $8: eight codes; $9: their scale twice.
_FP4_PAIR = """
shr.b32 part, codes, 6;
and.b32 part, part, 0x01C001C0;
and.b32 sign, codes, 0x80008000;
or.b32 part, part, sign;
mul.bf16x2 part, part, $9;
mov.b32 {{${first}, ${second}}}, part;"""
FP4_ASM = (
    "{\n.reg .b32 codes, part, sign;"
    + "".join(
        f"prmt.b32 codes, $8, 0, {chosen};"
        + _FP4_PAIR.format(first=4 * pair + 2, second=4 * pair + 3)
        + "shl.b32 codes, codes, 4;"
        + _FP4_PAIR.format(first=4 * pair, second=4 * pair + 1)
        for pair, chosen in enumerate(("0x1404", "0x3424"))
    )
    + "\n}"
)
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


# Programs that count those of their tile that are done: tiles of one product at most.
COUNTERS = 65536


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
    _write_out_kernel[(triton.cdiv(rows, 32), triton.cdiv(columns, 256))](
        flat.words(), flat.scale, flat.zero, flat.row_scale, values, rows, columns,
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
        word = start // 8 + tl.arange(0, DEPTH // 8)
        mask = (n < rows)[:, None] & (word * 8 < columns)[None, :]
        source = weight + row.to(tl.int64)[:, None] * (columns // 8) + word[None, :]
        codes = tl.load(source, mask=mask, other=0)
        scales, zeros = _step_scales(scale, zero, row, start, columns, scale_row, KEPT, DEPTH)
        if scale_by_step(KEPT, DEPTH):
            factor *= scales[:, None]
        elif KEPT.group == 0:
            factor *= tl.load(scale + row * scale_row)[:, None]
        first, second = _halves(codes, scales, zeros, KEPT, DEPTH, kind)
        k = start + column_order(DEPTH)
        mask = (n < rows)[:, None] & (k < columns)[None, :]
        tl.store(target + k[None, :], (first.to(tl.float32) * factor).to(kind), mask=mask)
        tl.store(target + k[None, :] + 2, (second.to(tl.float32) * factor).to(kind), mask=mask)
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
    factor, zeros = _step_scales(scale, zero, row, begin, columns, scale_row, KEPT, DEPTH)
    if distance is not None:
        other_factor, other_zeros = _step_scales(
            scale, zero, row + distance, begin, columns, scale_row, KEPT, DEPTH
        )
    input_factor = 1.0
    if KEPT.by_group:
        group = begin // KEPT.group
        input_factor = tl.load(input_scale + group * input_group, mask=valid, other=0.0)
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        after = start + DEPTH
        next_factor, next_zeros = _step_scales(
            scale, zero, row, after, columns, scale_row, KEPT, DEPTH
        )
        if distance is not None:
            next_other_factor, next_other_zeros = _step_scales(
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
        first, second = _halves(codes, factor, zeros, KEPT, DEPTH, kind)
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
        numbers = _bytes(codes, scale, zero, row, start, columns, scale_row, KEPT, DEPTH, kind)
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
    """Of the scales of columns k, [ROWS, len(k)]."""
    group = tl.minimum(k, columns - 1) // KEPT.group if KEPT.group else k * 0
    return (row // KEPT.rows * scale_row)[:, None] + group[None, :]


@triton.jit
def _step_scales(
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
def _bytes(
    codes, scale, zero, row, start, columns, scale_row,
    KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Weights of codes of 8 bits [ROWS, DEPTH], with their scales where these differ in a step."""
    numbers = codes.to(kind)
    k = start + tl.arange(0, DEPTH)
    if KEPT.numbers == "uint8":
        middle = 128.0
        if zero is not None:
            place = _places(row, k, columns, scale_row, KEPT)
            middle = tl.load(zero + place).to(tl.float32)
        numbers = (codes.to(tl.float32) - middle).to(kind)
    if KEPT.group != 0 and not scale_by_step(KEPT, DEPTH):
        factor = tl.load(scale + _places(row, k, columns, scale_row, KEPT))
        numbers = (numbers.to(tl.float32) * factor).to(kind)
    return numbers


@triton.jit
def column_order(DEPTH: tl.constexpr):
    """Columns [DEPTH / 2] of the first of the two that _halves gives; the second's are 2 more. So a
    thread of a product on tensor cores has the eight codes of a word, which share a scale."""
    i = tl.arange(0, DEPTH // 2)
    return i // 16 * 32 + i // 4 % 2 * 16 + i // 8 % 2 * 8 + i // 2 % 2 * 4 + i % 2


@triton.jit
def _halves(codes, factor, zeros, KEPT: tl.constexpr, DEPTH: tl.constexpr, kind: tl.constexpr):
    """Weights of codes of 4 bits, words [ROWS, DEPTH / 8], by halves [ROWS, DEPTH / 2]: see
    column_order; with their scales where these differ in a step. factor, zeros: of _step_scales."""
    scales = None
    middle = None
    if KEPT.in_assembler:
        scales = of_words(_lifted(factor))
    elif KEPT.group != 0 and not scale_by_step(KEPT, DEPTH):
        scales = of_words(factor.to(tl.float32))
    if KEPT.zero_points:
        middle = of_words(zeros.to(tl.float32))
    numbers = word_numbers(codes, middle, scales, KEPT, kind)
    first = _in_order(numbers[0], numbers[1], numbers[2], numbers[3], DEPTH)
    return first, _in_order(numbers[4], numbers[5], numbers[6], numbers[7], DEPTH)


@triton.jit
def _in_order(low_first, low_second, high_first, high_second, DEPTH: tl.constexpr):
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
    """Words of eight codes -> as many tensors like `words`, by pair of bytes, half of a byte and
    byte: what codes stand for, less `middle` (None: half of their range) and times `scales` (None:
    1), which are like `words`; in assembler, scales are of `_lifted`."""
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
            _weight(words, 0, middle, scales, KEPT, kind),
            _weight(words, 8, middle, scales, KEPT, kind),
            _weight(words, 4, middle, scales, KEPT, kind),
            _weight(words, 12, middle, scales, KEPT, kind),
            _weight(words, 16, middle, scales, KEPT, kind),
            _weight(words, 24, middle, scales, KEPT, kind),
            _weight(words, 20, middle, scales, KEPT, kind),
            _weight(words, 28, middle, scales, KEPT, kind),
        )


@triton.jit
def _lifted(scales):
    """float8_e4m3fn -> int32, bfloat16 twice, 2^119 times as large. Not to be repeated by all
    threads that need one."""
    scales = scales.to(tl.uint8, bitcast=True).to(tl.int32)
    return tl.inline_asm_elementwise(
        FP4_SCALE, "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _weight(words, SHIFT: tl.constexpr, middle, scales, KEPT: tl.constexpr, kind: tl.constexpr):
    """Of the code from bit SHIFT on."""
    weight = number((words >> SHIFT) & 15, KEPT)
    if middle is not None:
        weight -= middle
    elif KEPT.numbers == "uint4":
        weight -= 8.0
    if scales is not None:
        weight *= scales
    return weight.to(kind)


@triton.jit
def number(code, KEPT: tl.constexpr):
    """What 4 bits mean, float32."""
    if KEPT.numbers == "float4_e2m1":
        # The same exponent and mantissa in the places of float8_e4m3fn, whose bias is 6 more.
        bits = ((code & 8) << 4) | ((code & 7) << 2)
        return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 64.0
    else:
        return code.to(tl.float32)


FP4: tl.constexpr = tl.constexpr(FP4_ASM)
FP4_SCALE: tl.constexpr = tl.constexpr(FP4_SCALE_ASM)
