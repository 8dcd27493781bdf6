"""The Mamba1 selective scan in Triton; what it computes and its calls are those of reference.py.

Prefill walks over a sequence token by token, as the paper's algorithm 2 does (arXiv 2312.00752). A
program is one warp that keeps the states of some channels in registers:

    16 channels of 16 states    thread 0       thread 1        thread 2 ...
    slice 0                     d 0, n 0-3     d 0, n 4-7      d 1, n 0-3
    slice 1                     d 0, n 8-11    d 0, n 12-15    d 1, n 8-11

What bounds it are the exponentials (one for every state, token and channel, at 16 a clock and
processor) and, right behind them, all other instructions. So a thread keeps many states where there
is enough work, because all threads of a channel compute its step size and its gate, and few where
a single sequence would leave processors idle.

Tokens are taken in groups, counted from the sequence's position 0. While one group is computed, the
rows of the next are on their way, as they lie in memory. Groups that a segment's or a checkpoint's
end cuts are loaded on their own.

A token's arithmetic is written out as products, fused multiply-adds and sums of two in an order
that is the same for any number of threads a channel. So a sequence's bits depend on nothing but the
sequence: not on where it was cut, as long as states are kept in float32, and not on the sequences
beside it.

No sequence of a call may write a slot that another one reads: each program reads its initial state
when it starts, which may be after another has ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.mamba1_scan.triton_decode import (
    LOG2_E,
    channel_block,
    checked_output,
    decode,
    silu,
    softplus,
)

__all__ = ["decode", "plan", "prefill"]

# What a token costs a warp, in instructions, where a thread keeps so many states.
_INSTRUCTIONS = {2: 62, 4: 75, 8: 106, 16: 160}
_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
# Their alignment differs from step to step: no compilation for each.
_INDICES = (
    "cu_seqlens_ptr start_ptr read_ptr write_ptr cu_checkpoints_ptr position_ptr slot_ptr"
).split()


def plan(segments: PrefillSegments, kernel_chunk: int) -> PrefillSegments:
    """Nothing to prepare: the kernel reads the segments on the device; any chunk will do."""
    return segments


def prefill(
    x: Tensor,
    z: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    plan: PrefillSegments,
    out: Tensor | None = None,
    *,
    states_per_thread: int | None = None,
) -> Tensor:
    """As in reference.py; the outputs of padding tokens are not written. The state size is a power
    of two from 4 to 128. `states_per_thread`: 2, 4, 8 or 16, if not what _states_per_thread
    chooses."""
    y = checked_output(x, z, dt, B, C, A, D, dt_bias, state, out)
    B, C = _pairs(B), _pairs(C)
    channels, size = A.shape
    each = states_per_thread or _states_per_thread(plan, x, size)
    block = channel_block(channels, min(32, max(1, 32 * each // size)))
    _prefill_kernel[(channels // block, plan.read_slot.shape[0])](
        x, z, dt, B, C, A, D, dt_bias, state, y,
        plan.cu_seqlens, plan.start_position, plan.read_slot, plan.write_slot,
        plan.cu_checkpoints, plan.checkpoint_position, plan.checkpoint_slot, state.stride(0),
        # Constants, so that the rows of a group differ by what a load instruction can hold.
        ROWS=(x.stride(0), z.stride(0), dt.stride(0), B.stride(0), C.stride(0)),
        Y_ROW=y.stride(0),
        SIZE=size,
        BLOCK=block,
        SLICES=max(1, size * block // 128),
        # Two groups' rows take at most some 180 registers.
        PLACES=min(8, 128 // (each * x.element_size())),
        num_warps=1,
    )  # fmt: skip
    return y


def _states_per_thread(segments: PrefillSegments, x: Tensor, size: int) -> int:
    """What costs the busiest quarter of a processor, which issues one instruction a clock, the
    fewest of them, were all sequences as long as the longest."""
    tokens, channels = x.shape
    threads = channels * size * triton.cdiv(tokens, max(segments.longest, 1))  # a state each

    def cost(each: int) -> int:
        warps = triton.cdiv(threads, 32 * each)
        return triton.cdiv(warps, 4 * _processors(x.device)) * _INSTRUCTIONS[each]

    return min(_INSTRUCTIONS, key=cost)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _pairs(rows: Tensor) -> Tensor:
    """[T, state] -> [T, state / 2]: two values as one integer, the first in its lower half. As
    single values of 16 bits they would take twice as many registers on their way."""
    if rows.dtype not in _PAIR:
        raise ValueError(f"B and C are {rows.dtype}; they must be bfloat16 or float32.")
    is_odd = (rows.stride(0) | rows.storage_offset()) % 2
    if is_odd or rows.data_ptr() % (2 * rows.element_size()):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(_PAIR[rows.dtype])


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _prefill_kernel(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, y_ptr,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr, state_slot,
    ROWS: tl.constexpr, Y_ROW: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    SLICE: tl.constexpr = SIZE // SLICES
    sequence = tl.program_id(1)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    end = start + length
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    if (length == 0) & (write <= 0):
        return  # padding

    # Everything is [BLOCK channels or 1, states of a slice or 1]; of states a tuple of slices.
    d = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    in_slot = d * SIZE + tl.arange(0, SLICE)[None, :]
    pair = tl.arange(0, SLICE // 2)[None, :]
    state_ptr += in_slot
    is_read = (in_slot >= 0) & (read > 0)
    h = ()
    a = ()
    for s in tl.static_range(SLICES):
        old = tl.load(state_ptr + read * state_slot + s * SLICE, mask=is_read, other=0.0)
        h = h + (old.to(tl.float32),)
        a = a + (tl.load(a_ptr + in_slot + s * SLICE) * LOG2_E,)
    constants = (a, tl.load(d_ptr + d), tl.load(bias_ptr + d))
    origin = first_token - start  # the row at which position 0 would lie
    inputs = (
        x_ptr + origin * ROWS[0] + d,
        z_ptr + origin * ROWS[1] + d,
        dt_ptr + origin * ROWS[2] + d,
        b_ptr + origin * ROWS[3] + pair,
        c_ptr + origin * ROWS[4] + pair,
    )
    y_ptr += origin * Y_ROW + d
    checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)

    position = start
    while position < end:
        stop = end
        slot = tl.cast(0, tl.int64)
        if checkpoint < last_checkpoint:
            stop = tl.load(position_ptr + checkpoint).to(tl.int32)
            slot = tl.load(slot_ptr + checkpoint).to(tl.int64)
        group = position // PLACES * PLACES
        if (group < position) | (group + PLACES > stop):
            # A cut group. Places outside repeat one inside, with a step of 0: no decay, no input.
            cut = ()
            for i in tl.static_range(PLACES):
                inside = (group + i >= position) & (group + i < stop)
                at = tl.minimum(tl.maximum(group + i, position), stop - 1)
                x, z, dt, b, c = _load_row(inputs, at, 0, ROWS, SLICES, SLICE)
                cut = cut + ((x, z, tl.where(inside, dt, float("-inf")), b, c),)
            outputs = y_ptr + group.to(tl.int64) * Y_ROW
            for i in tl.static_range(PLACES):
                inside = (group + i >= position) & (group + i < stop)
                h, y = _step(h, cut[i], constants, SLICES, SLICE)
                y = y.to(y_ptr.dtype.element_ty)
                tl.store(outputs + i * Y_ROW, y, mask=(d >= 0) & inside)
            position = tl.minimum(group + PLACES, stop)
        else:
            # All whole groups up to `stop`, two a round, so that rows stay where they were loaded.
            # After the last one it is loaded again.
            position = stop // PLACES * PLACES
            last = position - PLACES
            rows = _load_group(inputs, group, ROWS, SLICES, SLICE, PLACES)
            for even in range(group, position, 2 * PLACES):
                odd = even + PLACES
                ahead = _load_group(inputs, tl.minimum(odd, last), ROWS, SLICES, SLICE, PLACES)
                h = _steps(h, rows, constants, y_ptr, even, Y_ROW, SLICES, SLICE, PLACES)
                if odd < position:
                    even_ahead = tl.minimum(odd + PLACES, last)
                    rows = _load_group(inputs, even_ahead, ROWS, SLICES, SLICE, PLACES)
                    h = _steps(h, ahead, constants, y_ptr, odd, Y_ROW, SLICES, SLICE, PLACES)
        if position == stop:
            if slot > 0:
                _store_state(state_ptr + slot * state_slot, h, SLICES, SLICE)
            checkpoint += 1
    if write > 0:
        _store_state(state_ptr + write * state_slot, h, SLICES, SLICE)


@triton.jit
def _store_state(state_ptr, h, SLICES: tl.constexpr, SLICE: tl.constexpr):
    for s in tl.static_range(SLICES):
        tl.store(state_ptr + s * SLICE, h[s].to(state_ptr.dtype.element_ty))


@triton.jit
def _load_group(
    inputs, position,
    ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    rows = ()
    for i in tl.static_range(PLACES):
        rows = rows + (_load_row(inputs, position, i, ROWS, SLICES, SLICE),)
    return rows


@triton.jit
def _load_row(
    inputs, position, i: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """x, z, dt and the slices of B and C at position + i."""
    at = position.to(tl.int64)
    row = ()
    for k in tl.static_range(3):
        row = row + (tl.load(inputs[k] + at * ROWS[k] + i * ROWS[k]),)
    for k in tl.static_range(3, 5):
        slices = ()
        for s in tl.static_range(SLICES):
            in_row = s * (SLICE // 2)
            slices = slices + (tl.load(inputs[k] + at * ROWS[k] + (i * ROWS[k] + in_row)),)
        row = row + (slices,)
    return row


@triton.jit
def _steps(
    h, rows, constants, y_ptr, position,
    Y_ROW: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The tokens of a whole group: stores their outputs, returns the state after them."""
    y_ptr += position.to(tl.int64) * Y_ROW
    for i in tl.static_range(PLACES):
        h, y = _step(h, rows[i], constants, SLICES, SLICE)
        tl.store(y_ptr + i * Y_ROW, y.to(y_ptr.dtype.element_ty))
    return h


@triton.jit
def _step(h, row, constants, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """One token: the state after it, and its output [BLOCK, 1]."""
    x, z, raw_dt, b, c = row
    a, skip, bias = constants
    BLOCK: tl.constexpr = x.shape[0]
    x = x.to(tl.float32)
    dt = softplus(raw_dt.to(tl.float32) + bias)
    dtx = dt * x
    states = ()
    sums = ()
    for s in tl.static_range(SLICES):
        b_even, b_odd = _unpair(b[s])
        c_even, c_odd = _unpair(c[s])
        bs = tl.reshape(tl.join(b_even, b_odd), [1, SLICE])
        hs = tl.fma(h[s], tl.exp2(dt * a[s]), dtx * bs)
        even, odd = tl.split(tl.reshape(hs, [BLOCK, SLICE // 2, 2]))
        pairs = tl.fma(odd, c_odd, even * c_even)
        fours = tl.sum(tl.reshape(pairs, [BLOCK, SLICE // 4, 2]), 2)
        states = states + (hs,)
        sums = sums + (fours,)
    # By halves of the states from here on: first slices, then threads.
    y = sums[0]
    if SLICES == 2:
        y = sums[0] + sums[1]
    if SLICES == 4:
        y = (sums[0] + sums[2]) + (sums[1] + sums[3])
    for _ in tl.static_range(5):
        if y.shape[1] > 1:
            y = tl.sum(tl.reshape(y, [BLOCK, 2, y.shape[1] // 2]), 1)
    return states, tl.fma(skip, x, y) * silu(z.to(tl.float32))


@triton.jit
def _unpair(pair):
    """Two float32 of an integer that holds two bf16 or two float32; see _pairs."""
    if pair.dtype == tl.int64:
        even = (pair & 0xFFFFFFFF).to(tl.int32)
        odd = (pair >> 32).to(tl.int32)
    else:
        even = pair << 16
        odd = pair & -65536
    return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
