"""Decodes of the Mamba2 scan in Triton; see triton.py, and protocols.py for the calls."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import checked_output, row_strides
from megatron_hybrid.kernels.launching import launched, next_power_of_2
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens, Rings
from megatron_hybrid.kernels.state_rounding.triton import as_stored

LOG2_E = tl.constexpr(1.4426950408889634)


def decode(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    block_p: int = 8,
    num_warps: int = 1,
) -> Tensor:
    """The outputs of padded rows are zeros. A program takes block_p rows of the state: many small
    programs keep most bytes in flight."""
    y = checked_output(tokens, state, out)
    A, D, dt_bias, dt_limit, _ = constants
    rows, heads, head_dim = tokens.x.shape
    groups, size = tokens.B.shape[1:]
    _decode_kernel[(head_dim // block_p, heads, rows)](
        *tokens, A, D, dt_bias, state, y, plan.read_slot, plan.write_slot,
        *row_strides(*tokens, y, state), heads // groups, *dt_limit,
        HEAD_DIM=head_dim, SIZE=size, BLOCK_P=block_p, num_warps=num_warps, **OPTIONS,
    )  # fmt: skip
    return y


def decode_runs(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    ring: Rings,
    plan: DecodeRuns,
    out: Tensor | None = None,
    *,
    block_p: int | None = None,
) -> Tensor:
    """Rings are contiguous. The state stays in registers for the whole run. `block_p`: rows of a
    head's state that a program has, of single tokens; None: as many as a warp has registers for,
    which is fastest for any number of sequences (docs/performance.md)."""
    y = checked_output(tokens, state, out)
    A, D, dt_bias, dt_limit, seed = constants
    count, heads, head_dim = tokens.x.shape
    groups, size = tokens.B.shape[1:]
    sequences = plan.read_slot.shape[0]
    if plan.most_unfolded is None:
        kernel, more, block_p = _runs_kernel, {}, 8
    else:
        kernel = _single_kernel
        block_p = min(head_dim, max(4096 // size, 8)) if block_p is None else block_p
        tokens_each = next_power_of_2(plan.most_unfolded + 1)
        more = {"TOKENS": tokens_each, "LANES": min(32, size)}
    kernel[(head_dim // block_p, heads, sequences + 1)](
        *tokens, A, D, dt_bias, state, *ring, y, *plan.tensors, count,
        *row_strides(*tokens, y, state), heads // groups, *dt_limit, seed,
        HEADS=heads, GROUPS=groups, RING=ring[0].shape[1], HEAD_DIM=head_dim, SIZE=size,
        BLOCK_P=block_p, num_warps=1, **more, **OPTIONS,
    )  # fmt: skip
    return y


@triton.jit
def softplus(z):
    """log(1 + e^z), accurate where e^z is tiny: the rounding of 1 + e is divided out."""
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    return tl.where(z > 20.0, z, log1p)


@launched
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
        wait_for_inputs()
        tl.store(y_ptrs, tl.zeros([BLOCK_P], tl.float32))
        return

    in_slot = head * (HEAD_DIM * SIZE) + p[:, None] * SIZE + n[None, :]
    h = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, HEAD_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    a, d, bias = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(bias_ptr + head)
    wait_for_inputs()  # the state was there before
    group = head // heads_per_group
    x = tl.load(x_ptr + row * x_row + head * HEAD_DIM + p).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + group * SIZE + n).to(tl.float32)
    c = tl.load(c_ptr + row * c_row + group * SIZE + n).to(tl.float32)
    dt = tl.load(dt_ptr + row * dt_row + head).to(tl.float32) + bias
    dt = tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)

    h = h * tl.exp2(dt * (a * LOG2_E)) + (dt * x)[:, None] * b[None, :]
    tl.store(
        state_ptr + write * state_slot + in_slot,
        h.to(state_ptr.dtype.element_ty),
        mask=(p < tl.where(write > 0, HEAD_DIM, 0))[:, None],
    )
    y = tl.sum(h * c[None, :], 1) + d * x
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))


@triton.jit
def store_state(
    state_ptr, slot, state_slot, in_slot, state, row, seed, position, ROWS: tl.constexpr
):  # fmt: skip
    """Rows of a state after `position` tokens to a slot; nothing to slots of 0 or less. in_slot,
    state: of one shape; row: of each, broadcast to it; seed: of their rounding, or None."""
    is_written = row < tl.where(slot > 0, ROWS, 0)
    values = as_stored(state, state_ptr.dtype.element_ty, seed, position, in_slot)
    tl.store(state_ptr + slot * state_slot + in_slot, values, mask=is_written)


@launched(do_not_specialize=["tokens"])
def _runs_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, y_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    x_row, b_row, c_row, dt_row, y_row, state_slot,
    heads_per_group, dt_min, dt_max, seed,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = head // heads_per_group
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZE)
    wait_for_inputs()
    begin = tl.load(cu_ptr + sequence)
    if sequence == tl.num_programs(2) - 1:  # the padding
        for token in range(begin, tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + head * HEAD_DIM + p
            tl.store(y_ptrs, tl.zeros([BLOCK_P], y_ptr.dtype.element_ty))
        return

    end = tl.load(cu_ptr + sequence + 1)
    position = tl.load(position_ptr + sequence)
    unfolded = tl.load(unfolded_ptr + sequence)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(checkpoint_position_ptr + sequence)
    checkpoint = tl.load(checkpoint_slot_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    in_slot = head * (HEAD_DIM * SIZE) + p[:, None] * SIZE + n[None, :]
    h = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=(p < tl.where(read > 0, HEAD_DIM, 0))[:, None],
        other=0.0,
    ).to(tl.float32)
    a = tl.load(a_ptr + head) * LOG2_E
    d = tl.load(d_ptr + head)
    bias = tl.load(bias_ptr + head)

    for earlier in range(position - unfolded, position):
        place = ring + earlier % RING
        x = tl.load(ring_x_ptr + place * (HEADS * HEAD_DIM) + head * HEAD_DIM + p).to(tl.float32)
        b = tl.load(ring_b_ptr + place * (GROUPS * SIZE) + group * SIZE + n).to(tl.float32)
        dt = tl.load(ring_dt_ptr + place * HEADS + head).to(tl.float32) + bias
        dt = tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)
        h = h * tl.exp2(dt * a) + (dt * x)[:, None] * b[None, :]
        if earlier + 1 == checkpoint_position:
            store_state(
                state_ptr, checkpoint, state_slot, in_slot, h, p[:, None], seed, earlier + 1,
                HEAD_DIM,
            )  # fmt: skip
    if begin == end:
        store_state(state_ptr, write, state_slot, in_slot, h, p[:, None], seed, position, HEAD_DIM)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        raw_x = tl.load(x_ptr + row * x_row + head * HEAD_DIM + p)
        raw_b = tl.load(b_ptr + row * b_row + group * SIZE + n)
        raw_dt = tl.load(dt_ptr + row * dt_row + head)
        c = tl.load(c_ptr + row * c_row + group * SIZE + n).to(tl.float32)
        x = raw_x.to(tl.float32)
        dt = raw_dt.to(tl.float32) + bias
        dt = tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)
        h = h * tl.exp2(dt * a) + (dt * x)[:, None] * raw_b.to(tl.float32)[None, :]
        y = tl.sum(h * c[None, :], 1) + d * x
        tl.store(y_ptr + row * y_row + head * HEAD_DIM + p, y.to(y_ptr.dtype.element_ty))
        if token == begin:
            after = position + 1
            store_state(state_ptr, write, state_slot, in_slot, h, p[:, None], seed, after, HEAD_DIM)
            if after == checkpoint_position:
                store_state(
                    state_ptr, checkpoint, state_slot, in_slot, h, p[:, None], seed, after,
                    HEAD_DIM,
                )  # fmt: skip
        if (token > begin) | (write <= 0):
            place = ring + (position + token - begin) % RING
            tl.store(ring_x_ptr + place * (HEADS * HEAD_DIM) + head * HEAD_DIM + p, raw_x)
            if part == 0:
                tl.store(ring_dt_ptr + place * HEADS + head, raw_dt)
                if head % heads_per_group == 0:
                    tl.store(ring_b_ptr + place * (GROUPS * SIZE) + group * SIZE + n, raw_b)


@triton.jit
def take_from(values, index):
    """values[index] of values [T]."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0.0), 0)


@launched(do_not_specialize=["tokens"])
def _single_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr,
    state_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, y_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    x_row, b_row, c_row, dt_row, y_row, state_slot,
    heads_per_group, dt_min, dt_max, seed,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of sequences of one token each. Where no state is written, none is formed: with h the state
    that is read, and every token i since with what it decays by up to the last one, t,

        C_t . h_t = decay (C_t . h) + sum over i of decay_i dt_i (C_t . B_i) x_i

    which for each element of the state takes one multiplication, as in attention. A state's columns
    are [columns / LANES, LANES], behind the rows: so Triton 3.6 gives the lanes that a part of a
    row leaves to other rows, and sums over columns are mostly sums in a lane.
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    group = head // heads_per_group
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    begin = tl.load(cu_ptr + sequence)
    if sequence == tl.num_programs(2) - 1:  # the padding
        wait_for_inputs()
        for token in range(begin, tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + head * HEAD_DIM + p
            tl.store(y_ptrs, tl.zeros([BLOCK_P], y_ptr.dtype.element_ty))
        return

    count = tl.load(cu_ptr + sequence + 1) - begin  # 1, or 0: only folds
    position = tl.load(position_ptr + sequence)
    unfolded = tl.load(unfolded_ptr + sequence)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    checkpoint = tl.load(checkpoint_slot_ptr + sequence).to(tl.int64)
    tokens_in = tl.load(checkpoint_position_ptr + sequence) - (position - unfolded)
    if (unfolded + count == 0) & (write <= 0):
        return

    n = tl.arange(0, SIZE // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    of_row = p[:, None, None]
    in_slot = head * (HEAD_DIM * SIZE) + of_row * SIZE + n[None, :, :]
    h = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=of_row < tl.where(read > 0, HEAD_DIM, 0),
        other=0.0,
    ).to(tl.float32)
    a, d, bias = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(bias_ptr + head)
    # What is unfolded, all of it in flight at once; x and B where no state is written.
    i = tl.arange(0, TOKENS)
    place = ring + (position - unfolded + i) % RING
    column = tl.arange(0, SIZE)
    in_x, in_b = head * HEAD_DIM + p, group * SIZE + n
    is_kept = i[:, None] < tl.where(write > 0, 0, unfolded)
    kept_x = ring_x_ptr + (place * (HEADS * HEAD_DIM))[:, None] + in_x[None, :]
    kept_b = ring_b_ptr + (place * (GROUPS * SIZE))[:, None] + (group * SIZE + column)[None, :]
    kept_dt = ring_dt_ptr + place * HEADS + head
    old_dt = tl.load(kept_dt, i < unfolded, 0.0)
    old_x, old_b = tl.load(kept_x, is_kept, 0.0), tl.load(kept_b, is_kept, 0.0)

    wait_for_inputs()  # all that was there before
    row = tl.cast(begin, tl.int64)
    raw_x = tl.load(x_ptr + row * x_row + in_x, mask=p < HEAD_DIM * count, other=0.0)
    raw_b = tl.load(b_ptr + row * b_row + in_b, mask=n < SIZE * count, other=0.0)
    c = tl.load(c_ptr + row * c_row + in_b, mask=n < SIZE * count, other=0.0).to(tl.float32)
    of_c = c_ptr + row * c_row + group * SIZE + column
    flat_c = tl.load(of_c, mask=column < SIZE * count, other=0.0).to(tl.float32)
    is_new = (i >= unfolded) & (i < unfolded + count)
    new_dt = tl.load(dt_ptr + row * dt_row + head + i * 0, is_new, 0.0)
    # dt of the unfolded tokens, and behind them of the call's
    dt = tl.where(is_new, new_dt, old_dt).to(tl.float32)
    dt = softplus(dt + bias)
    dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    log_decay = tl.where(i < unfolded + count, dt * (a * LOG2_E), 0.0)
    cs = tl.cumsum(log_decay, 0)
    total = tl.sum(log_decay, 0)
    weight = tl.exp2(tl.minimum(total - cs, 0.0)) * dt
    new_weight = take_from(dt, unfolded)
    x, b = raw_x.to(tl.float32), raw_b.to(tl.float32)
    y_ptrs = y_ptr + row * y_row + in_x

    has_checkpoint = (checkpoint > 0) & (tokens_in > 0) & (tokens_in <= unfolded + count)
    if (count > 0) & (write <= 0) & (has_checkpoint == 0):
        scores = tl.sum(old_b.to(tl.float32) * flat_c[None, :], 1) * weight
        y = tl.sum(old_x.to(tl.float32) * scores[:, None], 0)
        y += (tl.sum(tl.sum(c * b, 0), 0) * new_weight + d) * x
        y += tl.sum(tl.sum(h * c[None, :, :], 1), 1) * tl.exp2(total)
        let_next_start()
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))
    else:
        reached, before = 0, 0.0  # the sum of log_decay up to there
        if has_checkpoint & (tokens_in <= unfolded):
            reached = tokens_in
            before = take_from(cs, reached - 1)
            h = _folded(
                h, 0, reached, before, dt, before - cs, position - unfolded, ring,
                ring_x_ptr, ring_b_ptr, in_x, in_b, HEADS * HEAD_DIM, GROUPS * SIZE, RING,
            )  # fmt: skip
            store_state(
                state_ptr, checkpoint, state_slot, in_slot, h, of_row, seed,
                position - unfolded + reached, HEAD_DIM,
            )  # fmt: skip
        h = _folded(
            h, reached, unfolded, total - before, dt, total - cs, position - unfolded, ring,
            ring_x_ptr, ring_b_ptr, in_x, in_b, HEADS * HEAD_DIM, GROUPS * SIZE, RING,
        )  # fmt: skip
        h += (x * new_weight)[:, None, None] * b[None, :, :]
        after = position + count
        store_state(state_ptr, write, state_slot, in_slot, h, of_row, seed, after, HEAD_DIM)
        if has_checkpoint & (tokens_in == unfolded + count):
            store_state(
                state_ptr, checkpoint, state_slot, in_slot, h, of_row, seed, after, HEAD_DIM
            )
        if count > 0:
            y = tl.sum(tl.sum(h * c[None, :, :], 1), 1) + d * x
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty))
    if (count > 0) & (write <= 0):
        new_place = ring + position % RING
        tl.store(ring_x_ptr + new_place * (HEADS * HEAD_DIM) + in_x, raw_x)
        if part == 0:
            tl.store(kept_dt, new_dt, is_new)
            if head % heads_per_group == 0:
                tl.store(ring_b_ptr + new_place * (GROUPS * SIZE) + in_b, raw_b)


@triton.jit
def _folded(
    h, begin, end, log_decay, dt, log_weight, first, ring, ring_x_ptr, ring_b_ptr, in_x, in_b,
    x_place, b_place, RING: tl.constexpr,
):  # fmt: skip
    """h * 2^log_decay, and unfolded tokens [begin, end), each of them with dt * 2^log_weight."""
    h *= tl.exp2(log_decay)
    weight = tl.exp2(tl.minimum(log_weight, 0.0)) * dt
    for j in range(begin, end):
        place = ring + (first + j) % RING
        x = tl.load(ring_x_ptr + place * x_place + in_x).to(tl.float32) * take_from(weight, j)
        b = tl.load(ring_b_ptr + place * b_place + in_b).to(tl.float32)
        h += x[:, None, None] * b[None, :, :]
    return h
