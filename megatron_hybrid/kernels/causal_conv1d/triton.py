"""Causal depthwise convolution in Triton; the meaning is reference.py's, the calls are in
protocols.py.

Taps are added from the newest input to the oldest, in prefill and in decode, so an output has the
same bits however its sequence was cut into segments.

Windows, taps and the inputs of an output are tuples in Triton, the oldest first.

All tensors may have any strides, but rows of x, out, gates and rings are contiguous. Loads are
vectorised along channels, so on a GPU `state` is best laid out as [slots, W - 1, channels] and
`weight` as [W, channels] (both passed as transposed views).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d.triton_decode import (
    Tile,
    bias_of,
    columns_of,
    convolved,
    decode,
    decode_runs,
    gate_arguments,
    gated,
    plan_runs,
)
from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.protocols import ConvConstants, Gates

__all__ = ["Tile", "decode", "decode_runs", "plan", "plan_runs", "prefill"]

# These differ from step to step, and so would their alignment: no compilation for each of those.
_INDICES = (
    "cu_seqlens sequence_of_token start_position read_slot write_slot "
    "checkpoint_sequence checkpoint_position checkpoint_slot"
).split()
_kernel = launched(
    do_not_specialize=["tokens", "sequences"], do_not_specialize_on_alignment=_INDICES
)


def plan(segments: PrefillSegments, width: int) -> PrefillSegments:
    """Nothing to prepare: the kernels read the segments on the device."""
    return segments


def prefill(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: PrefillSegments,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """Zeros for padding tokens. Two slots that are written in one call must differ, unless both
    windows are the same."""
    weight, bias, silu = constants
    tokens, channels = x.shape
    width = weight.shape[1]
    in_gate, out_gate, in_gate_row, out_gate_row = gate_arguments(gates)
    sequences, checkpoints = plan.read_slot.shape[0], plan.checkpoint_slot.shape[0]
    out = x.new_empty((tokens, channels)) if out is None else out
    # The windows that were read: the second launch needs some of them after it overwrote others.
    old = x.new_empty((sequences, width - 1, channels))
    # Channels are the fast axis of the grid: programs that run together read whole rows.
    grid = cdiv(channels, 512), max(cdiv(tokens, 16), 1)
    _outputs_kernel[grid](
        x, weight, bias, state, out, old,
        plan.cu_seqlens, plan.sequence_of_token, plan.read_slot,
        tokens, channels, sequences,
        x.stride(0), *weight.stride(), *state.stride(), out.stride(0),
        in_gate, out_gate, in_gate_row, out_gate_row,
        WIDTH=width, SILU=silu, BLOCK_T=16, BLOCK_C=512, num_warps=4,
    )  # fmt: skip
    grid = cdiv(channels, 512), sequences + checkpoints
    _windows_kernel[grid](
        x, state, old,
        plan.cu_seqlens, plan.start_position, plan.read_slot, plan.write_slot,
        plan.checkpoint_sequence, plan.checkpoint_position, plan.checkpoint_slot,
        channels, sequences, x.stride(0), *state.stride(), in_gate, in_gate_row,
        WIDTH=width, BLOCK_C=512, num_warps=2,
    )  # fmt: skip
    return out


@_kernel
def _outputs_kernel(
    x, weight, bias, state, out, old,
    cu_seqlens, sequence_of_token, read_slot,
    tokens, channels, sequences,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    in_gate, out_gate, in_gate_row, out_gate_row,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens; copies the windows that are read to old [S, W - 1, channels]."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    first = tl.program_id(1) * BLOCK_T
    last = first + BLOCK_T - 1
    sequence = tl.load(sequence_of_token + first, mask=first < tokens, other=-1)
    start = tl.load(cu_seqlens + sequence, mask=sequence >= 0, other=0)
    is_inside = (sequence >= 0) & (first - start >= WIDTH - 1)
    # Each way loads the taps for itself, in the layout that it computes in: to bring those of the
    # one to the other would take shared memory and two barriers a tap.
    if is_inside & (tl.load(sequence_of_token + last, mask=last < tokens, other=-1) == sequence):
        # No token of the block needs the state. Each input is loaded once, and all before the first
        # store, behind which the compiler would not move them: so they are in flight together.
        inputs = x + first.to(tl.int64) * x_row + channel
        taps = columns_of(
            weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH
        )
        offset = bias_of(bias, channel, is_channel)
        rows = ()
        for t in tl.static_range(1 - WIDTH, BLOCK_T):
            rows = rows + (tl.load(inputs + t * x_row, mask=is_channel, other=0),)
        if out_gate is not None:
            gates = out_gate + first.to(tl.int64) * out_gate_row + channel
            out_factors = columns_of(
                gates, out_gate_row, is_channel, out_gate.dtype.element_ty, BLOCK_T
            )
        if in_gate is not None:
            gates = in_gate + (first.to(tl.int64) - (WIDTH - 1)) * in_gate_row + channel
            rows = _gated_rows(rows, gates, in_gate_row, is_channel, BLOCK_T + WIDTH - 1)
        outputs = out + first.to(tl.int64) * out_row + channel
        for t in tl.static_range(BLOCK_T):
            y = convolved(offset, rows[t : t + WIDTH], taps, WIDTH, SILU)
            if out_gate is not None:
                y = gated(y.to(out.dtype.element_ty), out_factors[t])
            tl.store(outputs + t * out_row, y, mask=is_channel)
    else:
        taps = columns_of(
            weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH
        )
        offset = bias_of(bias, channel, is_channel)
        for t in range(0, BLOCK_T, 4):
            row = first + t + tl.arange(0, 4)
            is_token = row < tokens
            in_sequence = tl.load(sequence_of_token + row, mask=is_token, other=-1)
            is_read = in_sequence >= 0
            # Of a token: how many of its segment come before it.
            age = row - tl.load(cu_seqlens + in_sequence, mask=is_read, other=0)
            slot = tl.load(read_slot + in_sequence, mask=is_read, other=0).to(tl.int64)
            inputs = x + row.to(tl.int64)[:, None] * x_row + channel[None, :]
            window = state + (slot * state_slot)[:, None] + (channel * state_channel)[None, :]
            mask = is_channel[None, :]
            if in_gate is not None:
                in_gates = in_gate + row.to(tl.int64)[:, None] * in_gate_row + channel[None, :]
            if out_gate is not None:
                out_gates = out_gate + row.to(tl.int64)[:, None] * out_gate_row + channel[None, :]
                out_factors = tl.load(out_gates, mask=is_read[:, None] & mask, other=0)
            taken = ()
            for column in tl.static_range(WIDTH - 1):
                back = WIDTH - 1 - column
                is_new = age >= back
                has_new = (is_read & is_new)[:, None] & mask
                new = tl.load(inputs - back * x_row, mask=has_new, other=0)
                if in_gate is not None:
                    factors = tl.load(in_gates - back * in_gate_row, mask=has_new, other=0)
                    new = gated(new, factors)
                is_kept = is_read & (age < back) & (slot > 0)
                place = window + ((age + column) * state_column)[:, None]
                kept = tl.load(place, mask=is_kept[:, None] & mask, other=0)
                taken = taken + (tl.where(is_new[:, None], new, kept.to(new.dtype)),)
            newest = tl.load(inputs, mask=is_read[:, None] & mask, other=0)
            if in_gate is not None:
                factors = tl.load(in_gates, mask=is_read[:, None] & mask, other=0)
                newest = gated(newest, factors)
            taken = taken + (newest,)
            outs = convolved(offset, taken, taps, WIDTH, SILU)
            if out_gate is not None:
                outs = gated(outs.to(out.dtype.element_ty), out_factors)
            tl.store(
                out + row.to(tl.int64)[:, None] * out_row + channel[None, :],
                tl.where(is_read[:, None], outs, 0),
                mask=is_token[:, None] & mask,
            )

    for s in range(tl.program_id(1), sequences, tl.num_programs(1)):
        read = tl.load(read_slot + s).to(tl.int64)
        has_window = channel < tl.where(read > 0, channels, 0)
        for column in tl.static_range(WIDTH - 1):
            source = state + read * state_slot + column * state_column + channel * state_channel
            target = old + (s * (WIDTH - 1) + column) * channels + channel
            tl.store(target, tl.load(source, mask=has_window), mask=has_window)


@_kernel
def _windows_kernel(
    x, state, old,
    cu_seqlens, start_position, read_slot, write_slot,
    checkpoint_sequence, checkpoint_position, checkpoint_slot,
    channels, sequences, x_row, state_slot, state_channel, state_column, in_gate, in_gate_row,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One window that is written a program: first those at the sequences' ends, then the
    checkpoints'."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    entry = tl.program_id(1)
    if entry < sequences:
        sequence = entry.to(tl.int64)
        slot = tl.load(write_slot + sequence).to(tl.int64)
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        taken = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - begin
    else:
        checkpoint = entry - sequences
        sequence = tl.load(checkpoint_sequence + checkpoint).to(tl.int64)
        sequence = tl.maximum(sequence, 0)  # of padding, whose slot is not written
        slot = tl.load(checkpoint_slot + checkpoint).to(tl.int64)
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        position = tl.load(checkpoint_position + checkpoint).to(tl.int64)
        taken = position - tl.load(start_position + sequence).to(tl.int64)
    if slot > 0:
        has_window = channel < tl.where(tl.load(read_slot + sequence) > 0, channels, 0)
        for column in tl.static_range(WIDTH - 1):
            # The window after `taken` tokens, counted from the segment's first token.
            token = taken - (WIDTH - 1) + column
            if token >= 0:
                inputs = tl.load(x + (begin + token) * x_row + channel, mask=is_channel, other=0)
                if in_gate is not None:
                    gates = in_gate + (begin + token) * in_gate_row + channel
                    inputs = gated(inputs, tl.load(gates, mask=is_channel, other=0))
            else:
                old_row = (sequence + 1) * (WIDTH - 1) + token
                inputs = tl.load(old + old_row * channels + channel, mask=has_window, other=0)
            target = state + slot * state_slot + column * state_column + channel * state_channel
            tl.store(target, inputs, mask=is_channel)


@triton.jit
def _gated_rows(rows, gates, gate_row, mask, COUNT: tl.constexpr):
    """COUNT rows, each times its gate: all gates are asked for before the first product."""
    factors = columns_of(gates, gate_row, mask, gates.dtype.element_ty, COUNT)
    products = ()
    for t in tl.static_range(COUNT):
        products = products + (gated(rows[t], factors[t]),)
    return products
