"""The convolution's ConvReplay in Triton; taps are added as in triton.py.

Decodes have one program for all that a sequence has of some channels. Prompts have one for some
tokens, and then, in a launch of its own, one for the windows and the ring of a sequence, which the
first ones read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.causal_conv1d.triton_decode import (
    bias_of,
    columns_of,
    convolved,
    gate_arguments,
    gated,
)
from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.protocols import ConvConstants, Gates
from megatron_hybrid.kernels.replay_triton.segments import (
    POINTERS,
    ReplaySegments,
    checkpoint_at,
    of_sequence,
)

_kernel = launched(
    do_not_specialize=["tokens", "is_prompt"], do_not_specialize_on_alignment=POINTERS
)


def plan(
    part: DecodeRuns | PrefillSegments, chunk: int, width: int, ring_length: int
) -> ReplaySegments:
    """As in ConvReplay."""
    return ReplaySegments.of(part, chunk, ring_length)


def run(
    tokens: Tensor,
    constants: ConvConstants,
    state: Tensor,
    ring: Tensor,
    plan: ReplaySegments,
    out: Tensor | None = None,
    gates: Gates | None = None,
) -> Tensor:
    """As in ConvReplay. Rows of tokens, out, gates and the ring are contiguous."""
    weight, bias, silu = constants
    count, channels = tokens.shape
    out = tokens.new_empty(tokens.shape) if out is None else out
    arguments = (
        tokens, weight, bias, state, ring, out, *plan.figures, count, channels, plan.is_prompt,
        tokens.stride(0), *weight.stride(), *state.stride(), out.stride(0), ring.stride(1),
        *gate_arguments(gates),
    )  # fmt: skip
    sizes = {
        "RING": ring.shape[1], "WIDTH": weight.shape[1], "SILU": silu, "CHUNK": plan.chunk,
        "BLOCK_C": 512,
    }  # fmt: skip
    across = cdiv(channels, 512)
    grid = across, plan.sequences + 1
    if not plan.is_prompt:
        _decode_kernel[grid](*arguments, **sizes, num_warps=4, **OPTIONS)
        return out
    if count:
        _outputs_kernel[(across, cdiv(count, 16))](
            *arguments, plan.sequence_of_token, **sizes, BLOCK_T=16, num_warps=4
        )
    _states_kernel[grid](*arguments, **sizes, num_warps=4, **OPTIONS)
    return out


@_kernel
def _outputs_kernel(
    x, weight, bias, state, ring, out,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, channels, is_prompt,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    ring_place, in_gate, out_gate, in_gate_row, out_gate_row, sequence_of_token,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Outputs of BLOCK_T tokens of prompts."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    taps = columns_of(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = bias_of(bias, channel, is_channel)
    begin_row = tl.program_id(1) * BLOCK_T
    last_row = begin_row + BLOCK_T - 1
    sequence = tl.load(sequence_of_token + begin_row, mask=begin_row < tokens, other=-1)
    begin = tl.load(cu_ptr + sequence, mask=sequence >= 0, other=0)
    is_inside = (sequence >= 0) & (begin_row - begin >= WIDTH - 1)
    if is_inside & (
        tl.load(sequence_of_token + last_row, mask=last_row < tokens, other=-1) == sequence
    ):  # all inputs are the call's
        inputs = x + begin_row.to(tl.int64) * x_row + channel
        rows = ()
        for t in tl.static_range(1 - WIDTH, BLOCK_T):
            values = tl.load(inputs + t * x_row, mask=is_channel, other=0)
            if in_gate is not None:
                at = in_gate + (begin_row + t).to(tl.int64) * in_gate_row + channel
                values = gated(values, tl.load(at, mask=is_channel, other=0))
            rows = rows + (values,)
        for t in tl.static_range(BLOCK_T):
            y = convolved(offset, rows[t : t + WIDTH], taps, WIDTH, SILU)
            row = (begin_row + t).to(tl.int64)
            _store_output(
                y, out, row, out_row, out_gate, out_gate_row, channel, is_channel
            )  # fmt: skip
    else:
        for t in range(BLOCK_T):
            row = begin_row + t
            if row < tokens:
                sequence = tl.load(sequence_of_token + row)
                if sequence >= 0:
                    _output(
                        x, taps, offset, state, ring, out, cu_ptr, start_ptr, unfolded_ptr,
                        read_ptr, ring_ptr, sequence, row, channel, channels, is_prompt, x_row,
                        state_slot, state_channel, state_column, ring_place, out_row, in_gate,
                        out_gate, in_gate_row, out_gate_row, RING, WIDTH, SILU, CHUNK,
                    )  # fmt: skip
                else:
                    zeros = tl.zeros([BLOCK_C], out.dtype.element_ty)
                    at = out + row.to(tl.int64) * out_row + channel
                    tl.store(at, zeros, mask=is_channel)


@_kernel
def _states_kernel(
    x, weight, bias, state, ring, out,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, channels, is_prompt,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    ring_place, in_gate, out_gate, in_gate_row, out_gate_row,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Of a prompt the windows and the ring."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sequence = tl.program_id(1)
    wait_for_inputs()
    let_next_start()
    if sequence == tl.num_programs(1) - 1:  # the padding
        return
    begin, start, end, first, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, CHUNK
    )
    in_ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    first_checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    checkpoints = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    for i in range(first_checkpoint, checkpoints + 1):
        position, slot = checkpoint_at(
            position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i, checkpoints, first, last
        )
        _store_window(
            position, slot, x, state, ring, read_ptr, sequence, in_ring, begin, start, first,
            channel, channels, x_row, state_slot, state_channel, state_column, ring_place, in_gate,
            in_gate_row, RING, WIDTH,
        )  # fmt: skip
    _store_ring(
        x, ring, in_ring, begin, start, end, last, channel, channels, x_row, ring_place, in_gate,
        in_gate_row, RING,
    )  # fmt: skip


@_kernel
def _decode_kernel(
    x, weight, bias, state, ring, out,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, channels, is_prompt,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    ring_place, in_gate, out_gate, in_gate_row, out_gate_row,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """All of a decode. What is there before its inputs come is loaded before: the sequence's
    figures, and what its first token needs besides."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    sequence = tl.program_id(1)
    if sequence == tl.num_programs(1) - 1:  # the padding
        wait_for_inputs()
        for row in range(tl.load(cu_ptr + sequence), tokens):
            zeros = tl.zeros([BLOCK_C], out.dtype.element_ty)
            at = out + tl.cast(row, tl.int64) * out_row + channel
            tl.store(at, zeros, mask=is_channel)
        return
    taps = columns_of(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = bias_of(bias, channel, is_channel)
    begin, start, end, first, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, CHUNK
    )
    in_ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    # Each has one checkpoint.
    position, slot = checkpoint_at(
        position_ptr, slot_ptr, write_ptr, read_ptr, sequence, sequence, sequence + 1, first, last
    )
    _, own_slot = checkpoint_at(
        position_ptr, slot_ptr, write_ptr, read_ptr, sequence, sequence + 1, sequence + 1, first,
        last,
    )  # fmt: skip
    inputs = ()
    for column in tl.static_range(WIDTH - 1):
        inputs = inputs + (
            _earlier(
                start - (WIDTH - 1) + column, x, state, ring, read_ptr, sequence, in_ring, start,
                first, channel, channels, state_slot, state_channel, state_column, ring_place,
                RING, WIDTH,
            ),
        )  # fmt: skip
    wait_for_inputs()
    let_next_start()
    if end == start:
        return
    inputs = inputs + (_own(begin, x, channel, channels, x_row, in_gate, in_gate_row),)
    y = convolved(offset, inputs, taps, WIDTH, SILU)
    _store_output(y, out, begin, out_row, out_gate, out_gate_row, channel, is_channel)
    for row in range(begin + 1, begin + end - start):  # drafts
        _output(
            x, taps, offset, state, ring, out, cu_ptr, start_ptr, unfolded_ptr, read_ptr, ring_ptr,
            sequence, row, channel, channels, is_prompt, x_row, state_slot, state_channel,
            state_column, ring_place, out_row, in_gate, out_gate, in_gate_row, out_gate_row,
            RING, WIDTH, SILU, CHUNK,
        )  # fmt: skip
    for i in tl.static_range(2):
        _store_window(
            position if i == 0 else last, slot if i == 0 else own_slot, x, state, ring, read_ptr,
            sequence, in_ring, begin, start, first, channel, channels, x_row, state_slot,
            state_channel, state_column, ring_place, in_gate, in_gate_row, RING, WIDTH,
        )  # fmt: skip
    _store_ring(
        x, ring, in_ring, begin, start, end, last, channel, channels, x_row, ring_place, in_gate,
        in_gate_row, RING,
    )  # fmt: skip


@triton.jit
def _store_window(
    position, slot, x, state, ring, read_ptr, sequence, in_ring, begin, start, first, channel,
    channels, x_row, state_slot, state_channel, state_column, ring_place, in_gate, in_gate_row,
    RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The last inputs before this position, if there is a slot for them."""
    if slot > 0:
        window = ()
        for column in tl.static_range(WIDTH - 1):
            window = window + (
                _input(
                    position - (WIDTH - 1) + column, x, state, ring, read_ptr, sequence, in_ring,
                    begin, start, first, channel, channels, x_row, state_slot, state_channel,
                    state_column, ring_place, in_gate, in_gate_row, RING, WIDTH,
                ),
            )  # fmt: skip
        target = state + slot * state_slot + channel * state_channel
        for column in tl.static_range(WIDTH - 1):
            tl.store(target + column * state_column, window[column], mask=channel < channels)


@triton.jit
def _store_ring(
    x, ring, in_ring, begin, start, end, last, channel, channels, x_row, ring_place, in_gate,
    in_gate_row, RING: tl.constexpr,
):  # fmt: skip
    """What a later call may need again: the call's tokens from `last` on."""
    for position in range(tl.maximum(start, last), end):
        values = _own(begin + position - start, x, channel, channels, x_row, in_gate, in_gate_row)
        place = in_ring + position % RING
        tl.store(ring + place * ring_place + channel, values, mask=channel < channels)


@triton.jit
def _output(
    x, taps, offset, state, ring, out, cu_ptr, start_ptr, unfolded_ptr, read_ptr, ring_ptr,
    sequence, row, channel, channels, is_prompt, x_row, state_slot, state_channel, state_column,
    ring_place, out_row, in_gate, out_gate, in_gate_row, out_gate_row,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of a token, whose inputs may lie anywhere."""
    begin, start, _, first, _ = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, CHUNK
    )
    in_ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    row = tl.cast(row, tl.int64)
    position = (start + (row - begin)).to(tl.int32)
    inputs = ()
    for column in tl.static_range(WIDTH):
        inputs = inputs + (
            _input(
                position - (WIDTH - 1) + column, x, state, ring, read_ptr, sequence, in_ring,
                begin, start, first, channel, channels, x_row, state_slot, state_channel,
                state_column, ring_place, in_gate, in_gate_row, RING, WIDTH,
            ),
        )  # fmt: skip
    y = convolved(offset, inputs, taps, WIDTH, SILU)
    _store_output(y, out, row, out_row, out_gate, out_gate_row, channel, channel < channels)


@triton.jit
def _input(
    position, x, state, ring, read_ptr, sequence, in_ring, begin, start, first, channel, channels,
    x_row, state_slot, state_channel, state_column, ring_place, in_gate, in_gate_row,
    RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the token at this position brought: from the call, the ring or the window."""
    own = tl.where(position >= start, channels, 0)
    values = _own(begin + position - start, x, channel, own, x_row, in_gate, in_gate_row)
    earlier = _earlier(
        position, x, state, ring, read_ptr, sequence, in_ring, start, first, channel, channels,
        state_slot, state_channel, state_column, ring_place, RING, WIDTH,
    )  # fmt: skip
    return tl.where(position >= start, values, earlier)


@triton.jit
def _own(row, x, channel, channels, x_row, in_gate, in_gate_row):
    """What a row of the call brings."""
    values = tl.load(x + row * x_row + channel, mask=channel < channels, other=0)
    if in_gate is not None:
        gates = tl.load(in_gate + row * in_gate_row + channel, mask=channel < channels, other=0)
        values = gated(values, gates)
    return values


@triton.jit
def _earlier(
    position, x, state, ring, read_ptr, sequence, in_ring, start, first, channel, channels,
    state_slot, state_channel, state_column, ring_place, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the token at this position, before the call's, brought: from the ring or the window."""
    kept = tl.where((position < start) & (position >= first), channels, 0)
    place = in_ring + (position + RING) % RING
    earlier = tl.load(ring + place * ring_place + channel, mask=channel < kept, other=0)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    in_window = tl.where((position < first) & (read > 0), channels, 0)
    column = position - (first - (WIDTH - 1))
    window = state + read * state_slot + column * state_column + channel * state_channel
    oldest = tl.load(window, mask=channel < in_window, other=0).to(x.dtype.element_ty)
    return tl.where(position >= first, earlier, oldest)


@triton.jit
def _store_output(y, out, row, out_row, out_gate, out_gate_row, channel, mask):
    if out_gate is not None:
        gates = tl.load(out_gate + row * out_gate_row + channel, mask=mask, other=0)
        y = gated(y.to(out.dtype.element_ty), gates)
    tl.store(out + row * out_row + channel, y, mask=mask)
