"""Decodes of the causal convolution in Triton; see triton.py, and protocols.py for the calls.

Some of the functions without a launch are for prompts, too.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.protocols import ConvConstants, Gates


class Tile(NamedTuple):
    """Of what a program computes for one token of one sequence."""

    channels: int  # powers of 2, both
    warps: int


def decode_tile(sequences: int, channels: int) -> Tile:
    """Few channels a program while there are few programs, so that many processors take part; then
    16 bytes a thread. Measured: see docs/performance.md."""
    return Tile(256, warps=2) if sequences * channels <= 2**16 else Tile(1024, warps=4)


def decode(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    gates: Gates | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """One token a sequence: as above with T = N sequences; zeros for padded rows."""
    weight, bias, silu = constants
    rows, channels = x.shape
    out = x.new_empty((rows, channels)) if out is None else out
    tile = decode_tile(rows, channels) if tile is None else tile
    _decode_kernel[(cdiv(channels, tile.channels), rows)](
        x, weight, bias, state, out, plan.read_slot, plan.write_slot, channels,
        x.stride(0), *weight.stride(), *state.stride(), out.stride(0), *gate_arguments(gates),
        WIDTH=weight.shape[1], SILU=silu, BLOCK_C=tile.channels, num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    return out


def plan_runs(runs: DecodeRuns, width: int, ring_length: int) -> DecodeRuns:
    """Nothing to prepare: the kernel reads the runs on the device."""
    return runs


def decode_runs(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    ring: Tensor,
    plan: DecodeRuns,
    out: Tensor | None = None,
    gates: Gates | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """DecodeRuns: as above with tokens T. `tile`: of single tokens."""
    weight, bias, silu = constants
    tokens, channels = x.shape
    sequences = plan.read_slot.shape[0]
    out = x.new_empty((tokens, channels)) if out is None else out
    arguments = (
        x, weight, bias, state, ring, out, *plan.tensors, tokens, channels,
        x.stride(0), *weight.stride(), *state.stride(), out.stride(0), ring.stride(1),
        *gate_arguments(gates),
    )  # fmt: skip
    sizes = {"RING": ring.shape[1], "WIDTH": weight.shape[1], "SILU": silu}
    if plan.most_unfolded is None:
        _runs_kernel[(cdiv(channels, 256), sequences + 1)](
            *arguments, **sizes, BLOCK_C=256, num_warps=4, **OPTIONS
        )
        return out
    rows = max(tokens, sequences)  # padding among the one or the other
    tile = decode_tile(rows, channels) if tile is None else tile
    _single_kernel[(cdiv(channels, tile.channels), rows)](
        *arguments, sequences, **sizes, BLOCK_C=tile.channels, num_warps=tile.warps, **OPTIONS
    )
    return out


def gate_arguments(gates: Gates | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The gates of inputs and outputs, or None, and how far apart their rows are."""
    if gates is None:
        return None, None, 0, 0
    before, after = gates
    in_row, out_row = (0 if gate is None else gate.stride(0) for gate in gates)
    return before, after, in_row, out_row


@launched
def _decode_kernel(
    x, weight, bias, state, out, read_slot, write_slot, channels,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    in_gate, out_gate, in_gate_row, out_gate_row,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    taps = columns_of(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = bias_of(bias, channel, is_channel)
    row = tl.program_id(1).to(tl.int64)
    read = tl.load(read_slot + row).to(tl.int64)
    write = tl.load(write_slot + row).to(tl.int64)
    # The whole window is read before any of it is written: both may be the same slot.
    windows = state + channel * state_channel
    has_window = channel < tl.where(read > 0, channels, 0)
    before = columns_of(
        windows + read * state_slot, state_column, has_window, state.dtype.element_ty, WIDTH - 1
    )
    wait_for_inputs()  # the state was there before
    let_next_start()
    has_token = channel < tl.where((read > 0) | (write > 0), channels, 0)
    newest = tl.load(x + row * x_row + channel, mask=has_token, other=0)
    if out_gate is not None:  # asked for before the input is used
        out_factors = tl.load(out_gate + row * out_gate_row + channel, mask=has_token, other=0)
    if in_gate is not None:
        in_factors = tl.load(in_gate + row * in_gate_row + channel, mask=has_token, other=0)
        newest = gated(newest, in_factors)
    inputs = ()
    for column in tl.static_range(WIDTH - 1):
        inputs = inputs + (before[column].to(newest.dtype),)
    y = convolved(offset, inputs + (newest,), taps, WIDTH, SILU)
    if out_gate is not None:
        y = gated(y.to(out.dtype.element_ty), out_factors)
    y = tl.where(has_token, y, 0.0)
    tl.store(out + row * out_row + channel, y, mask=is_channel)
    is_written = channel < tl.where(write > 0, channels, 0)
    window = windows + write * state_slot
    store_window(window, state_column, before[1:] + (newest,), is_written, WIDTH)


@launched(do_not_specialize=["tokens", "sequences"])
def _single_kernel(
    x, weight, bias, state, ring, out,
    cu_seqlens, position, unfolded, read_slot, write_slot, ring_row,
    checkpoint_position, checkpoint_slot, tokens, channels,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    ring_place, in_gate, out_gate, in_gate_row, out_gate_row, sequences,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """_runs_kernel of sequences of one token each, or none: all that is read is in flight at once,
    and what was there before the kernel in front is read while that ends."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    taps = columns_of(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = bias_of(bias, channel, is_channel)
    row = tl.program_id(1).to(tl.int64)
    is_there = row < sequences  # all figures of others are 0
    begin = tl.load(cu_seqlens + row, mask=is_there, other=0)
    count = tl.load(cu_seqlens + row + 1, mask=is_there, other=0) - begin
    start = tl.load(position + row, mask=is_there, other=0)
    first_unfolded = start - tl.load(unfolded + row, mask=is_there, other=0)
    read = tl.load(read_slot + row, mask=is_there, other=0).to(tl.int64)
    write = tl.load(write_slot + row, mask=is_there, other=0).to(tl.int64)
    kept_position = tl.load(checkpoint_position + row, mask=is_there, other=0)
    kept = tl.load(checkpoint_slot + row, mask=is_there, other=0).to(tl.int64)
    first_place = tl.load(ring_row + row, mask=is_there, other=0).to(tl.int64) * RING
    used = tl.load(cu_seqlens + sequences)
    windows = state + channel * state_channel
    window = windows + read * state_slot
    inputs = ring + first_place * ring_place + channel
    before = inputs_before(
        start, first_unfolded, inputs, window, channel, channels, read, state_column, ring_place,
        RING, WIDTH,
    )  # fmt: skip

    wait_for_inputs()
    let_next_start()
    has_token = channel < tl.where(count > 0, channels, 0)
    token = begin.to(tl.int64)
    newest = tl.load(x + token * x_row + channel, mask=has_token, other=0)
    if out_gate is not None:  # asked for before the input is used
        out_factors = tl.load(out_gate + token * out_gate_row + channel, mask=has_token, other=0)
    if in_gate is not None:
        in_factors = tl.load(in_gate + token * in_gate_row + channel, mask=has_token, other=0)
        newest = gated(newest, in_factors)
    y = convolved(offset, before + (newest,), taps, WIDTH, SILU)
    if out_gate is not None:
        y = gated(y.to(out.dtype.element_ty), out_factors)
    tl.store(out + token * out_row + channel, y, mask=has_token)
    if (row >= used) & (row < tokens):  # padding
        nothing = tl.zeros((BLOCK_C,), out.dtype.element_ty)
        tl.store(out + row * out_row + channel, nothing, mask=is_channel)

    after = window_after(before, newest, count, WIDTH)
    is_reached = (first_unfolded < kept_position) & (kept_position <= start + count)
    if (kept > 0) & is_reached:  # before the window is overwritten
        values = window_at(
            kept_position, start, first_unfolded, after, inputs, window, channel, channels,
            read, state_column, ring_place, RING, WIDTH,
        )  # fmt: skip
        store_window(windows + kept * state_slot, state_column, values, is_channel, WIDTH)
    is_recorded = channel < tl.where((count > 0) & (write <= 0), channels, 0)
    tl.store(inputs + start % RING * ring_place, newest, mask=is_recorded)
    is_written = channel < tl.where(write > 0, channels, 0)
    store_window(windows + write * state_slot, state_column, after, is_written, WIDTH)


@launched(do_not_specialize=["tokens"])
def _runs_kernel(
    x, weight, bias, state, ring, out,
    cu_seqlens, position, unfolded, read_slot, write_slot, ring_row,
    checkpoint_position, checkpoint_slot, tokens, channels,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    ring_place, in_gate, out_gate, in_gate_row, out_gate_row,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    sequence = tl.program_id(1)
    wait_for_inputs()
    let_next_start()
    begin = tl.load(cu_seqlens + sequence)
    if sequence == tl.num_programs(1) - 1:  # the padding
        for token in range(begin, tokens):
            row = out + tl.cast(token, tl.int64) * out_row
            tl.store(row + channel, tl.zeros((BLOCK_C,), out.dtype.element_ty), mask=is_channel)
        return

    end = tl.load(cu_seqlens + sequence + 1)
    start = tl.load(position + sequence)
    first_unfolded = start - tl.load(unfolded + sequence)
    read = tl.load(read_slot + sequence).to(tl.int64)
    write = tl.load(write_slot + sequence).to(tl.int64)
    kept_position = tl.load(checkpoint_position + sequence)
    kept = tl.load(checkpoint_slot + sequence).to(tl.int64)
    first_place = tl.load(ring_row + sequence).to(tl.int64) * RING
    taps = columns_of(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = bias_of(bias, channel, is_channel)

    # The inputs before the next token, all at once: one after the other would wait for memory as
    # often as there are unfolded ones.
    windows = state + channel * state_channel
    window = windows + read * state_slot
    inputs = ring + first_place * ring_place + channel
    before = inputs_before(
        start, first_unfolded, inputs, window, channel, channels, read, state_column, ring_place,
        RING, WIDTH,
    )  # fmt: skip
    if (kept > 0) & (first_unfolded < kept_position) & (kept_position <= start):
        values = inputs_before(
            kept_position, first_unfolded, inputs, window, channel, channels, read, state_column,
            ring_place, RING, WIDTH,
        )  # fmt: skip
        store_window(windows + kept * state_slot, state_column, values, is_channel, WIDTH)
    is_written = channel < tl.where(write > 0, channels, 0)
    if begin == end:
        store_window(windows + write * state_slot, state_column, before, is_written, WIDTH)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        newest = tl.load(x + row * x_row + channel, mask=is_channel, other=0)
        if out_gate is not None:  # asked for before the input is used
            out_factors = tl.load(out_gate + row * out_gate_row + channel, mask=is_channel, other=0)
        if in_gate is not None:
            in_factors = tl.load(in_gate + row * in_gate_row + channel, mask=is_channel, other=0)
            newest = gated(newest, in_factors)
        y = convolved(offset, before + (newest,), taps, WIDTH, SILU)
        if out_gate is not None:
            y = gated(y.to(out.dtype.element_ty), out_factors)
        tl.store(out + row * out_row + channel, y, mask=is_channel)
        before = before[1:] + (newest,)
        if token == begin:
            store_window(windows + write * state_slot, state_column, before, is_written, WIDTH)
            is_there = (kept > 0) & (start + 1 == kept_position)
            is_kept = channel < tl.where(is_there, channels, 0)
            store_window(windows + kept * state_slot, state_column, before, is_kept, WIDTH)
        if (token > begin) | (write <= 0):
            place = first_place + (start + token - begin) % RING
            tl.store(ring + place * ring_place + channel, newest, mask=is_channel)


@triton.jit
def inputs_before(
    position, first_unfolded, inputs, window, channel, channels, read, state_column,
    ring_place, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The inputs of the WIDTH - 1 tokens before this position: from the ring, or, before the first
    unfolded one, from the window that the state has."""
    found = ()
    for column in tl.static_range(WIDTH - 1):
        token = position - (WIDTH - 1) + column
        is_unfolded = token >= first_unfolded
        in_ring = channel < tl.where(is_unfolded, channels, 0)
        in_window = channel < tl.where(is_unfolded | (read <= 0), 0, channels)
        unfolded = tl.load(inputs + token % RING * ring_place, mask=in_ring, other=0)
        place = window + (column + position - first_unfolded) * state_column
        old = tl.load(place, mask=in_window, other=0)
        found = found + (tl.where(is_unfolded, unfolded, old.to(unfolded.dtype)),)
    return found


@triton.jit
def window_after(before, newest, count, WIDTH: tl.constexpr):
    """The inputs before the token behind `count` tokens, 0 or 1."""
    after = ()
    for column in tl.static_range(1, WIDTH):
        following = newest if column == WIDTH - 1 else before[column]
        after = after + (tl.where(count > 0, following, before[column - 1]),)
    return after


@triton.jit
def window_at(
    position, start, first_unfolded, after, inputs, window, channel, channels, read, state_column,
    ring_place, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """inputs_before this position, which is at most the one that window_after gave `after` for."""
    known = tl.minimum(position, start)
    values = inputs_before(
        known,
        first_unfolded,
        inputs,
        window,
        channel,
        channels,
        read,
        state_column,
        ring_place,
        RING,
        WIDTH,
    )
    found = ()
    for column in tl.static_range(WIDTH - 1):
        found = found + (tl.where(position > start, after[column], values[column]),)
    return found


@triton.jit
def columns_of(first, column_stride, mask, dtype: tl.constexpr, COUNT: tl.constexpr):
    """Of COUNT columns this far apart: the values, in this type."""
    values = ()
    for column in tl.static_range(COUNT):
        loaded = tl.load(first + column * column_stride, mask=mask, other=0)
        values = values + (loaded.to(dtype),)
    return values


@triton.jit
def store_window(window, state_column, inputs, mask, WIDTH: tl.constexpr):
    """The inputs to a window."""
    for column in tl.static_range(WIDTH - 1):
        tl.store(window + column * state_column, inputs[column], mask=mask)


@triton.jit
def convolved(offset, inputs, taps, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """offset + taps * inputs, newest input first, and silu of it."""
    y = offset
    for back in tl.static_range(1, WIDTH + 1):
        y += taps[WIDTH - back] * inputs[WIDTH - back].to(tl.float32)
    if SILU:
        y = y / (1 + tl.exp(-y))
    return y


@triton.jit
def gated(values, factors):
    """The product, rounded to the values' type as by a kernel of its own."""
    return (values.to(tl.float32) * factors.to(tl.float32)).to(values.dtype)


@triton.jit
def bias_of(bias, channel, mask):
    """[...] float32, zeros without one."""
    values = tl.zeros(mask.shape, tl.float32)
    if bias is not None:
        values = tl.load(bias + channel, mask=mask, other=0).to(tl.float32)
    return values
