"""Mamba2's Replay in Triton: a token has the same bits in decodes, drafts and prompts. What it
computes is in reference.py.

A program has some rows of one head's state, h [p, n], and walks over a sequence's chunks of TILE
tokens. With l and s places in a chunk, whose tokens come from the ring or from the call:

    cs[l]   = log2(e) * sum of dt[i] A for i <= l                         (decay, base 2)
    W[l, s] = (C[l] . B[s]) exp2(cs[l] - cs[s]) dt[s]  for s <= l, else 0
    y^T     = exp2(cs) * (h C^T) + x^T W^T + D x^T
    h       = exp2(cs[last]) h + (exp2(cs[last] - cs) * dt * x)^T B

All of a chunk is computed each time, of which the outputs of the call's own tokens are stored: rows
of a product do not mix, and what is not there yet is zeros. The state is the products' left side
and stays in registers.

Single decodes have a kernel of their own for the same operations. What counts there is how fast
states arrive: it has no loop whose inputs would be loaded ahead, into memory that other programs of
the processor can have.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import aligned, checked_output, row_strides
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.mamba2_scan.triton_decode import LOG2_E, softplus
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens, Rings
from megatron_hybrid.kernels.replay_triton.segments import (
    POINTERS,
    ReplaySegments,
    checkpoint_at,
    keep,
    of_sequence,
)
from megatron_hybrid.kernels.replay_triton.tiles import (
    TILE,
    Tiling,
    rows_of,
    store_padding,
    tiling_of,
)
from megatron_hybrid.kernels.replay_triton.tiles import plan as plan


def run(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    ring: Rings,
    plan: ReplaySegments,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """As in Replay. head_dim and state must be powers of two of at least 16; rings are contiguous.
    `tiling`: another than tiling_of's, for whose bits nothing is promised."""
    y = checked_output(tokens, state, out)
    A, D, dt_bias, dt_limit, _ = constants
    x, B, C, dt = aligned(tokens.x), aligned(tokens.B), aligned(tokens.C), tokens.dt
    count, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    chosen = tiling or tiling_of(head_dim, x.dtype, plan.is_single)
    block_p, num_warps, num_stages = chosen
    arguments = (
        x, B, C, dt, A, D, dt_bias, state, *ring, y, *plan.figures, count, plan.is_prompt,
        *row_strides(x, B, C, dt, y, state), *dt_limit, heads, groups, ring[0].shape[1], head_dim,
        size, TILE, block_p,
    )  # fmt: skip
    grid = head_dim // block_p, heads, plan.sequences + 1
    if plan.is_single:
        _decode_kernel[grid](rows_of(state, block_p), *arguments, num_warps=num_warps, **OPTIONS)
    else:
        _replay_kernel[grid](*arguments, STAGES=num_stages, num_warps=num_warps)
    if plan.is_prompt:
        keep((x, B, dt), ring, plan)
    return y


@launched(do_not_specialize=["tokens", "is_prompt"], do_not_specialize_on_alignment=POINTERS)
def _replay_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, is_prompt,
    x_row, b_row, c_row, dt_row, y_row, state_slot, dt_min, dt_max,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    if sequence == tl.num_programs(2) - 1:  # the padding
        store_padding(y_ptr, cu_ptr, sequence, tokens, y_row, head * HEAD_DIM + p)
        return
    begin, start, end, first, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, TILE
    )
    read = tl.load(read_ptr + sequence).to(tl.int64)
    group = head // (HEADS // GROUPS)
    n = tl.arange(0, SIZE)
    in_state = head * (HEAD_DIM * SIZE) + p[:, None] * SIZE + n[None, :]
    h = tl.zeros([BLOCK_P, SIZE], tl.float32)
    if read > 0:
        h = tl.load(state_ptr + read * state_slot + in_state).to(tl.float32)
    a, d, bias = tl.load(a_ptr + head) * LOG2_E, tl.load(d_ptr + head), tl.load(bias_ptr + head)
    origin = begin - start  # the row at which position 0 would lie
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    x_ptr += origin * x_row + head * HEAD_DIM
    b_ptr += origin * b_row + group * SIZE
    c_ptr += origin * c_row + group * SIZE
    dt_ptr += origin * dt_row + head
    y_ptr += origin * y_row + head * HEAD_DIM
    ring_x_ptr += ring * (HEADS * HEAD_DIM) + head * HEAD_DIM
    ring_b_ptr += ring * (GROUPS * SIZE) + group * SIZE
    ring_dt_ptr += ring * HEADS + head

    # What is replayed and its chunk's other tokens, if they complete it.
    t0 = first // TILE
    completes = (first < start) & ((t0 + 1) * TILE <= last)
    if completes:
        x, b, raw_dt, y, decayed, scaled = _tile(
            h.to(x_ptr.dtype.element_ty), x_ptr, b_ptr, c_ptr, dt_ptr, ring_x_ptr, ring_b_ptr,
                ring_dt_ptr, a, d, bias,
            t0, first, start, end, p, n, x_row, b_row, c_row, dt_row, dt_min, dt_max,
            HEADS, GROUPS, RING, HEAD_DIM, SIZE, TILE, True,
        )  # fmt: skip
        _store(y_ptr, y, t0, start, end, p, y_row, TILE)
        h = tl.dot(scaled, b, h * decayed, input_precision="ieee")
    done = t0 + tl.where(completes, 1, 0)
    first_checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    checkpoints = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    # From one state that is left to the next.
    for i in range(first_checkpoint, checkpoints + 1):
        position, slot = checkpoint_at(
            position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i, checkpoints, first, last
        )
        # Not carried from one round to the next: Triton 3.6 starts the loop from its first value.
        begin_at = first
        if i > first_checkpoint:
            begin_at, _ = checkpoint_at(
                position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i - 1, checkpoints, first,
                last,
            )  # fmt: skip
        from_tile = tl.maximum(begin_at // TILE, done)
        for t in tl.range(from_tile, position // TILE, num_stages=STAGES):
            x, b, raw_dt, y, decayed, scaled = _tile(
                h.to(x_ptr.dtype.element_ty), x_ptr, b_ptr, c_ptr, dt_ptr, ring_x_ptr, ring_b_ptr,
                ring_dt_ptr, a, d, bias,
                t, first, start, end, p, n, x_row, b_row, c_row, dt_row, dt_min, dt_max,
                HEADS, GROUPS, RING, HEAD_DIM, SIZE, TILE, False,
            )  # fmt: skip
            _store(y_ptr, y, t, start, end, p, y_row, TILE)
            h = tl.dot(scaled, b, h * decayed, input_precision="ieee")
        if slot > 0:
            tl.store(state_ptr + slot * state_slot + in_state, h.to(state_ptr.dtype.element_ty))
    for t in range(last // TILE, tl.cdiv(end, TILE)):
        x, b, raw_dt, y, decayed, scaled = _tile(
            h.to(x_ptr.dtype.element_ty), x_ptr, b_ptr, c_ptr, dt_ptr, ring_x_ptr, ring_b_ptr,
                ring_dt_ptr, a, d, bias,
            t, first, start, end, p, n, x_row, b_row, c_row, dt_row, dt_min, dt_max,
            HEADS, GROUPS, RING, HEAD_DIM, SIZE, TILE, True,
        )  # fmt: skip
        _store(y_ptr, y, t, start, end, p, y_row, TILE)
        if is_prompt == 0:
            at = t * TILE + tl.arange(0, TILE)
            is_own = (at >= start) & (at < end)
            place = at % RING
            to_x = ring_x_ptr + (place * (HEADS * HEAD_DIM))[None, :] + p[:, None]
            tl.store(to_x, x, mask=is_own[None, :])
            if tl.program_id(0) == 0:
                tl.store(ring_dt_ptr + place * HEADS, raw_dt, mask=is_own)
                if head % (HEADS // GROUPS) == 0:
                    to_b = ring_b_ptr + (place * (GROUPS * SIZE))[:, None] + n[None, :]
                    tl.store(to_b, b, mask=is_own[:, None])
        if (t + 1) * TILE < end:
            h = tl.dot(scaled, b, h * decayed, input_precision="ieee")


@launched(do_not_specialize=["tokens", "is_prompt"], do_not_specialize_on_alignment=POINTERS)
def _decode_kernel(
    states, x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, is_prompt,
    x_row, b_row, c_row, dt_row, y_row, state_slot, dt_min, dt_max,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Of sequences of one token, or none, all of whose chunk is in the ring. states: a tensor
    descriptor, of all rows of all states."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    if sequence == tl.num_programs(2) - 1:  # the padding
        wait_for_inputs()
        store_padding(y_ptr, cu_ptr, sequence, tokens, y_row, head * HEAD_DIM + p)
        return
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    checkpoint = tl.load(slot_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(position_ptr + sequence)
    begin, start, end, first, last = of_sequence(cu_ptr, start_ptr, unfolded_ptr, sequence, 0, TILE)
    group = head // (HEADS // GROUPS)
    n = tl.arange(0, SIZE)
    in_state = head * (HEAD_DIM * SIZE) + p[:, None] * SIZE + n[None, :]
    t = first // TILE
    old_x, old_b, old_dt = _replayed(
        ring_x_ptr + ring * (HEADS * HEAD_DIM) + head * HEAD_DIM,
        ring_b_ptr + ring * (GROUPS * SIZE) + group * SIZE, ring_dt_ptr + ring * HEADS + head,
        t, first, start, p, n, HEADS, GROUPS, RING, HEAD_DIM, SIZE, TILE,
    )  # fmt: skip
    a, d, bias = tl.load(a_ptr + head) * LOG2_E, tl.load(d_ptr + head), tl.load(bias_ptr + head)
    first_row = (read.to(tl.int32) * HEADS + head) * HEAD_DIM + tl.program_id(0) * BLOCK_P
    is_read = p[:, None] < tl.where(read > 0, HEAD_DIM, 0)
    h = tl.where(is_read, states.load([first_row, 0]), 0.0).to(x_ptr.dtype.element_ty)
    wait_for_inputs()  # the state and the ring were there before
    let_next_start()
    if (end == start) & (write == read):  # padding
        return
    origin = begin - start
    x, b, c, raw_dt = _own(
        x_ptr + origin * x_row + head * HEAD_DIM, b_ptr + origin * b_row + group * SIZE,
        c_ptr + origin * c_row + group * SIZE, dt_ptr + origin * dt_row + head,
        t, start, end, p, n, x_row, b_row, c_row, dt_row, TILE,
    )  # fmt: skip
    at = t * TILE + tl.arange(0, TILE)
    is_own = (at >= start) & (at < end)
    x = tl.where(is_own[None, :], x, old_x)
    b = tl.where(is_own[:, None], b, old_b)
    raw_dt = tl.where(is_own, raw_dt, old_dt)
    y, decayed, scaled = _chunk(
        h, x, b, c, raw_dt, (at >= first) & (at < end), a, d, bias, dt_min, dt_max, TILE
    )
    _store(y_ptr + origin * y_row + head * HEAD_DIM, y, t, start, end, p, y_row, TILE)
    is_complete = last > first
    if (is_complete == 0) & (end > start):
        place = ring + at % RING
        to_x = ring_x_ptr + (place * (HEADS * HEAD_DIM))[None, :] + head * HEAD_DIM + p[:, None]
        tl.store(to_x, x, mask=is_own[None, :])
        if tl.program_id(0) == 0:
            tl.store(ring_dt_ptr + place * HEADS + head, raw_dt, mask=is_own)
            if head % (HEADS // GROUPS) == 0:
                to_b = ring_b_ptr + (place * (GROUPS * SIZE))[:, None] + group * SIZE + n[None, :]
                tl.store(to_b, b, mask=is_own[:, None])
    if is_complete | (write != read):
        # Loaded once more: kept, it would take the registers of other programs.
        state = tl.where(is_read, states.load([first_row, 0]).to(tl.float32), 0.0)
        if is_complete:
            state = tl.dot(scaled, b, state * decayed, input_precision="ieee")
        values = state.to(state_ptr.dtype.element_ty)
        if write > 0:
            tl.store(state_ptr + write * state_slot + in_state, values)
        if (checkpoint > 0) & (checkpoint_position > first) & (checkpoint_position <= last):
            tl.store(state_ptr + checkpoint * state_slot + in_state, values)


@triton.jit
def _tile(
    h, x_ptr, b_ptr, c_ptr, dt_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, a, d, bias,
    t, first, start, end, p, n, x_row, b_row, c_row, dt_row, dt_min, dt_max,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    """_chunk of what the call and, where it REPLAYS, the ring have of a chunk; and x^T [p, TILE],
    B [TILE, n] and dt as they came."""
    x, b, c, raw_dt = _own(
        x_ptr, b_ptr, c_ptr, dt_ptr, t, start, end, p, n, x_row, b_row, c_row, dt_row, TILE
    )
    at = t * TILE + tl.arange(0, TILE)
    own = (at >= start) & (at < end)
    old = (at >= first) & (at < start)
    if REPLAYS:
        old_x, old_b, old_dt = _replayed(
            ring_x_ptr, ring_b_ptr, ring_dt_ptr, t, first, start, p, n,
            HEADS, GROUPS, RING, HEAD_DIM, SIZE, TILE,
        )  # fmt: skip
        x = tl.where(own[None, :], x, old_x)
        b = tl.where(own[:, None], b, old_b)
        raw_dt = tl.where(own, raw_dt, old_dt)
    y, decayed, scaled = _chunk(h, x, b, c, raw_dt, own | old, a, d, bias, dt_min, dt_max, TILE)
    return x, b, raw_dt, y, decayed, scaled


@triton.jit
def _own(
    x_ptr, b_ptr, c_ptr, dt_ptr, t, start, end, p, n, x_row, b_row, c_row, dt_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """What the call has of a chunk: x^T [p, TILE], B and C [TILE, n], dt [TILE]; zeros else."""
    place = tl.arange(0, TILE)
    at = t * TILE + place
    own = (at >= start) & (at < end)
    offset = tl.cast(t * TILE, tl.int64)
    x = tl.load(x_ptr + offset * x_row + place[None, :] * x_row + p[:, None], own[None, :], 0.0)
    b = tl.load(b_ptr + offset * b_row + place[:, None] * b_row + n[None, :], own[:, None], 0.0)
    c = tl.load(c_ptr + offset * c_row + place[:, None] * c_row + n[None, :], own[:, None], 0.0)
    return x, b, c, tl.load(dt_ptr + offset * dt_row + place * dt_row, own, 0.0)


@triton.jit
def _replayed(
    ring_x_ptr, ring_b_ptr, ring_dt_ptr, t, first, start, p, n,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the ring has of a chunk: x^T [p, TILE], B [TILE, n], dt [TILE]; zeros else."""
    at = t * TILE + tl.arange(0, TILE)
    old = (at >= first) & (at < start)
    place = at % RING
    x = tl.load(ring_x_ptr + place[None, :] * (HEADS * HEAD_DIM) + p[:, None], old[None, :], 0.0)
    b = tl.load(ring_b_ptr + place[:, None] * (GROUPS * SIZE) + n[None, :], old[:, None], 0.0)
    return x, b, tl.load(ring_dt_ptr + place * HEADS, old, 0.0)


@triton.jit
def _chunk(h, x, b, c, raw_dt, is_there, a, d, bias, dt_min, dt_max, TILE: tl.constexpr):
    """A chunk's tokens from the state at its beginning, rounded to the type of x: y^T [p, TILE]
    float32; and what they do to the state: its factor, and what B is multiplied with [p, TILE]."""
    place = tl.arange(0, TILE)
    dt = softplus(raw_dt.to(tl.float32) + bias)
    dt = tl.where(is_there, tl.minimum(tl.maximum(dt, dt_min), dt_max), 0.0)
    cs = tl.cumsum(dt * a, 0)
    last = tl.sum(tl.where(place == TILE - 1, cs, 0.0), 0)
    cs_dt = cs - tl.log2(dt)  # dt goes into the exponent
    start_decay = tl.exp2(cs)

    scores = tl.dot(b, tl.trans(c), input_precision="ieee")  # [s, l]
    between = tl.exp2(cs[None, :] - cs_dt[:, None])
    # Below the diagonal exp2 may overflow; the selection drops it.
    w = tl.where(place[:, None] <= place[None, :], scores * between, 0.0).to(x.dtype)
    y = tl.dot(h, tl.trans(c), input_precision="ieee") * start_decay[None, :]
    y = tl.dot(x, w, y, input_precision="ieee")
    x32 = x.to(tl.float32)
    y = tl.fma(x32, tl.zeros_like(x32) + d, y)
    scaled = (x32 * tl.exp2(last - cs_dt)[None, :]).to(x.dtype)
    return y, tl.exp2(last), scaled


@triton.jit
def _store(y_ptr, y, t, start, end, p, y_row, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    at = t * TILE + place
    own = (at >= start) & (at < end)
    rows = y_ptr + tl.cast(t * TILE, tl.int64) * y_row + place[None, :] * y_row
    tl.store(rows + p[:, None], y.to(y_ptr.dtype.element_ty), mask=own[None, :])
