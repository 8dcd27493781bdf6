"""The Mamba2 scan in Triton; what it computes is in reference.py, its calls in protocols.py.

Prefill walks over a sequence tile by tile. A program takes some rows of one head's state (all of
head_dim, or a part of it where there are few sequences and heads) and keeps them in registers:

    cs[l]   = log2(e) * sum of dt[i] A for i <= l in the tile                  (decay, base 2)
    W[l, s] = (C[l] . B[s]) exp2(cs[l] - cs[s]) dt[s]  for s <= l, else 0
    y       = W x + exp2(cs) * (C h) + D x
    h       = exp2(cs[last]) h + B^T (exp2(cs[last] - cs) * dt * x)

Tiles lie on the grid of the sequence's absolute positions, as in reference.py; places before the
segment's start or past its end have dt = x = B = C = 0, which leaves the state alone.

The decays come from a kernel of their own: computed among the products they are the longest wait of
a tile. Where a long sequence would leave processors idle, it is split into parts of several kernel
chunks: one kernel computes what each chunk adds to the state (all chunks at once), another carries
the state from chunk to chunk (the recurrence of Mamba2's paper, arXiv 2405.21060, section 6), and
then all parts are walked over at once. Split or not, states on the grid come from the very same
operations, so a sequence's bits depend neither on the split nor on the sequences beside it.

No sequence of a call may write a slot that another one reads: each program reads its initial state
when it starts, which may be after another has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.devices import (
    ChunkedSegments,
    aligned,
    checked_output,
    processors,
    row_strides,
)
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.mamba2_scan.triton_decode import (
    LOG2_E,
    decode,
    decode_runs,
    softplus,
)
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens
from megatron_hybrid.kernels.state_rounding.triton import as_stored

__all__ = ["decode", "decode_runs", "plan", "prefill"]

_VARYING = ["sequences", "part"]  # from step to step: no value of theirs is worth compiling anew


class Tiling(NamedTuple):
    """How a program covers its sequence; tile and block_p are at least 16."""

    tile: int  # tokens; the largest divisor of the kernel chunk up to this is taken
    block_p: int  # rows of the state
    num_warps: int
    num_stages: int


def plan(segments: PrefillSegments, kernel_chunk: int) -> ChunkedSegments:
    """Nothing is read here: the kernel finds its tiles itself."""
    return ChunkedSegments(segments, kernel_chunk)


def prefill(
    tokens: Mamba2Tokens,
    constants: Mamba2Constants,
    state: Tensor,
    plan: ChunkedSegments,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
    part: int | None = None,
) -> Tensor:
    """head_dim and state must be powers of two of at least 16. `tiling` and `part`: other than
    those that _tiling and _chunks_per_part choose."""
    y = checked_output(tokens, state, out)
    A, D, dt_bias, dt_limit, seed = constants
    x, B, C, dt = aligned(tokens.x), aligned(tokens.B), aligned(tokens.C), tokens.dt
    count, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    s, chunk = plan
    tile, block_p, num_warps, num_stages = tiling or _tiling(head_dim, size, x.dtype)
    tile = max(d for d in range(1, min(chunk, tile) + 1) if chunk % d == 0)
    if part is None:
        part = _chunks_per_part(s, chunk, x, block_p)
    block_l = max(16, next_power_of_2(tile))
    sequences = s.start_position.shape[0]
    segments = (s.cu_seqlens, s.start_position, sequences)

    # Rows of a multiple of 16, always: Triton would compile anew for an argument that is not.
    row = cdiv(count, 16) * 16
    decays = torch.empty(2, heads, row, dtype=torch.float32, device=x.device)
    tiles = (count + sequences * (tile - 1)) // tile + sequences  # at most
    _decays_kernel[(cdiv(heads, 8), tiles)](
        dt, A, dt_bias, *dt_limit, decays, *segments, dt.stride(0), row, heads,
        TILE=tile, BLOCK_L=block_l, BLOCK_H=8,
    )  # fmt: skip
    shape = {"HEAD_DIM": head_dim, "SIZE": size, "TILE": tile, "CHUNK": chunk, "BLOCK_L": block_l}
    # At most so many parts are followed by another one: each spans part x chunk positions, of which
    # those before the segment's start, less than a chunk, hold no token.
    inner_parts = (count + sequences * (chunk - 1)) // (part * chunk) if part else 0
    carried = decays  # not read unless split
    if inner_parts:
        rows = inner_parts * part + sequences
        carried = torch.empty(rows, heads, head_dim, size, dtype=torch.float32, device=x.device)
        factors = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
        block = min(head_dim, 64)
        _chunk_states_kernel[(head_dim // block, heads, inner_parts * part)](
            x, B, decays, carried, factors, *segments, part,
            x.stride(0), B.stride(0), row, heads // groups,
            **shape, BLOCK_P=block, STAGES=num_stages, num_warps=num_warps,
        )  # fmt: skip
        block = min(head_dim * size, 1024)
        _pass_states_kernel[(head_dim * size // block, heads, sequences)](
            state, s.read_slot, carried, factors, *segments, part, state.stride(0),
            STATE=head_dim * size, BLOCK=block, CHUNK=chunk,
        )  # fmt: skip
    _prefill_kernel[(head_dim // block_p, heads, sequences + inner_parts)](
        x, B, C, decays, D, state, carried, y, *segments, part, *s.of_sequences[2:],
        *row_strides(x, B, C, y, state), row, heads // groups, seed,
        **shape, BLOCK_P=block_p, STAGES=num_stages, SPLIT=inner_parts > 0, num_warps=num_warps,
    )  # fmt: skip
    return y


def _tiling(head_dim: int, size: int, dtype: torch.dtype) -> Tiling:
    """The fastest of those tried on an H200 (state 128). It does not depend on the number of
    sequences, so neither do a sequence's bits."""
    if dtype == torch.float32:  # no tensor cores: small tiles
        return Tiling(tile=32, block_p=min(head_dim, 32), num_warps=4, num_stages=1)
    if size <= 128:
        return Tiling(tile=64, block_p=min(head_dim, 32), num_warps=4, num_stages=3)
    # Triton 3.6 compiles some others wrongly for such states; these are checked in tests/gpu.
    if head_dim >= 64:
        return Tiling(tile=64, block_p=64, num_warps=8, num_stages=2)
    return Tiling(tile=32, block_p=head_dim, num_warps=4, num_stages=2)


def _chunks_per_part(segments: PrefillSegments, chunk: int, x: Tensor, block_p: int) -> int:
    """Into parts of how many kernel chunks sequences are split; 0: not at all. Splitting costs a
    good fifth more operations: it pays where the longest sequence outlasts the others' work."""
    tokens, heads, head_dim = x.shape
    at_once = 2 * processors(x.device)  # two programs a processor
    each = heads * (head_dim // block_p)  # programs that walk over one sequence
    if segments.longest < 8 * chunk or segments.longest * at_once < 1.5 * tokens * each:
        return 0
    rounds = 3 if tokens >= 64 * chunk else 1
    return cdiv(cdiv(tokens, chunk), max(2, rounds * at_once // each))


@triton.jit
def _segment(cu_seqlens_ptr, start_ptr, sequence):
    """The first position of a sequence's tokens, that after the last, and the row at which position
    0 would lie; positions before the first one need not lie in the tensors at all."""
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    return start, start + length, first_token - start


@triton.jit
def _inner_parts(cu_seqlens_ptr, start_ptr, sequences, i, part, CHUNK: tl.constexpr):
    """How many parts of the sequences i are followed by another one of the same sequence."""
    known = i < sequences
    length = tl.load(cu_seqlens_ptr + i + 1, known) - tl.load(cu_seqlens_ptr + i, known)
    start = tl.load(start_ptr + i, known)
    chunks = tl.cdiv(start + length, CHUNK) - start // CHUNK
    return tl.where(known, tl.maximum(tl.cdiv(chunks, part) - 1, 0), 0).to(tl.int32)


@triton.jit
def _locate(
    cu_seqlens_ptr, start_ptr, sequences, part, index, each, MORE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The sequence in which the index-th of all units lies, and its number there, where a sequence
    has `each` units for every inner part and MORE besides."""
    sequence = 0
    before = 0
    total = 0
    for first in range(0, sequences, 64):
        i = first + tl.arange(0, 64)
        units = _inner_parts(cu_seqlens_ptr, start_ptr, sequences, i, part, CHUNK) * each
        units += tl.where(i < sequences, MORE, 0)
        ends = total + tl.cumsum(units, 0)
        over = (ends <= index) & (i < sequences)
        sequence += tl.sum(over.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(over, ends, 0), 0))
        total += tl.sum(units, 0)
    return sequence, index - before


@launched(do_not_specialize=_VARYING)
def _decays_kernel(
    dt_ptr, a_ptr, bias_ptr, dt_min, dt_max, decays_ptr, cu_seqlens_ptr, start_ptr, sequences,
    dt_row, decays_row, heads,
    TILE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """cs and cs - log2(dt) of the formulas above: decays [2, heads, decays_row]. (dt goes into the
    exponent: exp2(cs[l] - cs[s]) dt[s].)"""
    sequence, tile = _locate(cu_seqlens_ptr, start_ptr, sequences, 1, tl.program_id(1), 1, 1, TILE)
    if sequence >= sequences:
        return
    start, end, origin = _segment(cu_seqlens_ptr, start_ptr, sequence)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = head < heads
    a = tl.load(a_ptr + head, known) * LOG2_E
    bias = tl.load(bias_ptr + head, known)
    places = tl.arange(0, BLOCK_L)
    position = (start // TILE + tile) * TILE + places
    valid = (position >= start) & (position < end) & (places < TILE)
    token = origin + position
    mask = valid[:, None] & known[None, :]
    raw = tl.load(dt_ptr + token[:, None] * dt_row + head[None, :], mask, 0.0)
    dt = softplus(raw.to(tl.float32) + bias[None, :])
    dt = tl.where(mask, tl.minimum(tl.maximum(dt, dt_min), dt_max), 0.0)
    cs = tl.cumsum(dt * a[None, :], 0)
    at = head[None, :].to(tl.int64) * decays_row + token[:, None]
    tl.store(decays_ptr + at, cs, mask)
    tl.store(decays_ptr + heads * tl.cast(decays_row, tl.int64) + at, cs - tl.log2(dt), mask)


@triton.jit
def _load_decays(decays_ptr, all_decays, t, start, end, places, TILE: tl.constexpr):
    """cs, cs - log2(dt) and the last of cs, of a tile that may lie past the end."""
    position = t * TILE + places
    valid = (position >= start) & (position < end) & (places < TILE)
    cs = tl.load(decays_ptr + position, mask=valid, other=0.0)
    cs_dt = tl.load(decays_ptr + all_decays + position, mask=valid, other=float("inf"))
    final = tl.minimum(end, (t + 1) * TILE) - 1
    last = tl.load(decays_ptr + final, mask=final >= tl.maximum(start, t * TILE), other=0.0)
    return cs, cs_dt, last


@triton.jit
def _load_tile(x_ptr, b_ptr, x_row, b_row, t, start, end, n, p, places, TILE: tl.constexpr):
    """x [places, p], B^T [n, places], and which places are tokens."""
    position = t * TILE + places
    valid = (position >= start) & (position < end) & (places < TILE)
    offset = tl.cast(t * TILE, tl.int64)
    x = tl.load(
        x_ptr + offset * x_row + places[:, None] * x_row + p[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    bt = tl.load(
        b_ptr + offset * b_row + places[None, :] * b_row + n[:, None],
        mask=valid[None, :],
        other=0.0,
    )
    return x, bt, valid


@triton.jit
def _added(x, bt, cs_dt, last, s):
    """What the chunk has added to the state after a tile; s is that before it."""
    scaled = (x * tl.exp2(last - cs_dt)[:, None]).to(x.dtype)
    return tl.dot(bt, scaled, s * tl.exp2(last), input_precision="ieee")


@launched(do_not_specialize=_VARYING)
def _chunk_states_kernel(
    x_ptr, b_ptr, decays_ptr, carried_ptr, factors_ptr,
    cu_seqlens_ptr, start_ptr, sequences, part,
    x_row, b_row, decays_row, heads_per_group,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """For every chunk of an inner part: what it adds to the state, and its decay."""
    head = tl.program_id(1)
    index = tl.program_id(2)
    sequence, chunk = _locate(cu_seqlens_ptr, start_ptr, sequences, part, index, part, 0, CHUNK)
    if sequence >= sequences:
        return
    start, end, origin = _segment(cu_seqlens_ptr, start_ptr, sequence)
    places = tl.arange(0, BLOCK_L)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZE)
    x_ptr += origin * x_row + head * HEAD_DIM
    b_ptr += origin * b_row + head // heads_per_group * SIZE
    decays_ptr += origin + head * tl.cast(decays_row, tl.int64)
    all_decays = tl.num_programs(1) * tl.cast(decays_row, tl.int64)

    chunk_start = (start // CHUNK + chunk) * CHUNK
    first_tile = tl.maximum(chunk_start, start) // TILE
    s = tl.zeros([SIZE, BLOCK_P], tl.float32)
    factor = 1.0
    cs, cs_dt, last = _load_decays(decays_ptr, all_decays, first_tile, start, end, places, TILE)
    for t in tl.range(first_tile, (chunk_start + CHUNK) // TILE, num_stages=STAGES):
        x, bt, _ = _load_tile(x_ptr, b_ptr, x_row, b_row, t, start, end, n, p, places, TILE)
        ahead = _load_decays(decays_ptr, all_decays, t + 1, start, end, places, TILE)
        s = _added(x, bt, cs_dt, last, s)
        factor *= tl.exp2(last)
        cs, cs_dt, last = ahead
    row = (index + sequence).to(tl.int64) * tl.num_programs(1) + head
    tl.store(carried_ptr + row * (HEAD_DIM * SIZE) + n[:, None] + p[None, :] * SIZE, s)
    tl.store(factors_ptr + row, factor)


@launched(do_not_specialize=_VARYING)
def _pass_states_kernel(
    state_ptr, read_ptr, carried_ptr, factors_ptr, cu_seqlens_ptr, start_ptr, sequences, part,
    state_slot, STATE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Puts the state before each part where what that part's first chunk adds was."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    chunks = 0
    row = sequence
    for first in range(0, sequences, 64):
        i = first + tl.arange(0, 64)
        count = _inner_parts(cu_seqlens_ptr, start_ptr, sequences, i, part, CHUNK) * part
        row += tl.sum(tl.where(i < sequence, count, 0), 0)
        chunks += tl.sum(tl.where(i == sequence, count, 0), 0)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = row.to(tl.int64) * tl.num_programs(1) + head
    carried_ptr += row * STATE + inside
    factors_ptr += row
    h = tl.zeros([BLOCK], tl.float32)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    if read > 0:
        h = tl.load(state_ptr + read * state_slot + head * STATE + inside).to(tl.float32)
    for chunk in tl.range(chunks, num_stages=4):
        added = tl.load(carried_ptr)
        if chunk % part == 0:
            tl.store(carried_ptr, h)
        h = tl.fma(h, tl.load(factors_ptr), added)
        carried_ptr += tl.num_programs(1) * STATE
        factors_ptr += tl.num_programs(1)
    tl.store(carried_ptr, h)


@launched(do_not_specialize=_VARYING)
def _prefill_kernel(
    x_ptr, b_ptr, c_ptr, decays_ptr, d_ptr,
    state_ptr, carried_ptr, y_ptr,
    cu_seqlens_ptr, start_ptr, sequences, part, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr,
    x_row, b_row, c_row, y_row, state_slot, decays_row, heads_per_group, seed,
    HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    own_part = 0
    if SPLIT:
        sequence, own_part = _locate(
            cu_seqlens_ptr, start_ptr, sequences, part, tl.program_id(2), 1, 1, CHUNK
        )
        if sequence >= sequences:
            return
    start, end, origin = _segment(cu_seqlens_ptr, start_ptr, sequence)
    d = tl.load(d_ptr + head)

    places = tl.arange(0, BLOCK_L)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, SIZE)
    causal = places[:, None] >= places[None, :]
    group = head // heads_per_group
    x_ptr += origin * x_row + head * HEAD_DIM
    b_ptr += origin * b_row + group * SIZE
    c_ptr += origin * c_row + group * SIZE
    decays_ptr += origin + head * tl.cast(decays_row, tl.int64)
    all_decays = tl.num_programs(1) * tl.cast(decays_row, tl.int64)
    y_ptr += origin * y_row + head * HEAD_DIM
    in_state = head * (HEAD_DIM * SIZE) + n[:, None] + p[None, :] * SIZE

    # The program's tiles: begin to finish - 1, the whole sequence's or its part's.
    begin = start // TILE
    finish = tl.cdiv(end, TILE)
    h = tl.zeros([SIZE, BLOCK_P], tl.float32)
    if SPLIT:
        part_start = (start // CHUNK + own_part * part) * CHUNK
        begin = tl.maximum(begin, part_start // TILE)
        finish = tl.minimum(finish, (part_start + part * CHUNK) // TILE)
        row = (tl.program_id(2) - own_part - sequence) * part + sequence + own_part * part
        row = row.to(tl.int64) * tl.num_programs(1)
        h = tl.load(carried_ptr + row * (HEAD_DIM * SIZE) + in_state)
    else:
        read = tl.load(read_ptr + sequence).to(tl.int64)
        if read > 0:
            h = tl.load(state_ptr + read * state_slot + in_state).to(tl.float32)

    cs, cs_dt, last = _load_decays(decays_ptr, all_decays, begin, start, end, places, TILE)
    # The state is factor h + s: h as it was when the chunk began, s what the chunk has added. So
    # states on the grid come from the very operations of _pass_states_kernel.
    s = tl.zeros([SIZE, BLOCK_P], tl.float32)
    factor = 1.0
    first_checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    # From checkpoint to checkpoint, and from the last one to the end. A condition inside the loop
    # over tiles would keep the compiler from overlapping their loads with their products.
    for checkpoint in range(first_checkpoint, last_checkpoint + 1):
        # Not carried from one round to the next: Triton 3.6 starts the loop from its first value.
        first_tile = begin
        if checkpoint > first_checkpoint:
            reached = tl.cdiv(tl.load(position_ptr + checkpoint - 1).to(tl.int32), TILE)
            first_tile = tl.maximum(begin, reached)
        stop = tl.cdiv(end, TILE)
        slot = tl.load(write_ptr + sequence).to(tl.int64)
        position = end
        if checkpoint < last_checkpoint:
            position = tl.load(position_ptr + checkpoint).to(tl.int32)
            stop = tl.cdiv(position, TILE)
            slot = tl.load(slot_ptr + checkpoint).to(tl.int64)
        for t in tl.range(first_tile, tl.minimum(stop, finish), num_stages=STAGES):
            x, bt, valid = _load_tile(x_ptr, b_ptr, x_row, b_row, t, start, end, n, p, places, TILE)
            ahead = _load_decays(decays_ptr, all_decays, t + 1, start, end, places, TILE)
            offset = tl.cast(t * TILE, tl.int64)
            c = tl.load(
                c_ptr + offset * c_row + places[:, None] * c_row + n[None, :],
                mask=valid[:, None],
                other=0.0,
            )
            new_chunk = t * TILE % CHUNK == 0
            h = tl.where(new_chunk, tl.fma(h, factor, s), h)
            s = tl.where(new_chunk, 0.0, s)
            factor = tl.where(new_chunk, 1.0, factor)

            scores = tl.dot(c, bt, input_precision="ieee")
            # Above the diagonal exp2 may overflow; the selection drops it.
            w = tl.where(causal, scores * tl.exp2(cs[:, None] - cs_dt[None, :]), 0.0)
            y = tl.dot(c, tl.fma(h, factor, s).to(c.dtype), input_precision="ieee")
            y *= tl.exp2(cs)[:, None]
            y = tl.dot(w.to(x.dtype), x, y, input_precision="ieee")
            y += d * x.to(tl.float32)
            tl.store(
                y_ptr + offset * y_row + places[:, None] * y_row + p[None, :],
                y.to(x.dtype),
                mask=valid[:, None],
            )
            s = _added(x, bt, cs_dt, last, s)
            factor *= tl.exp2(last)
            cs, cs_dt, last = ahead
        # An empty segment, too, writes its state.
        here = (stop <= finish) & ((stop > begin) | (own_part == 0))
        if (slot > 0) & here:
            stored = tl.fma(h, factor, s)
            stored = as_stored(stored, state_ptr.dtype.element_ty, seed, position, in_state)
            tl.store(state_ptr + slot * state_slot + in_state, stored)
