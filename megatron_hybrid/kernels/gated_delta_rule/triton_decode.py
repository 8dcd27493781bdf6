"""One token a sequence of the gated delta rule in Triton; see triton.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.devices import checked_output
from megatron_hybrid.kernels.mamba2_scan.triton_decode import LOG2_E, softplus

EPS = tl.constexpr(1e-6)  # in the lengths of q and k


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    block_v: int = 8,
    num_warps: int = 1,
) -> Tensor:
    """As in reference.py; the outputs of padded rows are zeros. A program takes block_v rows of the
    state: many small programs keep most bytes in flight."""
    y = checked_output(v, out, q=q, k=k, v=v, a=a, b=b, state=state)
    rows, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    _decode_kernel[(v_dim // block_v, heads, rows)](
        q, k, v, a, b, A, dt_bias, state, y, plan.read_slot, plan.write_slot,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), y.stride(0),
        state.stride(0), heads // k_heads, k_dim**-0.5,
        K_DIM=k_dim,
        V_DIM=v_dim,
        BLOCK_V=block_v,
        num_warps=num_warps,
    )  # fmt: skip
    return y


@triton.jit
def gates(a, b, a_log_ptr, bias_ptr, head):
    """log2(e) * g, and beta."""
    decay = softplus(a.to(tl.float32) + tl.load(bias_ptr + head)) * tl.load(a_log_ptr + head)
    return decay * LOG2_E, tl.sigmoid(b.to(tl.float32))


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    state_ptr, y_ptr, read_ptr, write_ptr,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot, heads_per_key, scale,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    p = part * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, K_DIM)
    y_ptrs = y_ptr + row * y_row + head * V_DIM + p
    if (read <= 0) & (write <= 0):
        tl.store(y_ptrs, tl.zeros([BLOCK_V], tl.float32))
        return

    in_slot = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    s = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, V_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    key_head = head // heads_per_key
    q = tl.load(q_ptr + row * q_row + key_head * K_DIM + n).to(tl.float32)
    k = tl.load(k_ptr + row * k_row + key_head * K_DIM + n).to(tl.float32)
    v = tl.load(v_ptr + row * v_row + head * V_DIM + p).to(tl.float32)
    a = tl.load(a_ptr + row * a_row + head)
    b = tl.load(b_ptr + row * b_row + head)
    decay, beta = gates(a, b, decay_ptr, bias_ptr, head)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)

    s *= tl.exp2(decay)
    d = beta * (v - tl.sum(s * k[None, :], 1))
    s += d[:, None] * k[None, :]
    tl.store(
        state_ptr + write * state_slot + in_slot,
        s.to(state_ptr.dtype.element_ty),
        mask=(p < tl.where(write > 0, V_DIM, 0))[:, None],
    )
    y = tl.sum(s * q[None, :], 1)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))
