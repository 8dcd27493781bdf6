"""The Mamba1 selective scan in Triton; what it computes is in reference.py, its calls in
protocols.py.

Prefill walks over a sequence, as the paper's algorithm 2 does (arXiv 2312.00752): a program keeps
the states of some channels in registers and takes 16 tokens at a time,

    tokens         0        16       32       48
    loaded                  |--------|                  while the group before is scanned
    scanned        |--------|

in groups that lie on the grid of the sequence's absolute positions. Places before the segment's
start or past its end have a step of 0 and B = 0, which leaves the state alone.

What bounds it are the exponentials: state + 3 of them a token and channel, 16 a clock and
processor. So step sizes, their products with the inputs and the gates are computed once, by threads
that each have some channels and places; for the scan itself a thread has 4 of a channel's states
(or 2, where a single sequence would leave processors idle, or 8, where several would not) and all
places:

    step sizes, inputs    [places, channels]  -> places x [channels, 1]
    B, C                  [places, state]     -> places x [1, state]
    outputs               places x [channels, 1] -> [places, channels]

All that the states and outputs go through is written as products, fused multiply-adds and sums of
two in one order. So a sequence's bits depend on nothing but the sequence: not on where it was cut,
if states are kept in float32, nor on the sequences beside it.

No sequence of a call may write a slot that another one reads: each program reads its initial state
when it starts, which may be after another has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.devices import ChunkedSegments, processors, row_strides
from megatron_hybrid.kernels.launching import are_compiled_ahead, cdiv, launched
from megatron_hybrid.kernels.mamba1_scan.triton_decode import (
    LOG2_E,
    channel_block,
    checked_output,
    decode,
    decode_runs,
    silu,
    softplus,
)
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens
from megatron_hybrid.kernels.state_rounding.triton import as_stored

__all__ = ["Tiling", "decode", "decode_runs", "plan", "prefill"]

# Their alignment differs from step to step: no compilation for each.
_INDICES = (
    "cu_seqlens_ptr start_ptr read_ptr write_ptr cu_checkpoints_ptr position_ptr slot_ptr"
).split()


class Tiling(NamedTuple):
    """How programs cover the channels."""

    states: int  # of a thread: 2, 4 or 8
    num_warps: int  # fewer where they are too many for the channels


def plan(segments: PrefillSegments, kernel_chunk: int) -> ChunkedSegments:
    """Nothing is read here: the kernel reads the segments on the device."""
    return ChunkedSegments(segments, kernel_chunk)


def prefill(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    plan: ChunkedSegments,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """The outputs of padding tokens are not written. The state size is a power of two from 4 to
    128. `tiling`: other than what _tiling chooses."""
    y = checked_output(tokens, constants, state, out)
    segments, chunk = plan
    channels, size = constants.A.shape
    tilings = [tiling or _tiling(segments, tokens.x, size)]
    if are_compiled_ahead():  # another step chooses another one
        tilings = [_tiling_of(each) for each in _CLOCKS if each <= size]
    for states, num_warps in tilings:
        block = channel_block(channels, max(1, num_warps * 32 * states // size))
        _prefill_kernel[(channels // block, segments.read_slot.shape[0])](
            *tokens, *constants[:3], state, y, *segments.of_sequences,
            *row_strides(*tokens, y, state), constants.rounding_seed,
            SIZE=size,
            BLOCK=block,
            PLACES=min(16, chunk & -chunk),  # checkpoints lie at multiples of it
            num_warps=max(1, block * size // (32 * states)),
        )  # fmt: skip
    return y


# Clocks of a warp for one token, where a thread has so many states, on an H200.
_CLOCKS = {2: 50, 4: 71, 8: 124}
_LEAST_WARPS = 1.4  # of a quarter of a processor: one alone waits for itself


def _tiling(segments: PrefillSegments, x: Tensor, size: int) -> Tiling:
    """The fewest clocks for the quarter of a processor that has most to do, were all sequences as
    long as the longest. All tilings give the same bits."""
    tokens, channels = x.shape
    states = channels * size * cdiv(tokens, max(segments.longest, 1))  # of all sequences

    def cost(each: int) -> float:
        warps = cdiv(cdiv(states, 32 * each), 4 * processors(x.device))
        return _CLOCKS[each] * max(warps, _LEAST_WARPS)

    return _tiling_of(min((each for each in _CLOCKS if each <= size), key=cost))


def _tiling_of(states: int) -> Tiling:
    return Tiling(states, num_warps=1 if states == 8 else 4)


@launched(do_not_specialize_on_alignment=_INDICES)
def _prefill_kernel(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, y_ptr,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr,
    x_row, z_row, dt_row, b_row, c_row, y_row, state_slot, seed,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    end = start + length
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    if (length == 0) & (write <= 0):
        return  # padding

    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, SIZE)
    in_slot = d[:, None] * SIZE + n[None, :]
    state_ptr += in_slot
    h = tl.zeros([BLOCK, SIZE], tl.float32)
    if read > 0:
        h = tl.load(state_ptr + read * state_slot).to(tl.float32)
    a = tl.load(a_ptr + in_slot) * LOG2_E
    skip = tl.load(d_ptr + d)[None, :]
    bias = tl.load(bias_ptr + d)[None, :]
    origin = first_token - start  # the row at which position 0 would lie
    x_ptr += origin * x_row + d[None, :]
    z_ptr += origin * z_row + d[None, :]
    dt_ptr += origin * dt_row + d[None, :]
    b_ptr += origin * b_row + n[None, :]
    c_ptr += origin * c_row + n[None, :]
    y_ptr += origin * y_row + d[None, :]
    checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    due = _due(position_ptr, checkpoint, last_checkpoint)

    group = start // PLACES * PLACES
    x, z, raw_dt, b, c = _load(
        x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, x_row, z_row, dt_row, b_row, c_row,
        group, start, end, PLACES,
    )  # fmt: skip
    x, dt, b, c = prepared(x, raw_dt, b, c, bias)
    # `while`: through a `for` the compiler moves the preparation behind the exchange among threads,
    # where all threads of a channel would repeat it.
    while group < end:
        ahead = _load(
            x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, x_row, z_row, dt_row, b_row, c_row,
            group + PLACES, start, end, PLACES,
        )  # fmt: skip
        dts = columns(tl.trans(dt))
        inputs = columns(tl.trans(dt * x))
        bs = columns(tl.trans(b))
        cs = columns(tl.trans(c))
        ys = ()
        for i in tl.static_range(PLACES):
            decay = tl.exp2(dts[i] * a)
            h = tl.fma(h, decay, inputs[i] * tl.trans(bs[i]))
            ys = ys + (column_sum(h, tl.trans(cs[i])),)
        y = tl.fma(skip, x, tl.trans(tile_of(ys))) * silu(z.to(tl.float32))
        place = tl.arange(0, PLACES)[:, None]
        valid = (group + place >= start) & (group + place < end)
        outputs = y_ptr + group.to(tl.int64) * y_row + place * y_row
        tl.store(outputs, y.to(y_ptr.dtype.element_ty), valid)
        group += PLACES
        while due <= group:
            slot = tl.load(slot_ptr + checkpoint).to(tl.int64)
            if slot > 0:
                stored = as_stored(h, state_ptr.dtype.element_ty, seed, due, in_slot)
                tl.store(state_ptr + slot * state_slot, stored)
            checkpoint += 1
            due = _due(position_ptr, checkpoint, last_checkpoint)
        x, z, raw_dt, b, c = ahead
        x, dt, b, c = prepared(x, raw_dt, b, c, bias)
    if write > 0:
        stored = as_stored(h, state_ptr.dtype.element_ty, seed, end, in_slot)
        tl.store(state_ptr + write * state_slot, stored)


@triton.jit
def _due(position_ptr, checkpoint, last_checkpoint):
    """The position of the checkpoint, or one that no sequence reaches."""
    known = checkpoint < last_checkpoint
    return tl.load(position_ptr + checkpoint, known, 2147483647).to(tl.int32)


@triton.jit
def _load(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, x_row, z_row, dt_row, b_row, c_row,
    position, start, end, PLACES: tl.constexpr,
):  # fmt: skip
    """The rows of a group, [places, channels] or [places, state], as they lie in memory."""
    place = tl.arange(0, PLACES)[:, None]
    valid = (position + place >= start) & (position + place < end)
    at = position.to(tl.int64)
    x = tl.load(x_ptr + at * x_row + place * x_row, valid, 0.0)
    z = tl.load(z_ptr + at * z_row + place * z_row, valid, 0.0)
    dt = tl.load(dt_ptr + at * dt_row + place * dt_row, valid, float("-inf"))
    b = tl.load(b_ptr + at * b_row + place * b_row, valid, 0.0)
    c = tl.load(c_ptr + at * c_row + place * c_row, valid, 0.0)
    return x, z, dt, b, c


@triton.jit
def prepared(x, dt, b, c, bias):
    """The rows of a group in float32, with step sizes for dt."""
    dt = softplus(dt.to(tl.float32) + bias)
    return x.to(tl.float32), dt, b.to(tl.float32), c.to(tl.float32)


@triton.jit
def columns(tile):
    """[m, n] -> n of [m, 1], by halves: only the last dimension, of two, can be split."""
    parts = (tile,)
    for _ in tl.static_range(8):
        if parts[0].shape[1] > 1:
            halves = ()
            for k in tl.static_range(len(parts)):
                pair = tl.reshape(parts[k], [tile.shape[0], 2, parts[k].shape[1] // 2])
                first, second = tl.split(tl.permute(pair, (0, 2, 1)))
                halves = halves + (first, second)
            parts = halves
    return parts


@triton.jit
def tile_of(parts):
    """The reverse: n of [m, 1] -> [m, n]."""
    for _ in tl.static_range(8):
        if len(parts) > 1:
            joined = ()
            for k in tl.static_range(len(parts) // 2):
                pair = tl.permute(tl.join(parts[2 * k], parts[2 * k + 1]), (0, 2, 1))
                row = tl.reshape(pair, [pair.shape[0], 2 * pair.shape[2]])
                joined = joined + (row,)
            parts = joined
    return parts[0]


@triton.jit
def column_sum(h, c):
    """The sum of h [channels, state] * c [1, state] over states, [channels, 1]."""
    even, odd = tl.split(tl.reshape(h, [h.shape[0], h.shape[1] // 2, 2]))
    c_even, c_odd = tl.split(tl.reshape(c, [1, c.shape[1] // 2, 2]))
    y = tl.fma(odd, c_odd, even * c_even)
    # First those that the same thread has, then by halves.
    y = tl.sum(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]), 2)
    for _ in tl.static_range(5):
        if y.shape[1] > 1:
            y = tl.sum(tl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), 1)
    return y
