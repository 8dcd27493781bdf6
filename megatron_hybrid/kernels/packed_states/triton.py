"""Packing states, and unpacking them, in Triton: all layers in one launch; the meaning and the
roundings are reference.py's.

The entries of a state that share a scale are a column. A program has some columns of one slot of
one layer:

    [outer, R, inner]    column c = (c // inner, :, c % inner), R entries that lie `inner` apart
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import PackedStates
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.packed_states.reference import (
    LARGEST,
    copy_windows_to_full,
    copy_windows_to_packed,
)

_ENTRIES = 4096  # of a program


def pack(states: PackedStates, source: Tensor, destination: Tensor) -> None:
    """As in Packing."""
    _launch(_pack_kernel, states, *copy_windows_to_packed(states, source, destination))


def unpack(states: PackedStates, source: Tensor, destination: Tensor) -> None:
    """As in Packing."""
    rows, full = copy_windows_to_full(states, source, destination)
    _launch(_unpack_kernel, states, full, rows)


def _launch(kernel: triton.JITFunction, states: PackedStates, full: Tensor, rows: Tensor) -> None:
    shape, over = states.full_ssm.shape[2:], states.over
    size = math.prod(shape)
    if not size or not len(full):
        return
    length, inner = shape[over], math.prod(shape[over:][1:])
    columns = size // length
    padded = next_power_of_2(length)
    block = min(max(_ENTRIES // padded, 1), next_power_of_2(columns))
    scales = states.values if states.scales is None else states.scales
    kernel[(cdiv(columns, block), len(full), states.full_ssm.shape[0])](
        states.full_ssm, states.values, scales, full, rows,
        states.full_ssm.stride(0), states.values.stride(0), states.values.shape[1],
        columns,
        LENGTH=length, PADDED=padded, INNER=inner, BLOCK=block,
        SCALED=states.scales is not None, LARGEST=LARGEST,
    )  # fmt: skip


@triton.jit
def _places(
    full, rows, full_layer, values_layer, num_rows, columns,
    LENGTH: tl.constexpr, PADDED: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a program's entries are in both, its columns' scales, and which are there."""
    layer, move = tl.program_id(2).to(tl.int64), tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, PADDED)[:, None]
    inside = (column // INNER * (LENGTH * INNER) + column % INNER)[None, :] + entry * INNER
    is_there = (column < columns)[None, :] & (entry < LENGTH)
    slot, row = tl.load(full + move), tl.load(rows + move)
    in_full = layer * full_layer + slot * columns * LENGTH + inside
    in_values = layer * values_layer + row * columns * LENGTH + inside
    in_scales = (layer * num_rows + row) * columns + column
    return in_full, in_values, in_scales, is_there, column < columns


@launched
def _pack_kernel(
    full_ssm, values, scales, full, rows, full_layer, values_layer, num_rows, columns,
    LENGTH: tl.constexpr, PADDED: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    in_full, in_values, in_scales, is_there, is_column = _places(
        full, rows, full_layer, values_layer, num_rows, columns, LENGTH, PADDED, INNER, BLOCK
    )
    state = tl.load(full_ssm + in_full, mask=is_there, other=0)
    if SCALED:
        state = state.to(tl.float32)
        # a maximum may lose a NaN: x - x is 0, or NaN where x is that or infinite
        scale = tl.div_rn(tl.max(tl.abs(state), axis=0), LARGEST + 0.0)
        scale += tl.sum(state - state, axis=0)
        tl.store(scales + in_scales, scale, mask=is_column)
        divisor = tl.where(scale > 0, scale, 1.0)[None, :] + tl.zeros_like(state)
        steps = tl.where((scale > 0)[None, :], tl.div_rn(state, divisor), 0.0)
        steps = (steps + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest, halves to even
        state = tl.minimum(tl.maximum(steps, -LARGEST), LARGEST)
    tl.store(values + in_values, state.to(values.dtype.element_ty), mask=is_there)


@launched
def _unpack_kernel(
    full_ssm, values, scales, full, rows, full_layer, values_layer, num_rows, columns,
    LENGTH: tl.constexpr, PADDED: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    in_full, in_values, in_scales, is_there, is_column = _places(
        full, rows, full_layer, values_layer, num_rows, columns, LENGTH, PADDED, INNER, BLOCK
    )
    state = tl.load(values + in_values, mask=is_there, other=0)
    if SCALED:
        scale = tl.load(scales + in_scales, mask=is_column, other=0)
        state = state.to(tl.float32) * scale[None, :]
    tl.store(full_ssm + in_full, state.to(full_ssm.dtype.element_ty), mask=is_there)
