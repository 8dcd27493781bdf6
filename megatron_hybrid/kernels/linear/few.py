"""The inner loop of Triton kernels that multiply one row of inputs with quantised weights: every
thread multiplies and adds the weights that it loads, without tensor cores, whose tiles would be
filled with zeros. A step's weights are loaded while those of the one before are multiplied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.linear.codes import (
    FP4_LIFTED,
    Kept,
    chunk_scales,
    of_words,
    word_numbers,
)
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.linear.products import finish

ROWS = 8  # of a weight, in a program
DEPTH = 512  # columns, a step
# Columns that a thread adds up before they are multiplied with their scale.
CHUNK = 16


def can_chunk(weight: QuantizedWeight) -> bool:
    """Whether these kernels are for a weight: a chunk's columns share a scale, and a step has whole
    groups of rounded inputs."""
    group = weight.format.columns or CHUNK
    return weight.shape[-1] % 32 == 0 and group % CHUNK == 0 and DEPTH % group == 0


def multiply_row(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """As Linear.multiply, of one row of inputs in 16 or 32 bits."""
    rows, columns = weight.shape
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _row_kernel[(cdiv(rows, ROWS),)](
        x, weight.words(), weight.scale, weight.zero, weight.row_scale, bias, y, rows, columns,
        weight.scale.stride(0), Kept.of(weight, x), ROWS, DEPTH, num_warps=4,
    )  # fmt: skip
    return y


@launched
def _row_kernel(
    x, weight, scale, zero, row_scale, bias, y, rows, columns, scale_row,
    KEPT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    total = no_sums(KEPT, ROWS, DEPTH)
    loaded = load_step(weight, scale, zero, row, 0, columns, columns, scale_row, KEPT, DEPTH)
    for start in range(0, columns, DEPTH):
        following = load_step(
            weight, scale, zero, row, start + DEPTH, columns, columns, scale_row, KEPT, DEPTH
        )
        inputs = inputs_at(x, None, 0, start, columns, 0, DEPTH)
        total += chunk_sums(loaded, inputs, KEPT)
        loaded = following
    value = row_sums(total, scale, row_scale, row, scale_row, KEPT)
    if bias is not None:
        value += tl.load(bias + row).to(tl.float32)
    tl.store(y + n, value.to(y.dtype.element_ty), mask=n < rows)


@triton.jit
def no_sums(KEPT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """What chunk_sums are added to."""
    return tl.zeros((ROWS, DEPTH // 8 if KEPT.halves else DEPTH // 16), tl.float32)


@triton.jit
def inputs_at(x, scale, scale_group, start, columns, GROUP: tl.constexpr, DEPTH: tl.constexpr):
    """Of a row of inputs: DEPTH columns from `start` on, [DEPTH / 16, 16] float32. scale: of
    rounded ones, for GROUP columns each (0: all) and `scale_group` apart; or None."""
    k = start + tl.arange(0, DEPTH // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    numbers = tl.load(x + k, mask=k < columns, other=0.0).to(tl.float32)
    if scale is not None:
        if GROUP:
            group = tl.minimum(k, columns - 1) // GROUP
            numbers *= tl.load(scale + group * scale_group)
        else:
            numbers *= tl.load(scale)
    return numbers


@triton.jit
def load_step(
    weight, scale, zero, row, start, end, columns, scale_row,
    KEPT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Codes [ROWS, DEPTH], or words of eight, of columns from `start` on, and, for each chunk of
    16, scales and zero points, as they are kept. weight: a pointer; row [ROWS] int64; from column
    `end` on nothing is loaded."""
    scales = 1.0
    zeros = 0.0
    if KEPT.halves:
        word = start // 8 + tl.arange(0, DEPTH // 8)
        place = row[:, None] * (columns // 8) + word[None, :]
        codes = tl.load(weight + place, mask=(word * 8 < end)[None, :], other=0)
    else:
        column = start + tl.arange(0, DEPTH)
        place = row[:, None] * columns + column[None, :]
        codes = tl.load(weight + place, mask=(column < end)[None, :], other=0.0)
    if KEPT.group:
        scales = chunk_scales(scale, row, start, end, scale_row, KEPT, DEPTH // 16)
    if KEPT.zero_points:
        zeros = chunk_scales(zero, row, start, end, scale_row, KEPT, DEPTH // 16)
    return codes, scales, zeros


@triton.jit
def chunk_sums(loaded, x, KEPT: tl.constexpr):
    """Products of a step's weights and inputs, added up over parts of it, [ROWS, PARTS] float32,
    without what is the same for a whole row of weights. loaded: of load_step; x: of inputs_at."""
    codes, scales, zeros = loaded
    rows: tl.constexpr = codes.shape[0]
    if KEPT.halves:
        middle = None
        factor = None
        if KEPT.zero_points:
            middle = of_words(zeros.to(tl.float32))
        if KEPT.in_assembler:
            factor = tl.full(codes.shape, FP4_LIFTED, tl.int32)
        numbers = word_numbers(codes, middle, factor, KEPT, tl.float32)
        x0, x1, x2, x3, x4, x5, x6, x7 = _of_codes(x, codes.shape[1])
        sums = numbers[0].to(tl.float32) * x0[None, :] + numbers[1].to(tl.float32) * x1[None, :]
        sums += numbers[2].to(tl.float32) * x2[None, :] + numbers[3].to(tl.float32) * x3[None, :]
        sums += numbers[4].to(tl.float32) * x4[None, :] + numbers[5].to(tl.float32) * x5[None, :]
        sums += numbers[6].to(tl.float32) * x6[None, :] + numbers[7].to(tl.float32) * x7[None, :]
        if KEPT.group:
            sums *= of_words(scales.to(tl.float32))
    else:
        chunks: tl.constexpr = codes.shape[1] // 16
        numbers = tl.reshape(codes, (rows, chunks, 16)).to(tl.float32)
        if KEPT.zero_points:
            numbers -= zeros.to(tl.float32)[:, :, None]
        elif KEPT.numbers == "uint8":
            numbers -= 128.0
        sums = tl.sum(numbers * x[None, :, :], axis=2)
        if KEPT.group:
            sums *= scales.to(tl.float32)
    return sums


@triton.jit
def _of_codes(x, WORDS: tl.constexpr):
    """Inputs [WORDS / 2, 16] as word_numbers has the codes."""
    # [chunks, halves of bytes, words, pairs of bytes, bytes]
    x = tl.reshape(x, (WORDS // 2, 2, 2, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 2, 3, 1, 4)), (WORDS, 2, 2, 2))
    even, odd = tl.split(x)
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    x0, x4 = tl.split(even_low)
    x2, x6 = tl.split(even_high)
    x1, x5 = tl.split(odd_low)
    x3, x7 = tl.split(odd_high)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def row_sums(total, scale, row_scale, row, scale_row, KEPT: tl.constexpr):
    """total [ROWS, ..] of chunk_sums -> [ROWS]."""
    sums = tl.sum(total, axis=1)[:, None]
    sums = finish(sums, scale, row_scale, row, scale_row, None, None, KEPT)
    return tl.reshape(sums, (total.shape[0],))
