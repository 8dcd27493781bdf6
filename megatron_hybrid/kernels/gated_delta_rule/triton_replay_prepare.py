"""What the gated delta rule's Replay in Triton knows of a chunk without the state, of decodes and
prompts alike: see triton_replay.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.dependent_launch import let_next_start, wait_for_inputs
from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import gates
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import of_keys
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare import inverse, store_r
from megatron_hybrid.kernels.gated_delta_rule.triton_replay_channels import prepare_chunk
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.replay_triton.segments import POINTERS, of_sequence


@triton.jit
def chunks_of(cu_ptr, start_ptr, unfolded_ptr, i, sequences, is_prompt, TILE: tl.constexpr):
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
        chunks = chunks_of(cu_ptr, start_ptr, unfolded_ptr, i, sequences, is_prompt, TILE)
        ends = total + tl.cumsum(chunks, 0)
        over = (ends <= index) & (i < sequences)
        sequence += tl.sum(over.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(over, ends, 0), 0))
        total += tl.sum(chunks, 0)
    return sequence, index - before


@launched(do_not_specialize=["sequences", "is_prompt"], do_not_specialize_on_alignment=POINTERS)
def prepare_replay_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr, ring_k_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, sequences, is_prompt,
    q_row, k_row, a_row, b_row, scale,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """R beta and P of a chunk and TOGETHER value heads of a key head, and the factors of the walk:
    of each token exp(G) for q and for k, and exp(G[last] - G) for k, all over the length of q or k;
    and exp(G[last])."""
    head = tl.program_id(0) * TOGETHER
    index = tl.program_id(1)
    sequence, number = _locate(cu_ptr, start_ptr, unfolded_ptr, sequences, is_prompt, index, TILE)
    if sequence >= sequences:
        wait_for_inputs()
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
    n = tl.arange(0, KEYS)
    at_key = head // (HEADS // K_HEADS) * K_DIM
    has_old = of_keys(old[:, None], n[None, :], K_DIM, KEYS)
    has_own = of_keys(own[:, None], n[None, :], K_DIM, KEYS)
    old_k = tl.load(
        ring_k_ptr + in_ring[:, None] * (K_HEADS * K_DIM) + at_key + n[None, :], has_old, 0.0
    )
    wait_for_inputs()  # the ring was there before
    let_next_start()
    q = tl.load(q_ptr + row[:, None] * q_row + at_key + n[None, :], has_own, 0.0)
    own_k = tl.load(k_ptr + row[:, None] * k_row + at_key + n[None, :], has_own, 0.0)
    k = tl.where(own[:, None], own_k, old_k)
    if GATE.by_channel:
        prepare_chunk(
            q, k, a_ptr, b_ptr, decay_ptr, bias_ptr, ring_a_ptr, ring_b_ptr, r_ptr, weights_ptr,
            factors_ptr, decays_ptr, own, old, row, in_ring, a_row, b_row, scale, head,
            tl.cast(index, tl.int64) * HEADS + head, n, HEADS, K_DIM, KEYS, TILE, SPLIT, GATE,
        )  # fmt: skip
        return
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
        rate, bias = tl.load(decay_ptr + head + i), tl.load(bias_ptr + head + i)
        decay, beta = gates(a, b, rate, bias, GATE)
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
