"""Mamba1's Replay in Triton: decodes, drafts and prompts by one kernel, so that a token has the
same bits in all of them. The arithmetic is triton.py's, group by group of PLACES tokens, which come
from the ring or from the call; a chunk is a group."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.devices import row_strides
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.mamba1_scan.triton import column_sum, columns, prepared, tile_of
from megatron_hybrid.kernels.mamba1_scan.triton_decode import (
    LOG2_E,
    channel_block,
    checked_output,
    silu,
)
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens, Rings
from megatron_hybrid.kernels.replay_triton.segments import (
    POINTERS,
    ReplaySegments,
    checkpoint_at,
    keep,
    of_sequence,
)

PLACES = 4
_STATES = 4  # of a thread
_WARPS = 4


def plan(part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int) -> ReplaySegments:
    """As in Replay; the chunk is a multiple of PLACES."""
    assert chunk % PLACES == 0, chunk
    return ReplaySegments.of(part, chunk, ring_length)


def run(
    tokens: Mamba1Tokens,
    constants: Mamba1Constants,
    state: Tensor,
    ring: Rings,
    plan: ReplaySegments,
    out: Tensor | None = None,
) -> Tensor:
    """As in Replay. The state size is a power of two from 4 to 128; rings are contiguous."""
    y = checked_output(tokens, constants, state, out)
    channels, size = constants.A.shape
    block = channel_block(channels, max(1, _WARPS * 32 * _STATES // size))
    _replay_kernel[(channels // block, plan.sequences + 1)](
        *tokens, *constants[:3], state, *ring, y, *plan.figures, tokens.x.shape[0], plan.is_prompt,
        *row_strides(*tokens, y, state),
        CHANNELS=channels, RING=ring[0].shape[1], SIZE=size, BLOCK=block, PLACES=PLACES,
        CHUNK=plan.chunk, num_warps=max(1, block * size // (32 * _STATES)),
    )  # fmt: skip
    if plan.is_prompt:
        keep((tokens.x, tokens.dt, tokens.B), ring, plan)
    return y


@launched(do_not_specialize=["tokens", "is_prompt"], do_not_specialize_on_alignment=POINTERS)
def _replay_kernel(
    x_ptr, z_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, bias_ptr, state_ptr,
    ring_x_ptr, ring_dt_ptr, ring_b_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, is_prompt,
    x_row, z_row, dt_row, b_row, c_row, y_row, state_slot,
    CHANNELS: tl.constexpr, RING: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PLACES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, SIZE)
    if sequence == tl.num_programs(1) - 1:  # the padding
        for token in range(tl.load(cu_ptr + sequence), tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + d
            tl.store(y_ptrs, tl.zeros([BLOCK], y_ptr.dtype.element_ty))
        return
    begin, start, end, first, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, CHUNK
    )
    read = tl.load(read_ptr + sequence).to(tl.int64)
    in_slot = d[:, None] * SIZE + n[None, :]
    state_ptr += in_slot
    h = tl.zeros([BLOCK, SIZE], tl.float32)
    if read > 0:
        h = tl.load(state_ptr + read * state_slot).to(tl.float32)
    a = tl.load(a_ptr + in_slot) * LOG2_E
    skip = tl.load(d_ptr + d)[None, :]
    bias = tl.load(bias_ptr + d)[None, :]
    origin = begin - start  # the row at which position 0 would lie
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    x_ptr += origin * x_row + d[None, :]
    z_ptr += origin * z_row + d[None, :]
    dt_ptr += origin * dt_row + d[None, :]
    b_ptr += origin * b_row + n[None, :]
    c_ptr += origin * c_row + n[None, :]
    y_ptr += origin * y_row + d[None, :]
    ring_x_ptr += ring * CHANNELS + d[None, :]
    ring_dt_ptr += ring * CHANNELS + d[None, :]
    ring_b_ptr += ring * SIZE + n[None, :]

    i = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    checkpoints = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    place = tl.arange(0, PLACES)[:, None]
    group = first
    is_left = True  # a state at `group`
    while is_left:
        # All states that are left here: at the beginning, too, where one is only copied.
        due, slot = checkpoint_at(
            position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i, checkpoints, first, last
        )
        while (i <= checkpoints) & (due <= group):
            if slot > 0:
                tl.store(state_ptr + slot * state_slot, h.to(state_ptr.dtype.element_ty))
            i += 1
            due, slot = checkpoint_at(
                position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i, checkpoints, first, last
            )
        is_left = group < end
        if is_left:
            at = group + place
            own = (at >= start) & (at < end)
            old = (at >= first) & (at < start)
            in_ring = at % RING
            row = tl.cast(group, tl.int64)
            raw_x = _either(x_ptr, row, place, x_row, own, ring_x_ptr, in_ring, CHANNELS, old, 0.0)
            raw_dt = _either(
                dt_ptr, row, place, dt_row, own, ring_dt_ptr, in_ring, CHANNELS, old, float("-inf")
            )
            raw_b = _either(b_ptr, row, place, b_row, own, ring_b_ptr, in_ring, SIZE, old, 0.0)
            z = tl.load(z_ptr + row * z_row + place * z_row, own, 0.0)
            raw_c = tl.load(c_ptr + row * c_row + place * c_row, own, 0.0)
            x, dt, b, c = prepared(raw_x, raw_dt, raw_b, raw_c, bias)
            dts = columns(tl.trans(dt))
            inputs = columns(tl.trans(dt * x))
            bs = columns(tl.trans(b))
            cs = columns(tl.trans(c))
            ys = ()
            for j in tl.static_range(PLACES):
                decay = tl.exp2(dts[j] * a)
                h = tl.fma(h, decay, inputs[j] * tl.trans(bs[j]))
                ys = ys + (column_sum(h, tl.trans(cs[j])),)
            y = tl.fma(skip, x, tl.trans(tile_of(ys))) * silu(z.to(tl.float32))
            tl.store(y_ptr + row * y_row + place * y_row, y.to(y_ptr.dtype.element_ty), own)
            if is_prompt == 0:
                is_kept = own & (at >= last)
                tl.store(ring_x_ptr + in_ring * CHANNELS, raw_x, is_kept)
                tl.store(ring_dt_ptr + in_ring * CHANNELS, raw_dt, is_kept)
                if tl.program_id(0) == 0:
                    tl.store(ring_b_ptr + in_ring * SIZE, raw_b, is_kept)
            group += PLACES


@triton.jit
def _either(
    values_ptr, row, place, values_row, own, ring_ptr, in_ring, ring_row: tl.constexpr, old,
    other,
):  # fmt: skip
    """The rows of a group, from the call or from the ring."""
    mine = tl.load(values_ptr + row * values_row + place * values_row, own, other)
    earlier = tl.load(ring_ptr + in_ring * ring_row, old, other)
    return tl.where(own, mine, earlier)
