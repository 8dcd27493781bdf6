"""One token a sequence of the Mamba2 scan in Triton; see triton.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.devices import checked_output

LOG2_E = tl.constexpr(1.4426950408889634)


def decode(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    block_p: int = 8,
    num_warps: int = 1,
) -> Tensor:
    """As in reference.py; the outputs of padded rows are zeros. A program takes block_p rows of the
    state: many small programs keep most bytes in flight."""
    y = checked_output(x, out, x=x, B=B, C=C, dt=dt, state=state)
    rows, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    _decode_kernel[(head_dim // block_p, heads, rows)](
        x, B, C, dt, A, D, dt_bias, state, y, plan.read_slot, plan.write_slot,
        x.stride(0), B.stride(0), C.stride(0), dt.stride(0), y.stride(0), state.stride(0),
        heads // groups, *dt_limit,
        HEAD_DIM=head_dim,
        SIZE=size,
        BLOCK_P=block_p,
        num_warps=num_warps,
    )  # fmt: skip
    return y


@triton.jit
def softplus(z):
    """log(1 + e^z), accurate where e^z is tiny: the rounding of 1 + e is divided out."""
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    return tl.where(z > 20.0, z, log1p)


@triton.jit
def _decode_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, y_ptr, read_ptr, write_ptr,
    x_row, b_row, c_row, dt_row, y_row, state_slot,
    heads_per_group, dt_min, dt_max,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZE)
    y_ptrs = y_ptr + row * y_row + head * HEAD_DIM + p
    if (read <= 0) & (write <= 0):
        tl.store(y_ptrs, tl.zeros([BLOCK_P], tl.float32))
        return

    in_slot = head * (HEAD_DIM * SIZE) + p[:, None] * SIZE + n[None, :]
    h = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, HEAD_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    group = head // heads_per_group
    x = tl.load(x_ptr + row * x_row + head * HEAD_DIM + p).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + group * SIZE + n).to(tl.float32)
    c = tl.load(c_ptr + row * c_row + group * SIZE + n).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_row + head).to(tl.float32) + tl.load(bias_ptr + head)
    dt = tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)

    h = h * tl.exp2(dt * (tl.load(a_ptr + head) * LOG2_E)) + (dt * x)[:, None] * b[None, :]
    tl.store(
        state_ptr + write * state_slot + in_slot,
        h.to(state_ptr.dtype.element_ty),
        mask=(p < tl.where(write > 0, HEAD_DIM, 0))[:, None],
    )
    y = tl.sum(h * c[None, :], 1) + tl.load(d_ptr + head) * x
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))
