"""The short convolution and the Mamba2 scan of decodes in one kernel.

A program of the scan has some rows of a head's state. It convolves what it needs itself:

    x        its own rows' channels, which nobody else needs
    B, C     its group's channels, as every program of the group does

So the windows of x are written by who reads them. Those of B and C are written by the program that
is the last of its sequence's group to have read them: each counts itself when it has.

Roundings are those of the two kernels one after the other: the convolution's outputs have the
model's type before the scan takes them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d.triton_decode import (
    bias_of,
    columns_of,
    convolved,
    inputs_before,
    store_window,
    window_after,
    window_at,
)
from megatron_hybrid.kernels.contract import DecodeRuns, RecurrentState
from megatron_hybrid.kernels.dependent_launch import OPTIONS, wait_for_inputs
from megatron_hybrid.kernels.launching import launched, next_power_of_2
from megatron_hybrid.kernels.linear.products import COUNTERS, counters
from megatron_hybrid.kernels.mamba2_scan.triton_decode import (
    constants_of_head,
    take_single,
    unfolded_inputs,
)
from megatron_hybrid.kernels.protocols import ConvConstants, Mamba2Constants, Rings

# Of more, what every program loads besides its state costs more than a kernel does: measured, see
# docs/performance.md.
MOST_SEQUENCES = 1


def takes(plan: Any, state: RecurrentState) -> bool:
    """Runs of one token each, of so few sequences that one kernel is faster."""
    if not isinstance(plan, DecodeRuns) or plan.most_unfolded is None:
        return False
    sequences, heads = plan.read_slot.shape[0], state.ssm.shape[1]
    return sequences <= MOST_SEQUENCES and sequences * heads <= COUNTERS


def decode_runs(
    x: Tensor,
    dt: Tensor,
    conv: ConvConstants,
    constants: Mamba2Constants,
    state: RecurrentState,
    rings: tuple[Tensor, Rings],
    plan: DecodeRuns,
    *,
    block_p: int | None = None,
) -> Tensor:
    """As in ConvolvedMamba2. `block_p`: rows of a head's state in a program."""
    assert plan.most_unfolded is not None
    A, D, dt_bias, dt_limit, seed = constants
    conv_ring, ring = rings
    count, sequences = x.shape[0], plan.read_slot.shape[0]
    heads, head_dim, size = state.ssm.shape[1:]
    groups = ring[1].shape[2]
    y = x.new_empty((count, heads, head_dim))
    if block_p is None:
        block_p = min(head_dim, max(2048 // size, 8))  # more rows would not fit in registers
    _kernel[(head_dim // block_p, heads, sequences + 1)](
        x, conv.weight, conv.bias, state.conv, conv_ring, dt, A, D, dt_bias, state.ssm, *ring, y,
        counters(x.device), *plan.tensors, count,
        x.stride(0), *conv.weight.stride(), *state.conv.stride(), dt.stride(0), y.stride(0),
        state.ssm.stride(0), heads // groups, *dt_limit, seed,
        WIDTH=conv.weight.shape[1], SILU=conv.silu,
        HEADS=heads, GROUPS=groups, RING=ring[0].shape[1],
        TOKENS=next_power_of_2(plan.most_unfolded + 1), HEAD_DIM=head_dim, SIZE=size,
        BLOCK_P=block_p, LANES=min(32, size), num_warps=1, **OPTIONS,
    )  # fmt: skip
    return y


@launched(do_not_specialize=["tokens"])
def _kernel(
    input_ptr, weight_ptr, conv_bias_ptr, conv_state_ptr, conv_ring_ptr,
    dt_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, y_ptr,
    counter_ptr,
    cu_ptr, position_ptr, unfolded_ptr, read_ptr, write_ptr, ring_row_ptr,
    checkpoint_position_ptr, checkpoint_slot_ptr, tokens,
    input_row, weight_channel, weight_tap, conv_slot, conv_channel, conv_column, dt_row, y_row,
    state_slot, heads_per_group, dt_min, dt_max, seed,
    WIDTH: tl.constexpr, SILU: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """See triton_decode's _single_kernel, and the convolution's."""
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
    ring = tl.load(ring_row_ptr + sequence).to(tl.int64) * RING
    checkpoint = tl.load(checkpoint_slot_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(checkpoint_position_ptr + sequence)
    first_unfolded = position - unfolded
    tokens_in = checkpoint_position - first_unfolded
    if (unfolded + count == 0) & (write <= 0):
        return

    column = tl.arange(0, SIZE)
    n = tl.arange(0, SIZE // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    of_row = p[None, :, None]
    in_slot = head * (HEAD_DIM * SIZE) + of_row * SIZE + n[:, None, :]
    h = tl.load(
        state_ptr + read * state_slot + in_slot,
        mask=of_row < tl.where(read > 0, HEAD_DIM, 0),
        other=0.0,
    ).to(tl.float32)
    constants = constants_of_head(a_ptr, d_ptr, bias_ptr, head)
    i = tl.arange(0, TOKENS)
    place = ring + (first_unfolded + i) % RING
    old = unfolded_inputs(
        ring_x_ptr, ring_b_ptr, ring_dt_ptr, place, i, unfolded, write, p, head, group,
        HEADS, GROUPS, HEAD_DIM, SIZE,
    )  # fmt: skip

    channels: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
    of_x = head * HEAD_DIM + p
    of_b = HEADS * HEAD_DIM + group * SIZE + column
    of_c = of_b + GROUPS * SIZE
    conv = conv_state_ptr + read * conv_slot
    kept = conv_ring_ptr + ring * channels
    x_known = _known(
        weight_ptr, conv_bias_ptr, kept, conv, of_x, position, first_unfolded, read,
        weight_channel, weight_tap, conv_channel, conv_column, channels, RING, WIDTH,
    )  # fmt: skip
    b_known = _known(
        weight_ptr, conv_bias_ptr, kept, conv, of_b, position, first_unfolded, read,
        weight_channel, weight_tap, conv_channel, conv_column, channels, RING, WIDTH,
    )  # fmt: skip
    c_known = _known(
        weight_ptr, conv_bias_ptr, kept, conv, of_c, position, first_unfolded, read,
        weight_channel, weight_tap, conv_channel, conv_column, channels, RING, WIDTH,
    )  # fmt: skip

    wait_for_inputs()  # all that was there before
    row = tl.cast(begin, tl.int64)
    inputs = input_ptr + row * input_row
    some = tl.where(count > 0, channels, 0)
    new_x = tl.load(inputs + of_x, mask=of_x < some, other=0.0)
    new_b = tl.load(inputs + of_b, mask=of_b < some, other=0.0)
    new_c = tl.load(inputs + of_c, mask=of_c < some, other=0.0)
    is_new = (i >= unfolded) & (i < unfolded + count)
    new_dt = tl.load(dt_ptr + row * dt_row + head + i * 0, is_new, 0.0)
    raw_x = _output(x_known, new_x, count, SILU, WIDTH)
    raw_b = _output(b_known, new_b, count, SILU, WIDTH)
    raw_c = _output(c_known, new_c, count, SILU, WIDTH)
    x_after = window_after(x_known[0], new_x, count, WIDTH)
    b_after = window_after(b_known[0], new_b, count, WIDTH)
    c_after = window_after(c_known[0], new_c, count, WIDTH)

    is_owner = (part == 0) & (head % heads_per_group == 0)  # of what the group has once
    if (checkpoint > 0) & (tokens_in > 0) & (tokens_in <= unfolded + count):
        conv_kept = conv_state_ptr + checkpoint * conv_slot
        _store_checkpoint(
            x_after, conv_kept, kept, conv, of_x, checkpoint_position, position, first_unfolded,
            read, conv_channel, conv_column, channels, RING, WIDTH,
        )  # fmt: skip
        if is_owner:
            _store_checkpoint(
                b_after, conv_kept, kept, conv, of_b, checkpoint_position, position,
                first_unfolded, read, conv_channel, conv_column, channels, RING, WIDTH,
            )  # fmt: skip
            _store_checkpoint(
                c_after, conv_kept, kept, conv, of_c, checkpoint_position, position,
                first_unfolded, read, conv_channel, conv_column, channels, RING, WIDTH,
            )  # fmt: skip
    arrived = 0
    if write > 0:
        tl.debug_barrier()  # behind what all threads have read
        arrived = tl.atomic_add(counter_ptr + sequence * GROUPS + group, 1, sem="acq_rel")

    flat_c = raw_c.to(tl.float32)
    lanes: tl.constexpr = (SIZE // LANES, LANES)
    take_single(
        h, raw_x, tl.reshape(raw_b, lanes), tl.reshape(flat_c, lanes), flat_c, new_dt, old,
        constants, n, p, part, head, group,
        count, position, unfolded, write, ring, checkpoint, tokens_in,
        state_ptr, ring_x_ptr, ring_b_ptr, ring_dt_ptr, y_ptr + row * y_row, state_slot,
        heads_per_group, dt_min, dt_max, seed, HEADS, GROUPS, RING, TOKENS, HEAD_DIM, SIZE,
    )  # fmt: skip
    if write > 0:
        conv = conv_state_ptr + write * conv_slot
        store_window(conv + of_x * conv_channel, conv_column, x_after, of_x >= 0, WIDTH)
        if arrived == heads_per_group * tl.num_programs(0) - 1:
            tl.store(counter_ptr + sequence * GROUPS + group, 0)
            store_window(conv + of_b * conv_channel, conv_column, b_after, of_b >= 0, WIDTH)
            store_window(conv + of_c * conv_channel, conv_column, c_after, of_c >= 0, WIDTH)
    elif count > 0:
        new_place = kept + position % RING * channels
        tl.store(new_place + of_x, new_x)
        if is_owner:
            tl.store(new_place + of_b, new_b)
            tl.store(new_place + of_c, new_c)


@triton.jit
def _known(
    weight, bias, ring, window, channel, position, first_unfolded, read,
    weight_channel, weight_tap, conv_channel, conv_column,
    CHANNELS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of these channels, before the token is there: the inputs before it, taps, bias."""
    before = inputs_before(
        position, first_unfolded, ring + channel, window + channel * conv_channel,
        channel, CHANNELS, read, conv_column, RING, WIDTH,
    )  # fmt: skip
    every = channel < CHANNELS
    kind: tl.constexpr = weight.dtype.element_ty
    taps = columns_of(weight + channel * weight_channel, weight_tap, every, kind, WIDTH)
    return before, taps, bias_of(bias, channel, every)


@triton.jit
def _output(known, newest, count, SILU: tl.constexpr, WIDTH: tl.constexpr):
    """The convolution's, zeros where there is no token."""
    y = convolved(known[2], known[0] + (newest,), known[1], WIDTH, SILU)
    return tl.where(count > 0, y, 0.0).to(newest.dtype)


@triton.jit
def _store_checkpoint(
    after, kept, ring, window, channel, checkpoint_position, position, first_unfolded, read,
    conv_channel, conv_column,
    CHANNELS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """These channels' window at a checkpoint, whose slot nobody reads."""
    values = window_at(
        checkpoint_position, position, first_unfolded, after, ring + channel,
        window + channel * conv_channel, channel, CHANNELS, read, conv_column, RING, WIDTH,
    )  # fmt: skip
    every = channel < CHANNELS
    store_window(kept + channel * conv_channel, conv_column, values, every, WIDTH)
