"""WIP"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.mamba1_scan.triton_decode import (
    LOG2_E,
    silu,
    softplus,
)


@triton.jit
def _load_row(x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, offset: tl.constexpr):
    pass


@triton.jit
def _prefill_kernel(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, y_ptr,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr, state_slot,
    X_ROW: tl.constexpr, Z_ROW: tl.constexpr, DT_ROW: tl.constexpr,
    B_ROW: tl.constexpr, C_ROW: tl.constexpr, Y_ROW: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    end = start + length
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)

    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = (
        tl.arange(0, SLICES)[:, None, None] * (SIZE // SLICES)
        + tl.arange(0, SIZE // SLICES)[None, None, :]
    )  # [slices, 1, states]
    in_slot = d[None, :, None] * SIZE + n
    state_ptrs = state_ptr + in_slot
    h = tl.load(state_ptrs + read * state_slot, mask=(in_slot >= 0) & (read > 0), other=0.0).to(tl.float32)
    if length > 0:
        a = tl.load(a_ptr + in_slot) * LOG2_E
        skip = tl.load(d_ptr + d)
        bias = tl.load(bias_ptr + d)
        origin = first_token - start  # the row at which position 0 would lie
        x_ptrs = x_ptr + origin * X_ROW + d
        z_ptrs = z_ptr + origin * Z_ROW + d
        dt_ptrs = dt_ptr + origin * DT_ROW + d
        b_ptrs = b_ptr + origin * B_ROW + n
        c_ptrs = c_ptr + origin * C_ROW + n
        y_ptrs = y_ptr + origin * Y_ROW + d
        checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
        last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
        due = tl.load(position_ptr + checkpoint, mask=checkpoint < last_checkpoint, other=2147483647).to(tl.int32)

        begin = start // PLACES * PLACES
        xs, zs, dts, bs, cs = _load_cut(x_ptrs, z_ptrs, dt_ptrs, b_ptrs, c_ptrs, begin, start, end,
            X_ROW, Z_ROW, DT_ROW, B_ROW, C_ROW, PLACES)
        for base in range(begin, end, PLACES):
            ahead = base + PLACES
            if ahead + PLACES <= end:
                at = ahead.to(tl.int64)
                xs1, zs1, dts1, bs1, cs1 = _load_whole(
                    x_ptrs + at * X_ROW, z_ptrs + at * Z_ROW, dt_ptrs + at * DT_ROW, b_ptrs + at * B_ROW, c_ptrs + at * C_ROW,
                    X_ROW, Z_ROW, DT_ROW, B_ROW, C_ROW, PLACES)
            else:
                xs1, zs1, dts1, bs1, cs1 = _load_cut(x_ptrs, z_ptrs, dt_ptrs, b_ptrs, c_ptrs, ahead, start, end,
                    X_ROW, Z_ROW, DT_ROW, B_ROW, C_ROW, PLACES)
            outputs = y_ptrs + base.to(tl.int64) * Y_ROW
            for i in tl.static_range(PLACES):
                dt = softplus(dts[i].to(tl.float32) + bias)
                x = xs[i].to(tl.float32)
                decay = tl.exp2(dt[None, :, None] * a)
                h = tl.fma(h, decay, (dt * x)[None, :, None] * bs[i].to(tl.float32))
                y = tl.sum(tl.sum(h * cs[i].to(tl.float32), 0), 1)
                y = tl.fma(skip, x, y) * silu(zs[i].to(tl.float32))
                valid = (base + i >= start) & (base + i < end)
                tl.store(outputs + i * Y_ROW, y.to(y_ptr.dtype.element_ty), mask=(d >= 0) & valid)
            while due <= tl.minimum(ahead, end):
                slot = tl.load(slot_ptr + checkpoint).to(tl.int64)
                if slot > 0:
                    tl.store(state_ptrs + slot * state_slot, h.to(state_ptr.dtype.element_ty))
                checkpoint += 1
                due = tl.load(position_ptr + checkpoint, mask=checkpoint < last_checkpoint, other=2147483647).to(tl.int32)
            xs, zs, dts, bs, cs = xs1, zs1, dts1, bs1, cs1
    if write > 0:
        tl.store(state_ptrs + write * state_slot, h.to(state_ptr.dtype.element_ty))


@triton.jit
def _load_whole(x_ptrs, z_ptrs, dt_ptrs, b_ptrs, c_ptrs,
    X_ROW: tl.constexpr, Z_ROW: tl.constexpr, DT_ROW: tl.constexpr,
    B_ROW: tl.constexpr, C_ROW: tl.constexpr, PLACES: tl.constexpr):
    xs = (tl.load(x_ptrs),)
    zs = (tl.load(z_ptrs),)
    dts = (tl.load(dt_ptrs),)
    bs = (tl.load(b_ptrs),)
    cs = (tl.load(c_ptrs),)
    for i in tl.static_range(1, PLACES):
        xs = xs + (tl.load(x_ptrs + i * X_ROW),)
        zs = zs + (tl.load(z_ptrs + i * Z_ROW),)
        dts = dts + (tl.load(dt_ptrs + i * DT_ROW),)
        bs = bs + (tl.load(b_ptrs + i * B_ROW),)
        cs = cs + (tl.load(c_ptrs + i * C_ROW),)
    return xs, zs, dts, bs, cs


@triton.jit
def _load_cut(x_ptrs, z_ptrs, dt_ptrs, b_ptrs, c_ptrs, base, start, end,
    X_ROW: tl.constexpr, Z_ROW: tl.constexpr, DT_ROW: tl.constexpr,
    B_ROW: tl.constexpr, C_ROW: tl.constexpr, PLACES: tl.constexpr):
    at = tl.minimum(tl.maximum(base, start), end - 1).to(tl.int64)
    xs = (tl.load(x_ptrs + at * X_ROW),)
    zs = (tl.load(z_ptrs + at * Z_ROW),)
    dts = (tl.where((base >= start) & (base < end), tl.load(dt_ptrs + at * DT_ROW), float("-inf")),)
    bs = (tl.load(b_ptrs + at * B_ROW),)
    cs = (tl.load(c_ptrs + at * C_ROW),)
    for i in tl.static_range(1, PLACES):
        at = tl.minimum(tl.maximum(base + i, start), end - 1).to(tl.int64)
        xs = xs + (tl.load(x_ptrs + at * X_ROW),)
        zs = zs + (tl.load(z_ptrs + at * Z_ROW),)
        dts = dts + (tl.where((base + i >= start) & (base + i < end), tl.load(dt_ptrs + at * DT_ROW), float("-inf")),)
        bs = bs + (tl.load(b_ptrs + at * B_ROW),)
        cs = cs + (tl.load(c_ptrs + at * C_ROW),)
    return xs, zs, dts, bs, cs
