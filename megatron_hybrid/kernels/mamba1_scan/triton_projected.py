"""Mamba1's decodes from x_proj's result on: the inner norms, the step sizes' product and the scan
in one kernel.

A program is a warp with some channels of one sequence. Of the weight it has its channels' rows,
which are on their way, with the state, before x_proj has ended. The norms are of few numbers, so
that every program takes them for itself. As many threads share a channel's row of the weight as
share its state: nothing but the normalised low rank changes threads.

    weight      [channels, chunks, columns of a chunk]  -> step sizes [channels]
    low rank    [chunks, columns of a chunk]
    B, C        [channels, state], each row the same
    state       [channels, state]                       -> outputs [channels]

Roundings are those of three kernels one after the other: what is normalised has the model's type,
and so have the step sizes before their bias. Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import launched, next_power_of_2
from megatron_hybrid.kernels.mamba1_scan.triton_decode import after_token, outputs, softplus
from megatron_hybrid.kernels.norm.triton import inverse_rms, scaled
from megatron_hybrid.kernels.projected import LowRank
from megatron_hybrid.kernels.protocols import Mamba1Constants

MOST_SEQUENCES = 4  # each takes the weight from the L2 cache again
_MOST_RANK = 256  # the weights of more would leave registers for few programs at a time
_STATE_SIZES = (4, 8, 16, 32, 64, 128)
# By the layouts that Triton chooses: 4 threads of a warp have a channel, 16 bytes at a time.
_CHANNELS = 8  # of a program
_CHUNK = 32  # columns


def takes(plan: Any, low: LowRank, state: Tensor) -> bool:
    """Of few sequences, if states are written, with a weight in 16 bits."""
    if not isinstance(plan, DecodeSlots) or plan.read_slot.shape[0] > MOST_SEQUENCES:
        return False
    (channels, rank), size = low.weight.shape, state.shape[2]
    in_16_bits = low.weight.dtype == low.projected.dtype and low.weight.dtype.itemsize == 2
    fits = channels % _CHANNELS == 0 and rank <= _MOST_RANK and size in _STATE_SIZES
    return in_16_bits and fits


def decode(
    x: Tensor,
    z: Tensor,
    low: LowRank,
    constants: Mamba1Constants,
    state: Tensor,
    plan: DecodeSlots,
) -> Tensor:
    """As in ProjectedMamba1. The outputs of padded rows are zeros."""
    projected, weight, norm_weight, eps = low
    (count, channels), rank = x.shape, weight.shape[1]
    y = x.new_empty((count, channels))
    _kernel[(channels // _CHANNELS, count)](
        x, z, projected, weight, norm_weight, *constants[:3], state, y,
        plan.read_slot, plan.write_slot,
        x.stride(0), z.stride(0), projected.stride(0), weight.stride(0), y.stride(0),
        state.stride(0), eps,
        RANK=rank, CHUNKS=next_power_of_2(-(-rank // _CHUNK)), CHUNK=_CHUNK,
        SIZE=state.shape[2], BLOCK=_CHANNELS, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _kernel(
    x_ptr, z_ptr, low_ptr, weight_ptr, norm_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, y_ptr,
    read_ptr, write_ptr, x_row, z_row, low_row, weight_row, y_row, state_slot, eps,
    RANK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """See triton_decode's _decode_kernel."""
    row = tl.program_id(1).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    place = tl.arange(0, BLOCK)
    d = tl.program_id(0) * BLOCK + place
    if (read <= 0) & (write <= 0):
        wait_for_inputs()
        tl.store(y_ptr + row * y_row + d, tl.zeros([BLOCK], y_ptr.dtype.element_ty))
        return

    column = tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    in_rank = column < RANK
    weights = tl.load(
        weight_ptr + d[:, None, None] * weight_row + column[None, :, :], in_rank[None, :, :], 0.0
    )
    n = tl.broadcast_to(tl.arange(0, SIZE)[None, :], (BLOCK, SIZE))
    in_slot = d[:, None] * SIZE + n
    is_read = (place < tl.where(read > 0, BLOCK, 0))[:, None]
    is_written = (place < tl.where(write > 0, BLOCK, 0))[:, None]
    h = tl.load(state_ptr + read * state_slot + in_slot, is_read, 0.0).to(tl.float32)
    a = tl.load(a_ptr + in_slot)
    bias = tl.load(bias_ptr + d)
    skip = tl.load(d_ptr + d)
    if norm_ptr is not None:
        low_scale = tl.load(norm_ptr + column, in_rank, 0.0)
        b_scale = tl.load(norm_ptr + RANK + n)
        c_scale = tl.load(norm_ptr + (RANK + SIZE) + n)

    wait_for_inputs()  # the state was there before
    let_next_start()
    low_ptr += row * low_row
    low = tl.load(low_ptr + column, in_rank, 0.0)
    b = tl.load(low_ptr + RANK + n)
    c = tl.load(low_ptr + (RANK + SIZE) + n)
    x = tl.load(x_ptr + row * x_row + d).to(tl.float32)
    z = tl.load(z_ptr + row * z_row + d).to(tl.float32)
    kind: tl.constexpr = low_ptr.dtype.element_ty
    if norm_ptr is not None:
        squares = low.to(tl.float32) * low.to(tl.float32)
        mean = tl.sum(tl.sum(squares, 1), 0) / RANK
        low = scaled(low, tl.rsqrt(mean + eps), low_scale).to(kind)
        b = scaled(b, inverse_rms(b, SIZE, eps), b_scale).to(kind)
        c = scaled(c, inverse_rms(c, SIZE, eps), c_scale).to(kind)
    products = weights.to(tl.float32) * low.to(tl.float32)[None, :, :]
    raw_dt = tl.sum(tl.sum(products, 1), 1).to(kind)
    dt = softplus(raw_dt.to(tl.float32) + bias)

    h = after_token(h, a, dt, x, b.to(tl.float32))
    tl.store(state_ptr + write * state_slot + in_slot, h.to(state_ptr.dtype.element_ty), is_written)
    y = outputs(h, c.to(tl.float32), skip, x, z)
    tl.store(y_ptr + row * y_row + d, y.to(y_ptr.dtype.element_ty))
