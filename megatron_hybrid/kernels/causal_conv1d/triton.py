"""Causal depthwise convolution in Triton; the meaning is reference.py's, the calls are in
protocols.py.

Taps are added from the newest input to the oldest, in prefill and in decode, so an output has the
same bits however its sequence was cut into segments.

Windows, taps and the inputs of an output are tuples in Triton, the oldest first.

All tensors may have any strides, but rows of x and out are contiguous. Loads are vectorised along
channels, so on a GPU `state` is best laid out as [slots, W - 1, channels] and `weight` as
[W, channels] (both passed as transposed views).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, DecodeSlots, PrefillSegments
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.protocols import ConvConstants

# These differ from step to step, and so would their alignment: no compilation for each of those.
_INDICES = (
    "cu_seqlens sequence_of_token start_position read_slot write_slot "
    "checkpoint_sequence checkpoint_position checkpoint_slot"
).split()
_kernel = triton.jit(
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
) -> Tensor:
    """Zeros for padding tokens. Two slots that are written in one call must differ, unless both
    windows are the same."""
    weight, bias, silu = constants
    tokens, channels = x.shape
    width = weight.shape[1]
    sequences, checkpoints = plan.read_slot.shape[0], plan.checkpoint_slot.shape[0]
    out = x.new_empty((tokens, channels)) if out is None else out
    # The windows that were read: the second launch needs some of them after it overwrote others.
    old = x.new_empty((sequences, width - 1, channels))
    # Channels are the fast axis of the grid: programs that run together read whole rows.
    grid = triton.cdiv(channels, 512), max(triton.cdiv(tokens, 16), 1)
    _outputs_kernel[grid](
        x, weight, bias, state, out, old,
        plan.cu_seqlens, plan.sequence_of_token, plan.read_slot,
        tokens, channels, sequences,
        x.stride(0), *weight.stride(), *state.stride(), out.stride(0),
        WIDTH=width, SILU=silu, BLOCK_T=16, BLOCK_C=512, num_warps=4,
    )  # fmt: skip
    grid = triton.cdiv(channels, 512), sequences + checkpoints
    _windows_kernel[grid](
        x, state, old,
        plan.cu_seqlens, plan.start_position, plan.read_slot, plan.write_slot,
        plan.checkpoint_sequence, plan.checkpoint_position, plan.checkpoint_slot,
        channels, sequences, x.stride(0), *state.stride(),
        WIDTH=width, BLOCK_C=512, num_warps=2,
    )  # fmt: skip
    return out


class Tile(NamedTuple):
    """What a program of one token a sequence computes."""

    channels: int  # powers of 2, both
    sequences: int
    warps: int


def decode_tile(sequences: int, channels: int) -> Tile:
    """16 bytes a thread; of several sequences, which share taps, where that leaves enough programs
    to keep a device's memory busy."""
    return Tile(256, 4 if sequences * channels >= 2**19 else 1, warps=1)


def decode(
    x: Tensor,
    constants: ConvConstants,
    state: Tensor,
    plan: DecodeSlots,
    out: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """One token a sequence: as above with T = N sequences; zeros for padded rows."""
    weight, bias, silu = constants
    rows, channels = x.shape
    out = x.new_empty((rows, channels)) if out is None else out
    tile = decode_tile(rows, channels) if tile is None else tile
    _decode_kernel[(triton.cdiv(channels, tile.channels), triton.cdiv(rows, tile.sequences))](
        x, weight, bias, state, out, plan.read_slot, plan.write_slot, rows, channels,
        x.stride(0), *weight.stride(), *state.stride(), out.stride(0),
        WIDTH=weight.shape[1], SILU=silu, BLOCK_S=tile.sequences, BLOCK_C=tile.channels,
        num_warps=tile.warps, **OPTIONS,
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
    *,
    tile: Tile | None = None,
) -> Tensor:
    """DecodeRuns: as above with tokens T. The ring is contiguous. `tile`: of single tokens."""
    weight, bias, silu = constants
    tokens, channels = x.shape
    sequences = plan.read_slot.shape[0]
    out = x.new_empty((tokens, channels)) if out is None else out
    arguments = (
        x, weight, bias, state, ring, out, *plan.tensors, tokens, channels,
        x.stride(0), *weight.stride(), *state.stride(), out.stride(0),
    )  # fmt: skip
    sizes = {"RING": ring.shape[1], "WIDTH": weight.shape[1], "SILU": silu}
    if plan.most_unfolded is None:
        _runs_kernel[(triton.cdiv(channels, 256), sequences + 1)](
            *arguments, **sizes, BLOCK_C=256, num_warps=4, **OPTIONS
        )
        return out
    tile = decode_tile(sequences, channels) if tile is None else tile
    rows = max(tokens, sequences)  # padding among the one or the other
    _single_kernel[(triton.cdiv(channels, tile.channels), triton.cdiv(rows, tile.sequences))](
        *arguments, sequences, **sizes, BLOCK_S=tile.sequences, BLOCK_C=tile.channels,
        num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    return out


@_kernel
def _outputs_kernel(
    x, weight, bias, state, out, old,
    cu_seqlens, sequence_of_token, read_slot,
    tokens, channels, sequences,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
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
        taps = _columns(
            weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH
        )
        offset = _bias(bias, channel, is_channel)
        rows = ()
        for t in tl.static_range(1 - WIDTH, BLOCK_T):
            rows = rows + (tl.load(inputs + t * x_row, mask=is_channel, other=0),)
        outputs = out + first.to(tl.int64) * out_row + channel
        for t in tl.static_range(BLOCK_T):
            y = _convolve(offset, rows[t : t + WIDTH], taps, WIDTH, SILU)
            tl.store(outputs + t * out_row, y, mask=is_channel)
    else:
        taps = _columns(
            weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH
        )
        offset = _bias(bias, channel, is_channel)
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
            taken = ()
            for column in tl.static_range(WIDTH - 1):
                back = WIDTH - 1 - column
                is_new = age >= back
                new = tl.load(
                    inputs - back * x_row, mask=(is_read & is_new)[:, None] & mask, other=0
                )
                is_kept = is_read & (age < back) & (slot > 0)
                place = window + ((age + column) * state_column)[:, None]
                kept = tl.load(place, mask=is_kept[:, None] & mask, other=0)
                taken = taken + (tl.where(is_new[:, None], new, kept.to(new.dtype)),)
            newest = tl.load(inputs, mask=is_read[:, None] & mask, other=0)
            taken = taken + (newest,)
            outs = _convolve(offset, taken, taps, WIDTH, SILU)
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
    channels, sequences, x_row, state_slot, state_channel, state_column,
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
            else:
                old_row = (sequence + 1) * (WIDTH - 1) + token
                inputs = tl.load(old + old_row * channels + channel, mask=has_window, other=0)
            target = state + slot * state_slot + column * state_column + channel * state_channel
            tl.store(target, inputs, mask=is_channel)


@triton.jit(do_not_specialize=["rows"])
def _decode_kernel(
    x, weight, bias, state, out, read_slot, write_slot, rows, channels,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    is_channel = channel < channels
    taps = _columns(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = _bias(bias, channel, is_channel)
    row = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    read = _by_row(read_slot, row, rows).to(tl.int64)
    write = _by_row(write_slot, row, rows).to(tl.int64)
    # The whole window is read before any of it is written: both may be the same slot.
    windows = state + channel * state_channel
    has_window = channel < tl.where(read > 0, channels, 0)
    before = _columns(
        windows + read * state_slot, state_column, has_window, state.dtype.element_ty, WIDTH - 1
    )
    wait_for_inputs()  # the state was there before
    let_next_start()
    row = row[:, None].to(tl.int64)
    has_token = channel < tl.where((read > 0) | (write > 0), channels, 0)
    newest = tl.load(x + row * x_row + channel, mask=has_token, other=0)
    inputs = ()
    for column in tl.static_range(WIDTH - 1):
        inputs = inputs + (before[column].to(newest.dtype),)
    y = _convolve(offset, inputs + (newest,), taps, WIDTH, SILU)
    y = tl.where(has_token, y, 0.0)
    tl.store(out + row * out_row + channel, y, mask=channel < tl.where(row < rows, channels, 0))
    is_written = channel < tl.where(write > 0, channels, 0)
    window = windows + write * state_slot
    _store_window(window, state_column, before[1:] + (newest,), is_written, WIDTH)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _single_kernel(
    x, weight, bias, state, ring, out,
    cu_seqlens, position, unfolded, read_slot, write_slot, ring_row,
    checkpoint_position, checkpoint_slot, tokens, channels,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row, sequences,
    RING: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """_runs_kernel of sequences of one token each, or none: all that is read is in flight at once,
    and what was there before the kernel in front is read while that ends."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    is_channel = channel < channels
    taps = _columns(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = _bias(bias, channel, is_channel)
    row = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    begin = _by_row(cu_seqlens, row, sequences)
    count = _by_row(cu_seqlens + 1, row, sequences) - begin
    start = _by_row(position, row, sequences)
    first_unfolded = start - _by_row(unfolded, row, sequences)
    read = _by_row(read_slot, row, sequences).to(tl.int64)
    write = _by_row(write_slot, row, sequences).to(tl.int64)
    kept_position = _by_row(checkpoint_position, row, sequences)
    kept = _by_row(checkpoint_slot, row, sequences).to(tl.int64)
    first_place = _by_row(ring_row, row, sequences).to(tl.int64) * RING
    used = tl.load(cu_seqlens + sequences)
    windows = state + channel * state_channel
    window = windows + read * state_slot
    inputs = ring + first_place * channels + channel
    before = _inputs_before(
        start, first_unfolded, inputs, window, channel, channels, read, state_column, RING, WIDTH
    )

    wait_for_inputs()
    let_next_start()
    has_token = channel < tl.where(count > 0, channels, 0)
    token = begin.to(tl.int64)
    newest = tl.load(x + token * x_row + channel, mask=has_token, other=0)
    y = _convolve(offset, before + (newest,), taps, WIDTH, SILU)
    tl.store(out + token * out_row + channel, y, mask=has_token)
    if tl.program_id(1) * BLOCK_S + BLOCK_S > used:
        token = row[:, None].to(tl.int64)
        is_padding = channel < tl.where((token >= used) & (token < tokens), channels, 0)
        nothing = tl.zeros((BLOCK_S, BLOCK_C), out.dtype.element_ty)
        tl.store(out + token * out_row + channel, nothing, mask=is_padding)

    after = ()
    for column in tl.static_range(1, WIDTH):
        following = newest if column == WIDTH - 1 else before[column]
        after = after + (tl.where(count > 0, following, before[column - 1]),)
    has_checkpoint = (kept > 0) & (first_unfolded < kept_position)
    has_checkpoint &= kept_position <= start + count
    if tl.sum(tl.sum(has_checkpoint.to(tl.int32), 1), 0) > 0:  # before the window is overwritten
        old = tl.where(has_checkpoint, read, 0)
        values = _inputs_before(
            tl.minimum(kept_position, start), first_unfolded, inputs, window, channel, channels,
            old, state_column, RING, WIDTH,
        )  # fmt: skip
        kept_inputs = ()
        for column in tl.static_range(WIDTH - 1):
            is_last = kept_position > start
            kept_inputs = kept_inputs + (tl.where(is_last, after[column], values[column]),)
        is_kept = channel < tl.where(has_checkpoint, channels, 0)
        _store_window(windows + kept * state_slot, state_column, kept_inputs, is_kept, WIDTH)
    is_recorded = channel < tl.where((count > 0) & (write <= 0), channels, 0)
    tl.store(inputs + start % RING * channels, newest, mask=is_recorded)
    is_written = channel < tl.where(write > 0, channels, 0)
    _store_window(windows + write * state_slot, state_column, after, is_written, WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def _runs_kernel(
    x, weight, bias, state, ring, out,
    cu_seqlens, position, unfolded, read_slot, write_slot, ring_row,
    checkpoint_position, checkpoint_slot, tokens, channels,
    x_row, weight_channel, weight_tap, state_slot, state_channel, state_column, out_row,
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
    taps = _columns(weight + channel * weight_channel, weight_tap, is_channel, tl.float32, WIDTH)
    offset = _bias(bias, channel, is_channel)

    # The inputs before the next token, all at once: one after the other would wait for memory as
    # often as there are unfolded ones.
    windows = state + channel * state_channel
    window = windows + read * state_slot
    inputs = ring + first_place * channels + channel
    before = _inputs_before(
        start, first_unfolded, inputs, window, channel, channels, read, state_column, RING, WIDTH
    )
    if (kept > 0) & (first_unfolded < kept_position) & (kept_position <= start):
        values = _inputs_before(
            kept_position, first_unfolded, inputs, window, channel, channels, read, state_column,
            RING, WIDTH,
        )  # fmt: skip
        _store_window(windows + kept * state_slot, state_column, values, is_channel, WIDTH)
    is_written = channel < tl.where(write > 0, channels, 0)
    if begin == end:
        _store_window(windows + write * state_slot, state_column, before, is_written, WIDTH)
    for token in range(begin, end):
        row = tl.cast(token, tl.int64)
        newest = tl.load(x + row * x_row + channel, mask=is_channel, other=0)
        y = _convolve(offset, before + (newest,), taps, WIDTH, SILU)
        tl.store(out + row * out_row + channel, y, mask=is_channel)
        before = before[1:] + (newest,)
        if token == begin:
            _store_window(windows + write * state_slot, state_column, before, is_written, WIDTH)
            is_there = (kept > 0) & (start + 1 == kept_position)
            is_kept = channel < tl.where(is_there, channels, 0)
            _store_window(windows + kept * state_slot, state_column, before, is_kept, WIDTH)
        if (token > begin) | (write <= 0):
            place = first_place + (start + token - begin) % RING
            tl.store(ring + place * channels + channel, newest, mask=is_channel)


@triton.jit
def _by_row(figures, row, rows):
    """figures[row], zeros past the last one: [R] -> [R, 1]. Loaded as a vector: of a matrix every
    thread would load it once for each of its columns."""
    return tl.load(figures + row, mask=row < rows, other=0)[:, None]


@triton.jit
def _inputs_before(
    position, first_unfolded, inputs, window, channel, channels, read, state_column,
    RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The inputs of the WIDTH - 1 tokens before this position: from the ring, or, before the first
    unfolded one, from the window that the state has."""
    found = ()
    for column in tl.static_range(WIDTH - 1):
        token = position - (WIDTH - 1) + column
        is_unfolded = token >= first_unfolded
        in_ring = channel < tl.where(is_unfolded, channels, 0)
        in_window = channel < tl.where(is_unfolded | (read <= 0), 0, channels)
        unfolded = tl.load(inputs + token % RING * channels, mask=in_ring, other=0)
        place = window + (column + position - first_unfolded) * state_column
        old = tl.load(place, mask=in_window, other=0)
        found = found + (tl.where(is_unfolded, unfolded, old.to(unfolded.dtype)),)
    return found


@triton.jit
def _columns(first, column_stride, mask, dtype: tl.constexpr, COUNT: tl.constexpr):
    values = ()
    for column in tl.static_range(COUNT):
        loaded = tl.load(first + column * column_stride, mask=mask, other=0)
        values = values + (loaded.to(dtype),)
    return values


@triton.jit
def _store_window(window, state_column, inputs, mask, WIDTH: tl.constexpr):
    for column in tl.static_range(WIDTH - 1):
        tl.store(window + column * state_column, inputs[column], mask=mask)


@triton.jit
def _convolve(offset, inputs, taps, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """offset + taps * inputs, newest input first, and silu of it."""
    y = offset
    for back in tl.static_range(1, WIDTH + 1):
        y += taps[WIDTH - back] * inputs[WIDTH - back].to(tl.float32)
    if SILU:
        y = y / (1 + tl.exp(-y))
    return y


@triton.jit
def _bias(bias, channel, mask):
    values = tl.zeros(mask.shape, tl.float32)
    if bias is not None:
        values = tl.load(bias + channel, mask=mask, other=0).to(tl.float32)
    return values
