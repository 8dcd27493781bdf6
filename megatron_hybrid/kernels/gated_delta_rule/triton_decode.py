"""Decodes of the gated delta rule in Triton; see triton.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import checked_output, row_strides
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.mamba2_scan.triton_decode import LOG2_E, softplus, store_state
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens, Rings

EPS = tl.constexpr(1e-6)  # in the lengths of q and k


def decode(
    tokens: DeltaRuleTokens,
    constants: DeltaRuleConstants,
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    block_v: int = 8,
    num_warps: int = 1,
) -> Tensor:
    """The outputs of padded rows are zeros. A program takes block_v rows of the state: many small
    programs keep most bytes in flight."""
    y = checked_output(tokens, state, out)
    rows, heads, v_dim = tokens.v.shape
    k_heads, k_dim = tokens.k.shape[1:]
    _decode_kernel[(v_dim // block_v, heads, rows)](
        *tokens, *constants[:2], state, y, plan.read_slot, plan.write_slot,
        *row_strides(*tokens, y, state), heads // k_heads, k_dim**-0.5,
        K_DIM=k_dim, V_DIM=v_dim, BLOCK_V=block_v, num_warps=num_warps, **OPTIONS,
    )  # fmt: skip
    return y


def decode_runs(
    tokens: DeltaRuleTokens,
    constants: DeltaRuleConstants,
    state: Tensor,
    ring: Rings,
    plan: DecodeRuns,
    out: Tensor | None = None,
) -> Tensor:
    """Rings are contiguous. The state stays in registers for the whole run."""
    y = checked_output(tokens, state, out)
    count, heads, v_dim = tokens.v.shape
    k_heads, k_dim = tokens.k.shape[1:]
    _runs_kernel[(v_dim // 8, heads, plan.read_slot.shape[0] + 1)](
        *tokens, *constants[:2], state, *ring, y, *plan.tensors, count,
        *row_strides(*tokens, y, state), heads // k_heads, k_dim**-0.5, constants.rounding_seed,
        HEADS=heads, K_HEADS=k_heads, RING=ring[0].shape[1],
        K_DIM=k_dim, V_DIM=v_dim, BLOCK_V=8, num_warps=1, **OPTIONS,
    )  # fmt: skip
    return y


@triton.jit
def gates(a, b, a_log_ptr, bias_ptr, head):
    """log2(e) * g, and beta."""
    bias, rate = tl.load(bias_ptr + head), tl.load(a_log_ptr + head)
    return softplus(a.to(tl.float32) + bias) * rate * LOG2_E, tl.sigmoid(b.to(tl.float32))


@launched
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
        wait_for_inputs()
        tl.store(y_ptrs, tl.zeros([BLOCK_V], tl.float32))
        return

    in_slot = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    s = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, V_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    wait_for_inputs()  # the state was there before
    let_next_start()
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


@triton.jit
def _advance(s, k, v, a, b, decay_ptr, bias_ptr, head):
    """The state after one token; s [v, k_dim] float32, k [k_dim] and v [v] as they came."""
    decay, beta = gates(a, b, decay_ptr, bias_ptr, head)
    k = k.to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    s *= tl.exp2(decay)
    d = beta * (v.to(tl.float32) - tl.sum(s * k[None, :], 1))
    return s + d[:, None] * k[None, :]


@launched(do_not_specialize=["tokens"])
def _runs_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    state_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr, y_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot, heads_per_key, scale, seed,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // heads_per_key
    p = part * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, K_DIM)
    wait_for_inputs()
    begin = tl.load(cu_ptr + sequence)
    if sequence == tl.num_programs(2) - 1:  # the padding
        for token in range(begin, tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + head * V_DIM + p
            tl.store(y_ptrs, tl.zeros([BLOCK_V], y_ptr.dtype.element_ty))
        return

    end = tl.load(cu_ptr + sequence + 1)
    position = tl.load(position_ptr + sequence)
    unfolded = tl.load(unfolded_ptr + sequence)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(checkpoint_position_ptr + sequence)
    checkpoint = tl.load(checkpoint_slot_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    in_slot = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    s = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, V_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)

    for earlier in range(position - unfolded, position):
        place = ring + earlier % RING
        k = tl.load(ring_k_ptr + place * (K_HEADS * K_DIM) + key_head * K_DIM + n)
        v = tl.load(ring_v_ptr + place * (HEADS * V_DIM) + head * V_DIM + p)
        a = tl.load(ring_a_ptr + place * HEADS + head)
        b = tl.load(ring_b_ptr + place * HEADS + head)
        s = _advance(s, k, v, a, b, decay_ptr, bias_ptr, head)
        if earlier + 1 == checkpoint_position:
            store_state(
                state_ptr, checkpoint, state_slot, in_slot, s, p[:, None], seed, earlier + 1,
                V_DIM,
            )  # fmt: skip
    if begin == end:
        store_state(state_ptr, write, state_slot, in_slot, s, p[:, None], seed, position, V_DIM)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        k = tl.load(k_ptr + row * k_row + key_head * K_DIM + n)
        v = tl.load(v_ptr + row * v_row + head * V_DIM + p)
        a = tl.load(a_ptr + row * a_row + head)
        b = tl.load(b_ptr + row * b_row + head)
        s = _advance(s, k, v, a, b, decay_ptr, bias_ptr, head)
        q = tl.load(q_ptr + row * q_row + key_head * K_DIM + n).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
        y = tl.sum(s * q[None, :], 1)
        tl.store(y_ptr + row * y_row + head * V_DIM + p, y.to(y_ptr.dtype.element_ty))
        if token == begin:
            after = position + 1
            store_state(state_ptr, write, state_slot, in_slot, s, p[:, None], seed, after, V_DIM)
            if after == checkpoint_position:
                store_state(
                    state_ptr, checkpoint, state_slot, in_slot, s, p[:, None], seed, after, V_DIM
                )
        if (token > begin) | (write <= 0):
            place = ring + (position + token - begin) % RING
            tl.store(ring_v_ptr + place * (HEADS * V_DIM) + head * V_DIM + p, v)
            if part == 0:
                tl.store(ring_a_ptr + place * HEADS + head, a)
                tl.store(ring_b_ptr + place * HEADS + head, b)
                if head % heads_per_key == 0:
                    tl.store(ring_k_ptr + place * (K_HEADS * K_DIM) + key_head * K_DIM + n, k)
