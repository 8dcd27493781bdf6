"""Decodes of the gated delta rule in Triton; see triton.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import checked_output, row_strides
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import (
    Gate,
    decayed,
    gates_at,
    load_decay,
    store_decay,
)
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import (
    check_dims,
    load_keys,
    of_keys,
    rows_of,
    store_keys,
)
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.mamba2_scan.triton_decode import store_state
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens, Rings
from megatron_hybrid.kernels.state_rounding.triton import as_stored

EPS = tl.constexpr(1e-6)  # in the lengths of q and k
MOST_AT_ONCE = 7  # unfolded tokens of a sequence, all of which a program keeps in registers


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
    keys = check_dims(k_dim, v_dim)
    _decode_kernel[(v_dim // block_v, heads, rows)](
        *tokens, *constants[:2], state, y, plan.read_slot, plan.write_slot,
        *row_strides(*tokens, y, state), heads // k_heads, k_dim**-0.5,
        K_DIM=k_dim, KEYS=keys, V_DIM=v_dim, BLOCK_V=block_v, GATE=Gate.of(tokens, constants),
        num_warps=num_warps, **OPTIONS,
    )  # fmt: skip
    return y


def decode_runs(
    tokens: DeltaRuleTokens,
    constants: DeltaRuleConstants,
    state: Tensor,
    ring: Rings,
    plan: DecodeRuns,
    out: Tensor | None = None,
    *,
    block_v: int | None = None,
) -> Tensor:
    """Rings are contiguous. The state stays in registers for the whole run. `block_v`: rows of a
    head's state that a program has, of single tokens that may leave states unwritten; None: as many
    as leave a warp's registers room for the rest."""
    y = checked_output(tokens, state, out)
    count, heads, v_dim = tokens.v.shape
    k_heads, k_dim = tokens.k.shape[1:]
    sequences, keys = plan.read_slot.shape[0], check_dims(k_dim, v_dim)
    if plan.most_unfolded is None or not 0 < plan.most_unfolded <= MOST_AT_ONCE:
        kernel, more, block_v = _runs_kernel, {}, 8
    else:
        kernel = _single_kernel
        block_v = rows_of(v_dim, max(4096 // keys, 8)) if block_v is None else block_v
        more = {"MOST": plan.most_unfolded, "LANES": min(32, keys)}
    kernel[(v_dim // block_v, heads, sequences + 1)](
        *tokens, *constants[:2], state, *ring, y, *plan.tensors, count,
        *row_strides(*tokens, y, state), k_dim**-0.5, constants.rounding_seed,
        HEADS=heads, K_HEADS=k_heads, RING=ring[0].shape[1],
        K_DIM=k_dim, KEYS=keys, V_DIM=v_dim, BLOCK_V=block_v, GATE=Gate.of(tokens, constants),
        num_warps=1, **more, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    state_ptr, y_ptr, read_ptr, write_ptr,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot, heads_per_key, scale,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    write = tl.load(write_ptr + row).to(tl.int64)
    p = part * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, KEYS)
    y_ptrs = y_ptr + row * y_row + head * V_DIM + p
    if (read <= 0) & (write <= 0):
        wait_for_inputs()
        tl.store(y_ptrs, tl.zeros([BLOCK_V], tl.float32))
        return

    in_slot = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    s = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=of_keys((p < tl.where(read > 0, V_DIM, 0))[:, None], n[None, :], K_DIM, KEYS),
        other=0.0,
    ).to(tl.float32)
    wait_for_inputs()  # the state was there before
    let_next_start()
    key_head = head // heads_per_key
    q = load_keys(q_ptr + row * q_row + key_head * K_DIM + n, n, K_DIM, KEYS).to(tl.float32)
    k = load_keys(k_ptr + row * k_row + key_head * K_DIM + n, n, K_DIM, KEYS).to(tl.float32)
    v = tl.load(v_ptr + row * v_row + head * V_DIM + p).to(tl.float32)
    a = load_decay(a_ptr + row * a_row, head, n, K_DIM, KEYS, GATE)
    b = tl.load(b_ptr + row * b_row + head)
    decay, beta = gates_at(a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)

    s = decayed(s, decay, GATE)
    d = beta * (v - tl.sum(s * k[None, :], 1))
    s += d[:, None] * k[None, :]
    tl.store(
        state_ptr + write * state_slot + in_slot,
        s.to(state_ptr.dtype.element_ty),
        mask=of_keys((p < tl.where(write > 0, V_DIM, 0))[:, None], n[None, :], K_DIM, KEYS),
    )
    y = tl.sum(s * q[None, :], 1)
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _advance(
    s, k, v, a, b, decay_ptr, bias_ptr, head, n, K_DIM: tl.constexpr, KEYS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The state after one token; s [v, k_dim] float32, k [k_dim] and v [v] as they came."""
    decay, beta = gates_at(a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
    k = k.to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    s = decayed(s, decay, GATE)
    d = beta * (v.to(tl.float32) - tl.sum(s * k[None, :], 1))
    return s + d[:, None] * k[None, :]


@launched(do_not_specialize=["tokens"])
def _runs_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    state_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr, y_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot, scale, seed,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // (HEADS // K_HEADS)
    p = part * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, KEYS)
    A_ROW: tl.constexpr = HEADS * K_DIM if GATE.by_channel else HEADS
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
        mask=of_keys((p < tl.where(read > 0, V_DIM, 0))[:, None], n[None, :], K_DIM, KEYS),
        other=0.0,
    ).to(tl.float32)
    of_state = p[:, None]
    if KEYS != K_DIM:  # no row of a state has what is stored of the other columns
        of_state = tl.where(n[None, :] < K_DIM, of_state, V_DIM)

    for earlier in range(position - unfolded, position):
        place = ring + earlier % RING
        in_ring = place * (K_HEADS * K_DIM) + key_head * K_DIM
        k = load_keys(ring_k_ptr + in_ring + n, n, K_DIM, KEYS)
        v = tl.load(ring_v_ptr + place * (HEADS * V_DIM) + head * V_DIM + p)
        a = load_decay(ring_a_ptr + place * A_ROW, head, n, K_DIM, KEYS, GATE)
        b = tl.load(ring_b_ptr + place * HEADS + head)
        s = _advance(s, k, v, a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
        if earlier + 1 == checkpoint_position:
            store_state(
                state_ptr, checkpoint, state_slot, in_slot, s, of_state, seed, earlier + 1,
                V_DIM,
            )  # fmt: skip
    if begin == end:
        store_state(state_ptr, write, state_slot, in_slot, s, of_state, seed, position, V_DIM)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        k = load_keys(k_ptr + row * k_row + key_head * K_DIM + n, n, K_DIM, KEYS)
        v = tl.load(v_ptr + row * v_row + head * V_DIM + p)
        a = load_decay(a_ptr + row * a_row, head, n, K_DIM, KEYS, GATE)
        b = tl.load(b_ptr + row * b_row + head)
        s = _advance(s, k, v, a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
        q = load_keys(q_ptr + row * q_row + key_head * K_DIM + n, n, K_DIM, KEYS).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
        y = tl.sum(s * q[None, :], 1)
        tl.store(y_ptr + row * y_row + head * V_DIM + p, y.to(y_ptr.dtype.element_ty))
        if token == begin:
            after = position + 1
            store_state(state_ptr, write, state_slot, in_slot, s, of_state, seed, after, V_DIM)
            if after == checkpoint_position:
                store_state(
                    state_ptr, checkpoint, state_slot, in_slot, s, of_state, seed, after, V_DIM
                )
        if (token > begin) | (write <= 0):
            place = ring + (position + token - begin) % RING
            tl.store(ring_v_ptr + place * (HEADS * V_DIM) + head * V_DIM + p, v)
            if part == 0:
                store_decay(ring_a_ptr + place * A_ROW, a, head, n, K_DIM, KEYS, GATE)
                tl.store(ring_b_ptr + place * HEADS + head, b)
                if head % (HEADS // K_HEADS) == 0:
                    in_ring = place * (K_HEADS * K_DIM) + key_head * K_DIM
                    store_keys(ring_k_ptr + in_ring + n, k, n, K_DIM, KEYS)


@triton.jit
def _load_if(ptrs, number):
    """Zeros unless the number is above 0."""
    return tl.load(ptrs, mask=tl.zeros(ptrs.shape, tl.int32) < number, other=0.0)


@triton.jit
def _load_keys_if(ptrs, number, n, K_DIM: tl.constexpr, KEYS: tl.constexpr):
    """The same of columns n of KEYS."""
    mask = of_keys(tl.zeros(ptrs.shape, tl.int32) < number, n, K_DIM, KEYS)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _load_decay_if(
    row_ptr, number, head, n, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """load_decay; zeros unless the number is above 0."""
    if GATE.by_channel:
        found = _load_keys_if(row_ptr + head * K_DIM + n, number, n, K_DIM, KEYS)
    else:
        found = tl.load(row_ptr + head, mask=number > 0, other=0.0)
    return found


@triton.jit
def _dot(x, y):
    """Of vectors [columns, lanes]."""
    return tl.sum(tl.sum(x * y, 0), 0)


@triton.jit
def _times(s, x):
    """s x, of s [rows, columns, lanes] and x [columns, lanes]: [rows]."""
    return tl.sum(tl.sum(s * x[None, :, :], 1), 1)


@triton.jit
def _normalised(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(_dot(x, x) + EPS)


@triton.jit
def _passed(
    x, y, k, v, a, b, decay_ptr, bias_ptr, head, n, exists, K_DIM: tl.constexpr,
    KEYS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """x and y before a token, of those after it; see _single_kernel."""
    decay, beta = gates_at(a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
    decay, beta = tl.where(exists, decay, 0.0), tl.where(exists, beta, 0.0)
    k = _normalised(k)
    taken = beta * _dot(k, x)
    return (x - taken * k) * tl.exp2(decay), y + taken * v.to(tl.float32)


@triton.jit
def _next(
    s, k, v, a, b, decay_ptr, bias_ptr, head, n, K_DIM: tl.constexpr, KEYS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The state after a token, as _advance."""
    decay, beta = gates_at(a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
    k = _normalised(k)
    s = decayed(s, decay, GATE)
    d = beta * (v.to(tl.float32) - _times(s, k))
    return s + d[:, None, None] * k[None, :, :]


@triton.jit
def _store_part(
    state_ptr, begin, in_part, s, seed, position, n, K_DIM: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """A part of a slot's state, which begins there, after so many tokens."""
    values = as_stored(s, state_ptr.dtype.element_ty, seed, position, begin + in_part)
    store_keys(state_ptr + begin + in_part, values, n[None, :, :], K_DIM, KEYS)


@launched(do_not_specialize=["tokens"])
def _single_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    state_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr, y_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot, scale, seed,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, MOST: tl.constexpr,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of sequences of one token each. Where no state is written, none is formed, and the one that
    is read is multiplied by one vector, however many tokens are unfolded. For with S' the state
    after a token and S the one before it

        S' x + y = S decay (x - beta (k . x) k) + (y + beta (k . x) v)

    so from x = q and y = 0 behind the last token, x and y go back token by token, which takes
    vectors alone, and end as S x + y of the state that is read.

    A state's columns are [columns / LANES, LANES], behind the rows: so Triton 3.6 gives the lanes
    that a part of a row leaves to other rows, and sums over columns are mostly sums in a lane.
    Addresses are a scalar and what lies behind it, which loads have as a constant.
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // (HEADS // K_HEADS)
    p = tl.arange(0, BLOCK_V)
    in_v = head * V_DIM + part * BLOCK_V  # there this program's numbers begin
    begin = tl.load(cu_ptr + sequence)
    if sequence == tl.num_programs(2) - 1:  # the padding
        wait_for_inputs()
        for token in range(begin, tokens):
            y_ptrs = y_ptr + (tl.cast(token, tl.int64) * y_row + in_v) + p
            tl.store(y_ptrs, tl.zeros([BLOCK_V], y_ptr.dtype.element_ty))
        return

    count = tl.load(cu_ptr + sequence + 1) - begin  # 1, or 0: only folds
    position = tl.load(position_ptr + sequence)
    unfolded = tl.load(unfolded_ptr + sequence)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    checkpoint = tl.load(checkpoint_slot_ptr + sequence).to(tl.int64)
    first = position - unfolded
    tokens_in = tl.load(checkpoint_position_ptr + sequence) - first
    if (unfolded + count == 0) & (write <= 0):
        return

    n = tl.arange(0, KEYS // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    A_ROW: tl.constexpr = HEADS * K_DIM if GATE.by_channel else HEADS
    in_k = key_head * K_DIM
    in_part = p[:, None, None] * K_DIM + n[None, :, :]
    s_ptrs = state_ptr + (read * state_slot + in_v * K_DIM) + in_part
    s = _load_keys_if(s_ptrs, read, n[None, :, :], K_DIM, KEYS).to(tl.float32)
    # What is unfolded, all of it in flight at once, where no state is written.
    kept = tl.where(write > 0, 0, unfolded)
    old_k, old_v, old_a, old_b = (), (), (), ()
    for j in tl.static_range(MOST):
        place = ring + (first + j) % RING
        k_ptrs = ring_k_ptr + (place * (K_HEADS * K_DIM) + in_k) + n
        v_ptrs = ring_v_ptr + (place * (HEADS * V_DIM) + in_v) + p
        old_k += (_load_keys_if(k_ptrs, kept - j, n, K_DIM, KEYS),)
        old_v += (_load_if(v_ptrs, kept - j),)
        old_a += (_load_decay_if(ring_a_ptr + place * A_ROW, kept - j, head, n, K_DIM, KEYS, GATE),)
        old_b += (tl.load(ring_b_ptr + place * HEADS + head, mask=j < kept, other=0.0),)

    wait_for_inputs()  # all that was there before
    row = tl.cast(begin, tl.int64)
    is_there = count > 0
    new_k = _load_keys_if(k_ptr + (row * k_row + in_k) + n, count, n, K_DIM, KEYS)
    q = _load_keys_if(q_ptr + (row * q_row + in_k) + n, count, n, K_DIM, KEYS)
    new_v = _load_if(v_ptr + (row * v_row + in_v) + p, count)
    new_a = _load_decay_if(a_ptr + row * a_row, count, head, n, K_DIM, KEYS, GATE)
    new_b = tl.load(b_ptr + row * b_row + head, mask=is_there, other=0.0)
    let_next_start()
    q = _normalised(q) * scale
    y_ptrs = y_ptr + (row * y_row + in_v) + p

    has_checkpoint = (checkpoint > 0) & (tokens_in > 0) & (tokens_in <= unfolded + count)
    if is_there & (write <= 0) & (has_checkpoint == 0):
        x, y = q, tl.zeros([BLOCK_V], tl.float32)
        x, y = _passed(
            x, y, new_k, new_v, new_a, new_b, decay_ptr, bias_ptr, head, n, True, K_DIM, KEYS, GATE
        )
        for i in tl.static_range(MOST - 1, -1, -1):
            x, y = _passed(
                x, y, old_k[i], old_v[i], old_a[i], old_b[i], decay_ptr, bias_ptr, head, n,
                i < kept, K_DIM, KEYS, GATE,
            )  # fmt: skip
        y += _times(s, x)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))
    else:
        for earlier in range(first, position):
            place = ring + earlier % RING
            k = load_keys(ring_k_ptr + (place * (K_HEADS * K_DIM) + in_k) + n, n, K_DIM, KEYS)
            v = tl.load(ring_v_ptr + (place * (HEADS * V_DIM) + in_v) + p)
            a = load_decay(ring_a_ptr + place * A_ROW, head, n, K_DIM, KEYS, GATE)
            b = tl.load(ring_b_ptr + place * HEADS + head)
            s = _next(s, k, v, a, b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE)
            if has_checkpoint & (earlier - first + 1 == tokens_in):
                to_slot = state_ptr + checkpoint * state_slot
                _store_part(to_slot, in_v * K_DIM, in_part, s, seed, earlier + 1, n, K_DIM, KEYS)
        if is_there:
            s = _next(
                s, new_k, new_v, new_a, new_b, decay_ptr, bias_ptr, head, n, K_DIM, KEYS, GATE
            )
            tl.store(y_ptrs, _times(s, q).to(y_ptr.dtype.element_ty))
        after = position + count
        if write > 0:
            to_slot = state_ptr + write * state_slot
            _store_part(to_slot, in_v * K_DIM, in_part, s, seed, after, n, K_DIM, KEYS)
        if is_there & has_checkpoint & (tokens_in == unfolded + 1):
            to_slot = state_ptr + checkpoint * state_slot
            _store_part(to_slot, in_v * K_DIM, in_part, s, seed, after, n, K_DIM, KEYS)
    if is_there & (write <= 0):
        place = ring + position % RING
        tl.store(ring_v_ptr + (place * (HEADS * V_DIM) + in_v) + p, new_v)
        if part == 0:
            store_decay(ring_a_ptr + place * A_ROW, new_a, head, n, K_DIM, KEYS, GATE)
            tl.store(ring_b_ptr + place * HEADS + head, new_b)
            if head % (HEADS // K_HEADS) == 0:
                k_ptrs = ring_k_ptr + (place * (K_HEADS * K_DIM) + in_k) + n
                store_keys(k_ptrs, new_k, n, K_DIM, KEYS)
