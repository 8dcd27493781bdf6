"""RMS norms in Triton; the calls are protocols.Norm's, the meaning and the roundings
reference.py's.

Each program normalises a few whole rows, so a row's bits do not depend on what it is batched with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.rounding import Results, store_rounded
from megatron_hybrid.kernels.linear.triton import quantize_rows
from megatron_hybrid.kernels.over_ranks import (
    SharedRows,
    address,
    begin_turn,
    load_theirs,
    wait_for_turns,
)
from megatron_hybrid.kernels.protocols import Inputs, Reader


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """As in Norm."""
    out = torch.empty(x.shape, dtype=dtype or weight.dtype, device=x.device)
    # Heads of a wider projection are read where they lie.
    x = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    tokens, heads, size = x.shape
    block = next_power_of_2(size)
    block_rows = max(1024 // block, 1)
    if tokens:
        _rms_norm_kernel[(cdiv(tokens * heads, block_rows),)](
            x, weight, out, tokens * heads, heads, size, x.stride(0), x.stride(1), eps,
            ROWS=block_rows, BLOCK=block, BY_HEAD=weight.dim() == 2,
            num_warps=warps_for(block_rows * block), **OPTIONS,
        )  # fmt: skip
    return out


def rms_norm_parts(x: Tensor, sections: tuple[int, int, int], weight: Tensor, eps: float) -> Tensor:
    """As in Norm."""
    tokens = x.shape[0]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    block = next_power_of_2(max(sections))
    if tokens:
        _rms_norm_parts_kernel[(tokens, 3)](
            x, weight, out, *sections, x.stride(0), eps, BLOCK=block, num_warps=warps_for(block),
            **OPTIONS,
        )  # fmt: skip
    return out


def l2_clip(x: Tensor, scale: Tensor | None, most: float) -> Tensor:
    """As in Norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, size = x.shape
    block = next_power_of_2(size)
    block_rows = max(1024 // block, 1)
    if tokens:
        _l2_clip_kernel[(cdiv(tokens * heads, block_rows),)](
            x, scale, out, tokens * heads, heads, size, x.stride(0), x.stride(1), most,
            ROWS=block_rows, BLOCK=block, num_warps=warps_for(block_rows * block), **OPTIONS,
        )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    multiplier: float,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    into: Reader | None = None,
) -> tuple[Inputs, Tensor]:
    """As in Norm; the sum is in `residual`'s place."""
    tokens, size = x.shape
    results = Results(torch.empty(x.shape, dtype=dtype or weight.dtype, device=x.device), into)
    block = results.block(next_power_of_2(size), size)
    if tokens:
        _add_rms_norm_kernel[(tokens,)](
            x, residual, weight, *results.arguments, size, x.stride(0), residual.stride(0),
            multiplier, eps, results.kind, BLOCK=block, num_warps=warps_for(block), **OPTIONS,
        )  # fmt: skip
    return results.inputs, residual


def add_rms_norm_over_ranks(
    x: Tensor,
    residual: Tensor,
    multiplier: float,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None,
    shared: SharedRows,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of all ranks' x, in one kernel.

    Each row's program puts the row where the others see it, tells them, waits for theirs, and adds
    them up in the order of the ranks, so that all have the same bits.
    """
    tokens, size = x.shape
    out = torch.empty(x.shape, dtype=dtype or weight.dtype, device=x.device)
    block = next_power_of_2(size)
    if tokens:
        _add_rms_norm_over_ranks_kernel[(tokens,)](
            x, residual, weight, out, shared.data, shared.flags, shared.turns,
            size, x.stride(0), residual.stride(0), multiplier, eps, shared.rows,
            RANK=shared.rank, RANKS=shared.size, BLOCK=block,
            num_warps=warps_for(block, per_thread=8),
        )  # fmt: skip
    return out, residual


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    norm_first: bool = False,
    into: Reader | None = None,
    activation: str = "silu",
) -> Inputs:
    """As in Norm."""
    tokens, channels = x.shape
    block, groups = next_power_of_2(group_size), channels // group_size
    results = Results(torch.empty((tokens, channels), dtype=weight.dtype, device=x.device), into)
    # Groups of a program: by their sizes alone, so that a row has the same bits in every batch.
    each = min(groups & -groups, max(1024 // block, 1))  # a power of 2 that divides the groups
    if (kind := results.kind) is not None:
        each = groups if kind.whole_row else each
        gaps = groups > 1 and block != group_size
        if gaps or each & (each - 1) or block * each < kind.group:
            y = gated_rms_norm(x, gate, weight, group_size, eps, norm_first, None, activation)
            assert into is not None and isinstance(y, Tensor)
            rows = quantize_rows(y, into.format, into.input_scale)
            return rows._replace(plain=y if into.plain else None)
    if tokens:
        _gated_rms_norm_kernel[(tokens * (groups // each),)](
            x, gate, weight, *results.arguments, channels, group_size,
            x.stride(0), gate.stride(0), eps, kind,
            NORM_FIRST=norm_first, SILU=activation == "silu", GROUPS=each, BLOCK=block,
            num_warps=warps_for(each * block, per_thread=8), **OPTIONS,
        )  # fmt: skip
    return results.inputs


def warps_for(elements: int, per_thread: int = 16) -> int:
    """Of a program that has so many elements."""
    return min(max(elements // (32 * per_thread), 1), 16)


@launched(do_not_specialize=["rows"])  # compiled once, not once for multiples of 16
def _rms_norm_kernel(
    x, weight, out, rows, heads, size, token_stride, head_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (column < size)
    source = (row // heads) * token_stride + (row % heads) * head_stride
    own = column
    if BY_HEAD:
        own = (row % heads)[:, None] * size + column
    weights = tl.load(weight + own, mask=column < size, other=0)
    wait_for_inputs()
    let_next_start()
    values = tl.load(x + source[:, None] + column, mask=mask, other=0)
    normed = scaled(values.to(weights.dtype), inverse_rms(values, size, eps), weights)
    tl.store(out + row[:, None] * size + column, normed, mask=mask)


@launched(do_not_specialize=["rows"])
def _l2_clip_kernel(
    x, scale, out, rows, heads, size, token_stride, head_stride, most,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (column < size)
    source = (row // heads) * token_stride + (row % heads) * head_stride
    wait_for_inputs()
    let_next_start()
    values = tl.load(x + source[:, None] + column, mask=mask, other=0).to(tl.float32)
    if scale is not None:
        own = (row % heads)[:, None] * size + column
        values *= tl.load(scale + own, mask=column < size, other=0).to(tl.float32)
    length = tl.sqrt(tl.sum(values * values, axis=1)) + 1e-6
    values *= tl.minimum(most / length, 1.0)[:, None]
    tl.store(out + row[:, None] * size + column, values, mask=mask)


@launched
def _rms_norm_parts_kernel(x, weight, out, first, second, third, x_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = tl.where(part == 0, 0, tl.where(part == 1, first, first + second))
    size = tl.where(part == 0, first, tl.where(part == 1, second, third))
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < size
    column += begin
    weights = tl.load(weight + column, mask=mask, other=0)
    wait_for_inputs()
    let_next_start()
    values = tl.load(x + row * x_row + column, mask=mask, other=0)
    normed = scaled(values.to(weights.dtype), inverse_rms(values, size, eps), weights)
    tl.store(out + row * (first + second + third) + column, normed, mask=mask)


@launched
def _add_rms_norm_kernel(
    x, residual, weight, out, codes, scale, scale_row, scale_group, size, x_row, residual_row,
    multiplier, eps, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < size
    weights = tl.load(weight + column, mask=mask, other=0)
    wait_for_inputs()
    let_next_start()
    inputs = tl.load(x + row * x_row + column, mask=mask, other=0).to(tl.float32)
    carried = tl.load(residual + row * residual_row + column, mask=mask, other=0)
    store_normed_sum(
        inputs, carried, weights, residual, out, codes, scale, scale_row, scale_group, row, column,
        size, residual_row, multiplier, eps, x.dtype.element_ty, KIND, BLOCK,
    )  # fmt: skip


@launched
def _add_rms_norm_over_ranks_kernel(
    x, residual, weight, out, data, flags, turns,
    size, x_row, residual_row, multiplier, eps, rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < size
    turn = tl.load(turns + row) + 1
    place = ((turn & 1) * rows + row) * size
    inputs = tl.load(x + row * x_row + column, mask=mask, other=0)
    tl.store(address(data + RANK, x) + place + column, inputs, mask=mask)
    begin_turn(flags, turns, row, turn, RANK, RANKS)
    # Meanwhile: what needs no other rank.
    carried = tl.load(residual + row * residual_row + column, mask=mask, other=0)
    weights = tl.load(weight + column, mask=mask, other=0)
    wait_for_turns(flags, row, turn, RANK, RANKS)
    summed = tl.zeros((1, BLOCK), tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            summed += inputs.to(tl.float32)
        else:
            part = load_theirs(address(data + peer, x) + place + column, mask)
            summed += part.to(tl.float32)
    total, normed = add_and_norm(summed, carried, weights, multiplier, size, eps)
    tl.store(residual + row * residual_row + column, total, mask=mask)
    tl.store(out + row * size + column, normed, mask=mask)


@launched
def _gated_rms_norm_kernel(
    x, gate, weight, out, codes, scale, scale_row, scale_group, channels, group_size,
    x_row, gate_row, eps, KIND: tl.constexpr,
    NORM_FIRST: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    programs = channels // group_size // GROUPS
    row = (tl.program_id(0) // programs).to(tl.int64)
    first = tl.program_id(0) % programs * GROUPS * group_size
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < group_size
    column += first + tl.arange(0, GROUPS)[:, None] * group_size
    weights = tl.load(weight + column, mask=mask, other=0)
    wait_for_inputs()
    let_next_start()
    inputs = tl.load(x + row * x_row + column, mask=mask, other=0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + column, mask=mask, other=0).to(tl.float32)
    gates = gates * tl.sigmoid(gates) if SILU else tl.sigmoid(gates)
    values = inputs if NORM_FIRST else gates * inputs
    normed = scaled(values, inverse_rms(values, group_size, eps), weights)
    if NORM_FIRST:
        normed = normed.to(weights.dtype).to(tl.float32) * gates
    if out is not None:
        tl.store(out + row * channels + column, normed, mask=mask)
    if KIND is not None:
        normed = normed.to(weights.dtype).to(tl.float32)
        store_rounded(
            tl.reshape(normed, (GROUPS * BLOCK,)), codes + row * channels, scale + row * scale_row,
            scale_group, first, channels, KIND, GROUPS * BLOCK,
        )  # fmt: skip


@triton.jit
def add_and_norm(inputs, carried, weights, multiplier, size, eps):
    """[rows, columns], zeros past `size` -> carried + multiplier * inputs, in carried's dtype, and
    the norm of that in float32, to be rounded to the dtype that is wanted."""
    # Rounded before the norm is taken: the norm is that of the residual as it is kept.
    total = (carried.to(tl.float32) + multiplier * inputs).to(carried.dtype)
    return total, scaled(total.to(weights.dtype), inverse_rms(total, size, eps), weights)


@triton.jit
def store_normed_sum(
    inputs, carried, weights, residual, out, codes, scale, scale_row, scale_group, row, column,
    size, residual_row, multiplier, eps, TYPE: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """add_and_norm of a row [1, BLOCK], where it belongs: the sum to `residual`, the norm to `out`,
    and rounded by way of TYPE to `codes` and `scale`, if these are there."""
    mask = column < size
    total, normed = add_and_norm(inputs, carried, weights, multiplier, size, eps)
    tl.store(residual + row * residual_row + column, total, mask=mask)
    if out is not None:
        tl.store(out + row * size + column, normed, mask=mask)
    if KIND is not None:
        normed = tl.reshape(normed, (BLOCK,)).to(TYPE).to(tl.float32)
        store_rounded(
            normed, codes + row * size, scale + row * scale_row, scale_group, 0, size, KIND, BLOCK
        )


@triton.jit
def inverse_rms(values, size, eps):
    """values [rows, columns], zeros past `size` -> [rows, 1] float32."""
    values = values.to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / size + eps)


@triton.jit
def scaled(values, scale, weights):
    """values * scale * weights in float32, rounded to weights' dtype between the two."""
    rounded = (values.to(tl.float32) * scale).to(weights.dtype)
    return rounded.to(tl.float32) * weights.to(tl.float32)
