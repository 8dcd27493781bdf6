"""Decodes of the Mamba1 scan in Triton, and what its kernels share; see triton.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels import devices
from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import row_strides
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.mamba2_scan.triton_decode import store_state
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens, Rings

LOG2_E = tl.constexpr(1.4426950408889634)


def decode(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    block_bytes: int = 4096,
    num_warps: int = 1,
) -> Tensor:
    """The outputs of padded rows are zeros. A program takes about block_bytes of a state: many
    small programs keep most bytes in flight."""
    y = checked_output(tokens, constants, state, out)
    (rows, channels), size = tokens.x.shape, constants.A.shape[1]
    block = channel_block(channels, max(1, block_bytes // (size * state.element_size())))
    _decode_kernel[(channels // block, rows)](
        *tokens, *constants[:3], state, y, plan.read_slot, plan.write_slot,
        *row_strides(*tokens, y, state), SIZE=size, BLOCK=block, num_warps=num_warps,
        **OPTIONS,
    )  # fmt: skip
    return y


def decode_runs(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    ring: Rings,
    plan: DecodeRuns,
    out: Tensor | None = None,
) -> Tensor:
    """Rings are contiguous. The state stays in registers for the whole run."""
    y = checked_output(tokens, constants, state, out)
    (count, channels), size = tokens.x.shape, constants.A.shape[1]
    block = channel_block(channels, max(1, 4096 // (size * state.element_size())))
    _runs_kernel[(channels // block, plan.read_slot.shape[0] + 1)](
        *tokens, *constants[:3], state, *ring, y, *plan.tensors, count,
        *row_strides(*tokens, y, state), constants.rounding_seed,
        CHANNELS=channels, RING=ring[0].shape[1], SIZE=size, BLOCK=block, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return y


def checked_output(
    tokens: Mamba1Tokens, constants: Mamba1Constants, state: Tensor, out: Tensor | None
) -> Tensor:
    """As devices.checked_output; raises ValueError for other sizes of a state, too."""
    size = constants.A.shape[1]
    if size not in (4, 8, 16, 32, 64, 128):
        raise ValueError(f"the state size is {size}; it must be a power of two from 4 to 128.")
    for name, tensor in zip(constants._fields[:3], constants[:3], strict=True):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())} for the shape {tuple(tensor.shape)}; "
                "it must be contiguous."
            )
    return devices.checked_output(tokens, state, out)


def channel_block(channels: int, most: int) -> int:
    """Channels of a program: the largest power of two up to `most` that divides all."""
    return min(channels & -channels, 1 << (most.bit_length() - 1))


@triton.jit
def softplus(v):
    """log(1 + e^v) = max(v, 0) + log(1 + e), e = e^-|v|; 0 for minus infinity. log(1 + e) / e on
    [0, 1] is a polynomial of the least relative error, 3e-7: the device's own approximation of the
    logarithm loses small steps, and a logarithm that does not would cost more."""
    e = tl.exp2(tl.abs(v) * -LOG2_E)
    p = tl.fma(e, -0.008539209142327309, 0.04408963769674301)
    p = tl.fma(e, p, -0.10768172889947891)
    p = tl.fma(e, p, 0.1774524301290512)
    p = tl.fma(e, p, -0.2449546456336975)
    p = tl.fma(e, p, 0.33275479078292847)
    p = tl.fma(e, p, -0.4999740421772003)
    p = tl.fma(e, p, 0.9999998211860657)
    return tl.fma(e, p, tl.maximum(v, 0.0))


@triton.jit
def silu(v):
    """v / (1 + e^-v); rsqrt squared, because a division costs more."""
    r = tl.rsqrt(1.0 + tl.exp2(v * -LOG2_E))
    return v * (r * r)


@triton.jit
def after_token(h, a, dt, x, b):
    """States h [channels, state] with a token's step sizes and inputs [channels], and its B, which
    has one row or a row for each channel."""
    return tl.fma(h, tl.exp2((dt * LOG2_E)[:, None] * a), (dt * x)[:, None] * b)


@triton.jit
def outputs(h, c, skip, x, z):
    """[channels], of states with this token."""
    return (tl.sum(h * c, 1) + skip * x) * silu(z)


@launched
def _decode_kernel(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, y_ptr, read_ptr, write_ptr,
    x_row, z_row, dt_row, b_row, c_row, y_row, state_slot,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    place = tl.arange(0, BLOCK)
    d = tl.program_id(0) * BLOCK + place
    n = tl.arange(0, SIZE)
    if (read <= 0) & (write <= 0):
        wait_for_inputs()
        tl.store(y_ptr + row * y_row + d, tl.zeros([BLOCK], y_ptr.dtype.element_ty))
        return

    in_slot = d[:, None] * SIZE + n[None, :]
    is_read = (place < tl.where(read > 0, BLOCK, 0))[:, None]
    is_written = (place < tl.where(write > 0, BLOCK, 0))[:, None]
    h = tl.load(state_ptr + read * state_slot + in_slot, is_read, 0.0).to(tl.float32)
    a = tl.load(a_ptr + in_slot)
    wait_for_inputs()  # the state was there before
    let_next_start()
    x = tl.load(x_ptr + row * x_row + d).to(tl.float32)
    z = tl.load(z_ptr + row * z_row + d).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + n).to(tl.float32)
    c = tl.load(c_ptr + row * c_row + n).to(tl.float32)
    dt = softplus(tl.load(dt_ptr + row * dt_row + d).to(tl.float32) + tl.load(bias_ptr + d))

    h = after_token(h, a, dt, x, b[None, :])
    tl.store(state_ptr + write * state_slot + in_slot, h.to(state_ptr.dtype.element_ty), is_written)
    y = outputs(h, c[None, :], tl.load(d_ptr + d), x, z)
    tl.store(y_ptr + row * y_row + d, y.to(y_ptr.dtype.element_ty))


@launched(do_not_specialize=["tokens"])
def _runs_kernel(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, ring_x_ptr, ring_dt_ptr, ring_b_ptr, y_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    x_row, z_row, dt_row, b_row, c_row, y_row, state_slot, seed,
    CHANNELS: tl.constexpr, RING: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    d = tl.program_id(0) * BLOCK + lane
    n = tl.arange(0, SIZE)
    begin = tl.load(cu_ptr + sequence)
    if sequence == tl.num_programs(1) - 1:  # the padding
        for token in range(begin, tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + d
            tl.store(y_ptrs, tl.zeros([BLOCK], y_ptr.dtype.element_ty))
        return

    end = tl.load(cu_ptr + sequence + 1)
    position = tl.load(position_ptr + sequence)
    unfolded = tl.load(unfolded_ptr + sequence)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(checkpoint_position_ptr + sequence)
    checkpoint = tl.load(checkpoint_slot_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    in_slot = d[:, None] * SIZE + n[None, :]
    is_read = (lane < tl.where(read > 0, BLOCK, 0))[:, None]
    h = tl.load(state_ptr + read * state_slot + in_slot, is_read, 0.0).to(tl.float32)
    a = tl.load(a_ptr + in_slot)
    bias = tl.load(bias_ptr + d)
    skip = tl.load(d_ptr + d)

    for earlier in range(position - unfolded, position):
        place = ring + earlier % RING
        x = tl.load(ring_x_ptr + place * CHANNELS + d).to(tl.float32)
        b = tl.load(ring_b_ptr + place * SIZE + n).to(tl.float32)
        dt = softplus(tl.load(ring_dt_ptr + place * CHANNELS + d).to(tl.float32) + bias)
        h = after_token(h, a, dt, x, b[None, :])
        if earlier + 1 == checkpoint_position:
            store_state(
                state_ptr, checkpoint, state_slot, in_slot, h, lane[:, None], seed, earlier + 1,
                BLOCK,
            )  # fmt: skip
    if begin == end:
        store_state(state_ptr, write, state_slot, in_slot, h, lane[:, None], seed, position, BLOCK)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        raw_x = tl.load(x_ptr + row * x_row + d)
        raw_dt = tl.load(dt_ptr + row * dt_row + d)
        raw_b = tl.load(b_ptr + row * b_row + n)
        c = tl.load(c_ptr + row * c_row + n).to(tl.float32)
        z = tl.load(z_ptr + row * z_row + d).to(tl.float32)
        x, b = raw_x.to(tl.float32), raw_b.to(tl.float32)
        dt = softplus(raw_dt.to(tl.float32) + bias)
        h = after_token(h, a, dt, x, b[None, :])
        y = outputs(h, c[None, :], skip, x, z)
        tl.store(y_ptr + row * y_row + d, y.to(y_ptr.dtype.element_ty))
        if token == begin:
            after = position + 1
            store_state(state_ptr, write, state_slot, in_slot, h, lane[:, None], seed, after, BLOCK)
            if after == checkpoint_position:
                store_state(
                    state_ptr, checkpoint, state_slot, in_slot, h, lane[:, None], seed, after,
                    BLOCK,
                )  # fmt: skip
        if (token > begin) | (write <= 0):
            place = ring + (position + token - begin) % RING
            tl.store(ring_x_ptr + place * CHANNELS + d, raw_x)
            tl.store(ring_dt_ptr + place * CHANNELS + d, raw_dt)
            if tl.program_id(0) == 0:
                tl.store(ring_b_ptr + place * SIZE + n, raw_b)
