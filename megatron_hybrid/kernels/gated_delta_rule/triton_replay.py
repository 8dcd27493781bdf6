"""The gated delta rule's Replay in Triton: a token has the same bits in decodes, drafts and
prompts. The symbols and the arithmetic are those of triton.py and triton_prepare.py, with tiles
that are chunks of TILE tokens, which come from the ring or from the call.

The first kernel makes what a chunk needs without the state: R beta, P and factors. The second one
walks over a sequence's chunks; single decodes have one of their own for the same operations (see
mamba2_scan/triton_replay.py). All of a chunk is computed each time, of which the outputs of the
call's own tokens are stored; what is not there yet is zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.devices import aligned, checked_output, row_strides
from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS, gates
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare import inverse, store_r
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens, Rings
from megatron_hybrid.kernels.replay_triton.segments import (
    POINTERS,
    ReplaySegments,
    checkpoint_at,
    keep,
    of_sequence,
)

TILE = 16
_kernel = launched(
    do_not_specialize=["tokens", "is_prompt", "sequences"], do_not_specialize_on_alignment=POINTERS
)


class Tiling(NamedTuple):
    """How a program covers a head."""

    block_v: int  # rows of the state
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None  # registers of a thread: fewer for more programs at a time


def plan(part: DecodeRuns | PrefillSegments, chunk: int, ring_length: int) -> ReplaySegments:
    """As in Replay; the chunk is TILE."""
    assert chunk == TILE, chunk
    return ReplaySegments.of(part, chunk, ring_length)


def run(
    tokens: DeltaRuleTokens,
    constants: DeltaRuleConstants,
    state: Tensor,
    ring: Rings,
    plan: ReplaySegments,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """As in Replay. k_dim and v_dim are powers of two from 16, k_dim at most 128; rings are
    contiguous. `tiling`: another than _tiling's, for whose bits nothing is promised."""
    y = checked_output(tokens, state, out)
    q, k, v = aligned(tokens.q), aligned(tokens.k), aligned(tokens.v)
    a, b = tokens.a, tokens.b
    count, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    if min(k_dim, v_dim) < 16 or k_dim & (k_dim - 1) or v_dim & (v_dim - 1) or k_dim > 128:
        raise ValueError(
            f"Heads of the gated delta rule have {k_dim} key and {v_dim} value dimensions; the "
            "Triton kernels take powers of two from 16, for keys up to 128."
        )
    sequences, group = plan.sequences, heads // k_heads
    split = v.dtype != torch.float32
    # A sequence has at most two chunks that it does not fill.
    tiles = count // TILE + 2 * sequences
    r_row = TILE * (1 + split)
    r = torch.empty(tiles, heads, TILE, r_row, dtype=v.dtype, device=v.device)
    weights = torch.empty(tiles, heads, TILE, TILE, dtype=v.dtype, device=v.device)
    factors = torch.empty(tiles, heads, TILE, 4, dtype=torch.float32, device=v.device)
    decays = torch.empty(tiles, heads, dtype=torch.float32, device=v.device)
    together = 2 if split and group % 2 == 0 else 1  # heads of a program
    ring_k, ring_v, ring_a, ring_b = ring
    sizes = {
        "HEADS": heads, "K_HEADS": k_heads, "RING": ring_k.shape[1], "K_DIM": k_dim, "TILE": TILE,
        "SPLIT": split,
    }  # fmt: skip
    _prepare_kernel[(heads // together, tiles)](
        q, k, a, b, constants.A, constants.dt_bias, ring_k, ring_a, ring_b,
        r, weights, factors, decays, *plan.figures, sequences, plan.is_prompt,
        *row_strides(q, k, a, b), k_dim**-0.5, **sizes, TOGETHER=together, num_warps=1,
    )  # fmt: skip
    block_v, num_warps, num_stages, maxnreg = tiling or _tiling(v_dim, split, plan.is_single)
    arguments = (
        q, k, v, a, b, ring_k, ring_v, ring_a, ring_b, r, weights, factors, decays, state, y,
        *plan.figures, count, sequences, plan.is_prompt, *row_strides(q, k, v, a, b, y, state),
    )  # fmt: skip
    sizes |= {"V_DIM": v_dim, "BLOCK_V": block_v}
    grid = v_dim // block_v, heads, sequences + 1
    if plan.is_single:
        options = {} if maxnreg is None else {"maxnreg": maxnreg}
        _decode_kernel[grid](*arguments, **sizes, num_warps=num_warps, **options)
    else:
        _walk_kernel[grid](*arguments, **sizes, STAGES=num_stages, num_warps=num_warps)
    if plan.is_prompt:
        keep((k, v, a, b), ring, plan)
    return y


def _tiling(v_dim: int, split: bool, is_single: bool) -> Tiling:
    """By the sizes alone."""
    if not split:  # no tensor cores
        return Tiling(16, 4)
    if is_single:
        return Tiling(min(v_dim, 64), 4, maxnreg=168)
    return Tiling(min(v_dim, 64), 4, 3)


@triton.jit
def _chunks(cu_ptr, start_ptr, unfolded_ptr, i, sequences, is_prompt, TILE: tl.constexpr):
    """How many chunks sequences i have, in whole or in part; zeros past the last one."""
    known = i < sequences
    count = tl.load(cu_ptr + i + 1, known, 0) - tl.load(cu_ptr + i, known, 0)
    start = tl.load(start_ptr + i, known, 0)
    unfolded = tl.load(unfolded_ptr + i, known, 0)
    first = start - tl.where(is_prompt != 0, start % TILE, unfolded)
    return tl.where(known, tl.cdiv(start + count, TILE) - first // TILE, 0).to(tl.int32)


@triton.jit
def _locate(cu_ptr, start_ptr, unfolded_ptr, sequences, is_prompt, index, TILE: tl.constexpr):
    """The sequence in which the index-th of all chunks lies, and its number there."""
    sequence, before, total = 0, 0, 0
    for block in range(0, sequences, 64):
        i = block + tl.arange(0, 64)
        chunks = _chunks(cu_ptr, start_ptr, unfolded_ptr, i, sequences, is_prompt, TILE)
        ends = total + tl.cumsum(chunks, 0)
        over = (ends <= index) & (i < sequences)
        sequence += tl.sum(over.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(over, ends, 0), 0))
        total += tl.sum(chunks, 0)
    return sequence, index - before


@_kernel
def _prepare_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr, ring_k_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, sequences, is_prompt,
    q_row, k_row, a_row, b_row, scale,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """R beta and P of a chunk and TOGETHER value heads of a key head, and the factors of the walk:
    of each token exp(G) for q and for k, and exp(G[last] - G) for k, all over the length of q or k;
    and exp(G[last])."""
    head = tl.program_id(0) * TOGETHER
    index = tl.program_id(1)
    sequence, number = _locate(cu_ptr, start_ptr, unfolded_ptr, sequences, is_prompt, index, TILE)
    if sequence >= sequences:
        return
    begin, start, end, first, _ = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, TILE
    )
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    places = tl.arange(0, TILE)
    at = (first // TILE + number) * TILE + places
    own = (at >= start) & (at < end)
    old = (at >= first) & (at < start)
    valid = own | old
    row = begin + (at - start)
    in_ring = ring + at % RING
    n = tl.arange(0, K_DIM)
    at_key = head // (HEADS // K_HEADS) * K_DIM
    q = tl.load(q_ptr + row[:, None] * q_row + at_key + n[None, :], own[:, None], 0.0)
    own_k = tl.load(k_ptr + row[:, None] * k_row + at_key + n[None, :], own[:, None], 0.0)
    old_k = tl.load(
        ring_k_ptr + in_ring[:, None] * (K_HEADS * K_DIM) + at_key + n[None, :], old[:, None], 0.0
    )
    k = tl.where(own[:, None], own_k, old_k)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    q32 = q.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q32 * q32, 1) + EPS) * scale
    on_diagonal = places[:, None] == places[None, :]
    k_factor = tl.rsqrt(tl.sum(tl.where(on_diagonal, kk, 0.0), 1) + EPS)
    # The same along rows and along columns, without bringing one to the other.
    k_across = tl.rsqrt(tl.sum(tl.where(on_diagonal, kk, 0.0), 0) + EPS)
    qk *= q_factor[:, None] * k_across[None, :]
    qk = tl.where(places[:, None] >= places[None, :], qk, 0.0)
    kk *= k_factor[:, None] * k_across[None, :]
    kk = tl.where(places[:, None] > places[None, :], kk, 0.0)
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    for i in range(TOGETHER):
        own_a = tl.load(a_ptr + row * a_row + head + i, own, 0.0)
        own_b = tl.load(b_ptr + row * b_row + head + i, own, 0.0)
        old_a = tl.load(ring_a_ptr + in_ring * HEADS + head + i, old, 0.0)
        old_b = tl.load(ring_b_ptr + in_ring * HEADS + head + i, old, 0.0)
        a = tl.where(own, own_a, old_a)
        b = tl.where(own, own_b, old_b)
        decay, beta = gates(a, b, decay_ptr, bias_ptr, head + i)
        decay = tl.where(valid, decay, 0.0)
        beta = tl.where(valid, beta, 0.0)
        cs = tl.cumsum(decay, 0)  # log2(e) * G
        last = tl.sum(tl.where(places == TILE - 1, cs, 0.0), 0)
        here = tl.cast(index, tl.int64) * HEADS + head + i
        to_factors = factors_ptr + here * (TILE * 4) + places * 4
        from_start = tl.exp2(cs)
        tl.store(to_factors, from_start * q_factor)
        tl.store(to_factors + 1, from_start * k_factor)
        tl.store(to_factors + 2, tl.exp2(last - cs) * k_factor)
        tl.store(decays_ptr + here, tl.exp2(last))
        # Above the diagonal, where nothing is, G rises: no overflow.
        between = tl.exp2(tl.minimum(cs[:, None] - cs[None, :], 0.0))
        to_weights = weights_ptr + here * (TILE * TILE)
        tl.store(to_weights + places[:, None] * TILE + places[None, :], (qk * between).to(q.dtype))
        m = kk * between * beta[:, None]
        r = tl.reshape(inverse(tl.reshape(m, [1, TILE, TILE]), SPLIT), [TILE, TILE])
        to_r = r_ptr + here * (TILE * R_ROW) + places[:, None] * R_ROW + places[None, :]
        every = valid[:, None] | (places >= 0)[None, :]
        store_r(to_r, r * beta[None, :], every, TILE, SPLIT)


@_kernel
def _walk_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr, state_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, sequences, is_prompt,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if sequence == sequences:  # the padding
        for token in range(tl.load(cu_ptr + sequence), tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + head * V_DIM + p
            tl.store(y_ptrs, tl.zeros([BLOCK_V], y_ptr.dtype.element_ty))
        return
    begin, start, end, first, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, TILE
    )
    index = 0  # of the sequence's first chunk among those of all
    for block in range(0, sequence, 64):
        i = block + tl.arange(0, 64)
        chunks = _chunks(cu_ptr, start_ptr, unfolded_ptr, i, sequence, is_prompt, TILE)
        index += tl.sum(chunks, 0)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    n = tl.arange(0, K_DIM)
    in_state = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    s = tl.zeros([BLOCK_V, K_DIM], tl.float32)
    if read > 0:
        s = tl.load(state_ptr + read * state_slot + in_state).to(tl.float32)
    key_head = head // (HEADS // K_HEADS)
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    origin = begin - start  # the row at which position 0 would lie
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    q_ptr += origin * q_row + key_head * K_DIM
    k_ptr += origin * k_row + key_head * K_DIM
    v_ptr += origin * v_row + head * V_DIM
    y_ptr += origin * y_row + head * V_DIM
    ring_k_ptr += ring * (K_HEADS * K_DIM) + key_head * K_DIM
    ring_v_ptr += ring * (HEADS * V_DIM) + head * V_DIM
    of_tile = (tl.cast(index - first // TILE, tl.int64)) * HEADS + head
    r_ptr += of_tile * (TILE * R_ROW)
    weights_ptr += of_tile * (TILE * TILE)
    factors_ptr += of_tile * (TILE * 4)
    decays_ptr += of_tile
    places = tl.arange(0, TILE)
    eye = tl.where(places[:, None] == places[None, :], 1.0, 0.0).to(q_ptr.dtype.element_ty)

    # What is replayed and its chunk's other tokens, if they complete it.
    t0 = first // TILE
    completes = (first < start) & ((t0 + 1) * TILE <= last)
    if completes:
        k, v, y, added, decay = _tile(
            s.to(q_ptr.dtype.element_ty), q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr, weights_ptr, factors_ptr,
            decays_ptr, eye, t0, first, start, end, p, n, q_row, k_row, v_row,
            HEADS, K_HEADS, RING, K_DIM, V_DIM, TILE, SPLIT, True,
        )  # fmt: skip
        _store(y_ptr, y, t0, start, end, p, y_row, TILE)
        s = tl.dot(added, k, s * decay, input_precision="ieee")
    done = t0 + tl.where(completes, 1, 0)
    first_checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    checkpoints = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    # From one state that is left to the next.
    for i in range(first_checkpoint, checkpoints + 1):
        position, slot = checkpoint_at(
            position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i, checkpoints, first, last
        )
        # Not carried from one round to the next: Triton 3.6 starts the loop from its first value.
        begin_at = first
        if i > first_checkpoint:
            begin_at, _ = checkpoint_at(
                position_ptr, slot_ptr, write_ptr, read_ptr, sequence, i - 1, checkpoints, first,
                last,
            )  # fmt: skip
        from_tile = tl.maximum(begin_at // TILE, done)
        for t in tl.range(from_tile, position // TILE, num_stages=STAGES, disable_licm=True):
            k, v, y, added, decay = _tile(
                s.to(q_ptr.dtype.element_ty), q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr, weights_ptr, factors_ptr,
                decays_ptr, eye, t, first, start, end, p, n, q_row, k_row, v_row,
                HEADS, K_HEADS, RING, K_DIM, V_DIM, TILE, SPLIT, False,
            )  # fmt: skip
            _store(y_ptr, y, t, start, end, p, y_row, TILE)
            s = tl.dot(added, k, s * decay, input_precision="ieee")
        if slot > 0:
            tl.store(state_ptr + slot * state_slot + in_state, s.to(state_ptr.dtype.element_ty))
    for t in range(last // TILE, tl.cdiv(end, TILE)):
        k, v, y, added, decay = _tile(
            s.to(q_ptr.dtype.element_ty), q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr, weights_ptr, factors_ptr,
            decays_ptr, eye, t, first, start, end, p, n, q_row, k_row, v_row,
            HEADS, K_HEADS, RING, K_DIM, V_DIM, TILE, SPLIT, True,
        )  # fmt: skip
        _store(y_ptr, y, t, start, end, p, y_row, TILE)
        if is_prompt == 0:
            at = t * TILE + places
            is_own = (at >= start) & (at < end)
            place = at % RING
            to_v = ring_v_ptr + (place * (HEADS * V_DIM))[:, None] + p[None, :]
            tl.store(to_v, v, mask=is_own[:, None])
            if tl.program_id(0) == 0:
                row = origin + at
                for_ring = (ring + place) * HEADS + head
                a = tl.load(a_ptr + row * a_row + head, is_own, 0.0)
                b = tl.load(b_ptr + row * b_row + head, is_own, 0.0)
                tl.store(ring_a_ptr + for_ring, a, mask=is_own)
                tl.store(ring_b_ptr + for_ring, b, mask=is_own)
                if head % (HEADS // K_HEADS) == 0:
                    to_k = ring_k_ptr + (place * (K_HEADS * K_DIM))[:, None] + n[None, :]
                    tl.store(to_k, k, mask=is_own[:, None])
        if (t + 1) * TILE < end:
            s = tl.dot(added, k, s * decay, input_precision="ieee")


@_kernel
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr, state_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, sequences, is_prompt,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Of sequences of one token, or none, all of whose chunk is in the ring."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if sequence == sequences:  # the padding
        for token in range(tl.load(cu_ptr + sequence), tokens):
            y_ptrs = y_ptr + tl.cast(token, tl.int64) * y_row + head * V_DIM + p
            tl.store(y_ptrs, tl.zeros([BLOCK_V], y_ptr.dtype.element_ty))
        return
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    checkpoint = tl.load(slot_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(position_ptr + sequence)
    begin, start, end, first, last = of_sequence(cu_ptr, start_ptr, unfolded_ptr, sequence, 0, TILE)
    n = tl.arange(0, K_DIM)
    in_state = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    is_read = p[:, None] < tl.where(read > 0, V_DIM, 0)
    from_state = state_ptr + read * state_slot + in_state
    before = tl.load(from_state, is_read, 0.0).to(q_ptr.dtype.element_ty)
    if end == start:  # padding, behind all others
        return
    key_head = head // (HEADS // K_HEADS)
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    origin = begin - start
    t = first // TILE
    places = tl.arange(0, TILE)
    eye = tl.where(places[:, None] == places[None, :], 1.0, 0.0).to(q_ptr.dtype.element_ty)
    # Each has one chunk, so that the sequence's number is its chunk's.
    of_tile = tl.cast(sequence - t, tl.int64) * HEADS + head
    k, v, y, added, decay = _tile(
        before, q_ptr + origin * q_row + key_head * K_DIM, k_ptr + origin * k_row + key_head * K_DIM,
        v_ptr + origin * v_row + head * V_DIM,
        ring_k_ptr + ring * (K_HEADS * K_DIM) + key_head * K_DIM,
        ring_v_ptr + ring * (HEADS * V_DIM) + head * V_DIM,
        r_ptr + of_tile * (TILE * R_ROW), weights_ptr + of_tile * (TILE * TILE),
        factors_ptr + of_tile * (TILE * 4), decays_ptr + of_tile, eye,
        t, first, start, end, p, n, q_row, k_row, v_row,
        HEADS, K_HEADS, RING, K_DIM, V_DIM, TILE, SPLIT, True,
    )  # fmt: skip
    _store(y_ptr + origin * y_row + head * V_DIM, y, t, start, end, p, y_row, TILE)
    is_complete = last > first
    if is_complete == 0:
        at = t * TILE + places
        is_own = (at >= start) & (at < end)
        place = ring + at % RING
        to_v = ring_v_ptr + (place * (HEADS * V_DIM))[:, None] + head * V_DIM + p[None, :]
        tl.store(to_v, v, mask=is_own[:, None])
        if tl.program_id(0) == 0:
            row = tl.cast(begin, tl.int64)
            here = (ring + start % RING) * HEADS + head
            tl.store(ring_a_ptr + here, tl.load(a_ptr + row * a_row + head))
            tl.store(ring_b_ptr + here, tl.load(b_ptr + row * b_row + head))
            if head % (HEADS // K_HEADS) == 0:
                to_k = ring_k_ptr + (place * (K_HEADS * K_DIM))[:, None] + key_head * K_DIM
                tl.store(to_k + n[None, :], k, mask=is_own[:, None])
    if is_complete | (write != read):
        # Loaded once more: kept, it would take the registers of other programs.
        s = tl.load(from_state, is_read, 0.0).to(tl.float32)
        if is_complete:
            s = tl.dot(added, k, s * decay, input_precision="ieee")
        values = s.to(state_ptr.dtype.element_ty)
        if write > 0:
            tl.store(state_ptr + write * state_slot + in_state, values)
        if (checkpoint > 0) & (checkpoint_position > first) & (checkpoint_position <= last):
            tl.store(state_ptr + checkpoint * state_slot + in_state, values)


@triton.jit
def _tile(
    before, q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr, weights_ptr, factors_ptr, decays_ptr,
    eye, t, first, start, end, p, n, q_row, k_row, v_row,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    """A chunk from the state at its beginning, rounded to the type of q: k [TILE, n], v [TILE, p], y^T [p, TILE] float32; and
    what the chunk does to the state: what k is multiplied with [p, TILE], and the state's factor.
    """
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    places = tl.arange(0, TILE)
    at = t * TILE + places
    own = (at >= start) & (at < end)
    old = (at >= first) & (at < start)
    offset = tl.cast(t * TILE, tl.int64)
    rows = (offset + places)[:, None]
    q = tl.load(q_ptr + rows * q_row + n[None, :], own[:, None], 0.0)
    k = tl.load(k_ptr + rows * k_row + n[None, :], own[:, None], 0.0)
    v = tl.load(v_ptr + rows * v_row + p[None, :], own[:, None], 0.0)
    if REPLAYS:
        in_ring = at % RING
        old_k = tl.load(
            ring_k_ptr + in_ring[:, None] * (K_HEADS * K_DIM) + n[None, :], old[:, None], 0.0
        )
        old_v = tl.load(
            ring_v_ptr + in_ring[:, None] * (HEADS * V_DIM) + p[None, :], old[:, None], 0.0
        )
        k = tl.where(own[:, None], k, old_k)
        v = tl.where(own[:, None], v, old_v)
    here = tl.cast(t, tl.int64) * HEADS
    in_r = tl.arange(0, R_ROW)
    r = tl.load(r_ptr + here * (TILE * R_ROW) + places[:, None] * R_ROW + in_r[None, :])
    weights = tl.load(weights_ptr + here * (TILE * TILE) + places[:, None] * TILE + places[None, :])
    of_token = factors_ptr + here * (TILE * 4) + places * 4
    q_factor = tl.load(of_token)
    k_factor = tl.load(of_token + 1)
    add_factor = tl.load(of_token + 2)
    decay = tl.load(decays_ptr + here)

    x = tl.dot(before, tl.trans(k), input_precision="ieee")
    # v^T comes from a product with I: it needs no other layout then, and no registers.
    x = tl.dot(tl.trans(v), eye, x * -k_factor[None, :], input_precision="ieee").to(k.dtype)
    if SPLIT:  # times both halves, which lie side by side
        x = tl.reshape(tl.permute(tl.join(x, x), (0, 2, 1)), [x.shape[0], R_ROW])
    d = tl.dot(x, tl.trans(r), input_precision="ieee")
    y = tl.dot(before, tl.trans(q), input_precision="ieee") * q_factor[None, :]
    y = tl.dot(d.to(k.dtype), tl.trans(weights), y, input_precision="ieee")
    added = (d * add_factor[None, :]).to(k.dtype)
    return k, v, y, added, decay


@triton.jit
def _store(y_ptr, y, t, start, end, p, y_row, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    at = t * TILE + place
    own = (at >= start) & (at < end)
    rows = y_ptr + tl.cast(t * TILE, tl.int64) * y_row + place[None, :] * y_row
    tl.store(rows + p[:, None], y.to(y_ptr.dtype.element_ty), mask=own[None, :])
