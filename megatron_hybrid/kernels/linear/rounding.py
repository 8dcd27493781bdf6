"""How Triton kernels leave rows in 8 bits for the products that follow: see QuantizedRows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.launching import next_power_of_2
from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, QuantizedRows, Reader

_SMALLEST = tl.constexpr(2.0**-126)  # normal float32


class Rounding(NamedTuple):
    """A compile-time constant of kernels."""

    is_fp8: bool
    constant: bool  # the scale is read, not taken from the values
    group: int  # columns that share a scale; 0: all

    @property
    def whole_row(self) -> bool:
        """Whether a program has to see a whole row."""
        return not self.group and not self.constant


def rounding(format: WeightFormat) -> Rounding:
    """Of the inputs of layers in a format."""
    by_group = format.activations == "group"
    assert not by_group or format.columns is not None
    group = format.columns if by_group and format.columns is not None else 0
    constant = format.activations == "tensor"
    return Rounding(format.numbers == "float8_e4m3fn", constant, group)


def empty_rows(
    tokens: int, columns: int, format: WeightFormat, input_scale: Tensor | None, like: Tensor
) -> QuantizedRows:
    """Memory for rounded rows; a constant scale is there already."""
    kind, device = rounding(format), like.device
    dtype = torch.float8_e4m3fn if kind.is_fp8 else torch.int8
    # Of groups the scales of one side by side, and rows to a multiple of 4, as cuBLASLt takes them.
    rows = -(-tokens // 4) * 4
    values = torch.empty(rows, columns, dtype=dtype, device=device)[:tokens]
    if kind.constant:
        assert input_scale is not None
        return QuantizedRows(values, input_scale.expand(tokens, 1), like.dtype)
    groups = -(-columns // kind.group) if kind.group else 1
    scale = torch.empty(groups, rows, device=device)
    return QuantizedRows(values, scale.t()[:tokens], like.dtype)


class Results:
    """What a kernel leaves of [tokens, columns]: `plain`, memory for it, or rounded, or both."""

    def __init__(self, plain: Tensor, into: Reader | None) -> None:
        self.kind: Rounding | None = None
        self.inputs: Inputs = plain
        # of the kernel: plain, codes, scales, their strides
        self.arguments: tuple[Tensor | int | None, ...] = (plain, None, None, 0, 0)
        if into is None:
            return
        self.kind = rounding(into.format)
        tokens, columns = plain.shape
        rows = empty_rows(tokens, columns, into.format, into.input_scale, plain)
        kept = plain if into.plain else None
        self.inputs = rows._replace(plain=kept)
        self.arguments = (kept, rows.values, rows.scale, *rows.scale.stride())

    def block(self, block: int, columns: int) -> int:
        """Columns of a program that had so many."""
        if self.kind is None:
            return block
        if self.kind.whole_row:
            return next_power_of_2(columns)
        return max(block, self.kind.group)


@triton.jit
def store_rounded(
    numbers, values, scale, scale_group, first, columns, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """numbers [BLOCK] float32 of one row, from column `first` on, zeros past the end -> codes in
    `values` and their scales in `scale`, which point at the row's beginning."""
    column = first + tl.arange(0, BLOCK)
    if KIND.constant:
        codes = _codes(numbers, tl.load(scale), KIND)
    elif KIND.group:
        groups: tl.constexpr = BLOCK // KIND.group
        grouped = tl.reshape(numbers, (groups, KIND.group))
        factor = scale_for(tl.max(tl.abs(grouped), axis=1), KIND)
        group = first // KIND.group + tl.arange(0, groups)
        tl.store(scale + group * scale_group, factor, mask=group * KIND.group < columns)
        codes = tl.reshape(_codes(grouped, factor[:, None], KIND), (BLOCK,))
    else:
        factor = scale_for(tl.max(tl.abs(numbers), axis=0), KIND)
        tl.store(scale, factor)
        codes = _codes(numbers, factor, KIND)
    tl.store(values + column, codes, mask=column < columns)


@triton.jit
def rounded_numbers(numbers, factor, KIND: tl.constexpr):
    """numbers [A, B] float32 of one row -> what their codes mean; factor: the row's scale, which is
    not used where groups of columns have their own."""
    if KIND.group:
        groups: tl.constexpr = numbers.shape[0] * numbers.shape[1] // KIND.group
        grouped = tl.reshape(numbers, (groups, KIND.group))
        scales = scale_for(tl.max(tl.abs(grouped), axis=1), KIND)[:, None]
        codes = _codes(grouped, scales, KIND)
        return tl.reshape(codes.to(tl.float32) * scales, numbers.shape)
    else:
        return _codes(numbers, factor, KIND).to(tl.float32) * factor


@triton.jit
def scale_for(largest, KIND: tl.constexpr):
    """The scale of numbers of which the largest is so large."""
    factor = tl.div_rn(largest, 448.0 if KIND.is_fp8 else 127.0)
    return tl.where(factor > 0, factor, 1.0)


@triton.jit
def _codes(numbers, factor, KIND: tl.constexpr):
    """numbers / factor, rounded; only a constant factor leaves some that are too large."""
    if KIND.constant:
        largest = factor * (448.0 if KIND.is_fp8 else 127.0)
        numbers = tl.minimum(tl.maximum(numbers, -largest), largest)
    quotients = _quotients(numbers, factor)
    if KIND.is_fp8:
        return quotients.to(tl.float8e4nv)
    else:
        # Added and taken away again, 1.5 * 2^23 leaves the nearest whole number, or the even one.
        return ((quotients + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _quotients(numbers, factor):
    """numbers / factor in the nearest float32, as torch divides. Of bfloat16 divided by their
    largest / 448, half a percent are right between two of float8, and `/`, which may be 2 units
    in the last place off, takes them to the other one. tl.div_rn of all would be twice the work.

    What is left of a number is exact in float32, and twice brings the quotient to the nearest
    (Markstein), where the inverse is: of a factor of 2^-126 or more."""
    inverse = tl.div_rn(1.0, tl.maximum(factor, _SMALLEST))
    quotients = numbers * inverse
    quotients = tl.fma(tl.fma(-quotients, factor, numbers), inverse, quotients)
    return tl.fma(tl.fma(-quotients, factor, numbers), inverse, quotients)
