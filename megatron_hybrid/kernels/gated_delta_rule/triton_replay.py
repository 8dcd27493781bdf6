"""The gated delta rule's Replay in Triton: a token has the same bits in decodes, drafts and
prompts. The symbols and the arithmetic are those of triton.py and triton_prepare.py, with tiles
that are chunks of TILE tokens, which come from the ring or from the call.

The first kernel makes what a chunk needs without the state: R beta, P and factors. The second one
walks over a sequence's chunks; single decodes have one of their own for the same operations (see
mamba2_scan/triton_replay.py). All of a chunk is computed each time, of which the outputs of the
call's own tokens are stored; what is not there yet is zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import aligned, checked_output, row_strides
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import Gate, load_decay, store_decay
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import (
    check_dims,
    load_keys,
    of_keys,
    store_keys,
)
from megatron_hybrid.kernels.gated_delta_rule.triton_replay_channels import (
    keep_decays,
    load_scaled,
)
from megatron_hybrid.kernels.gated_delta_rule.triton_replay_prepare import (
    chunks_of,
    prepare_replay_kernel,
)
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens, Rings
from megatron_hybrid.kernels.replay_triton.segments import (
    POINTERS,
    ReplaySegments,
    checkpoint_at,
    keep,
    of_sequence,
)
from megatron_hybrid.kernels.replay_triton.tiles import (
    TILE,
    Tiling,
    rows_of,
    store_padding,
    tiling_of,
)
from megatron_hybrid.kernels.replay_triton.tiles import plan as plan

_FEW_PROGRAMS = 256

_kernel = launched(
    do_not_specialize=["tokens", "is_prompt", "sequences"], do_not_specialize_on_alignment=POINTERS
)


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
    """As in Replay. Rings are contiguous. `tiling`: another than tiling_of's, for whose bits
    nothing is promised."""
    y = checked_output(tokens, state, out)
    q, k, v = aligned(tokens.q), aligned(tokens.k), aligned(tokens.v)
    a, b = tokens.a, tokens.b
    count, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    sequences, group = plan.sequences, heads // k_heads
    split = v.dtype != torch.float32
    # A sequence has at most two chunks that it does not fill.
    tiles = count // TILE + 2 * sequences
    r_row = TILE * (1 + split)
    r = torch.empty(tiles, heads, TILE, r_row, dtype=v.dtype, device=v.device)
    weights = torch.empty(tiles, heads, TILE, TILE, dtype=v.dtype, device=v.device)
    gate = Gate.of(tokens, constants)
    if gate.by_channel:  # the scaled matrices are in the factors' place
        factors = torch.empty(tiles, heads, 3, TILE, k_dim, dtype=v.dtype, device=v.device)
    else:
        factors = torch.empty(tiles, heads, TILE, 4, dtype=torch.float32, device=v.device)
    a_head = k_dim if gate.by_channel else 1  # decays of a token
    decays = torch.empty(tiles, heads, a_head, dtype=torch.float32, device=v.device)
    # Heads of a program; of few each has one, so that it takes less time.
    few = plan.is_single and tiles * heads <= _FEW_PROGRAMS
    together = 2 if split and group % 2 == 0 and not few else 1
    ring_k, ring_v, ring_a, ring_b = ring
    sizes = {
        "HEADS": heads, "K_HEADS": k_heads, "RING": ring_k.shape[1], "K_DIM": k_dim,
        "KEYS": check_dims(k_dim, v_dim), "TILE": TILE, "SPLIT": split, "GATE": gate,
    }  # fmt: skip
    prepare_replay_kernel[(heads // together, tiles)](
        q, k, a, b, constants.A, constants.dt_bias, ring_k, ring_a, ring_b,
        r, weights, factors, decays, *plan.figures, sequences, plan.is_prompt,
        *row_strides(q, k, a, b), k_dim**-0.5, **sizes, TOGETHER=together, num_warps=1, **OPTIONS,
    )  # fmt: skip
    block_v, num_warps, num_stages = tiling or tiling_of(v_dim, v.dtype, plan.is_single)
    arguments = (
        q, k, v, a, b, ring_k, ring_v, ring_a, ring_b, r, weights, factors, decays, state, y,
        *plan.figures, count, sequences, plan.is_prompt, *row_strides(q, k, v, a, b, y, state),
    )  # fmt: skip
    sizes |= {"V_DIM": v_dim, "BLOCK_V": block_v}
    grid = v_dim // block_v, heads, sequences + 1
    if plan.is_single:
        _decode_kernel[grid](
            rows_of(state, block_v), *arguments, **sizes, num_warps=num_warps, **OPTIONS
        )
    else:
        _walk_kernel[grid](*arguments, **sizes, STAGES=num_stages, num_warps=num_warps)
    if plan.is_prompt:
        keep((k, v, a, b), ring, plan)
    return y


@_kernel
def _walk_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr, state_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, sequences, is_prompt,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, GATE: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if sequence == sequences:  # the padding
        store_padding(y_ptr, cu_ptr, sequence, tokens, y_row, head * V_DIM + p)
        return
    begin, start, end, first, last = of_sequence(
        cu_ptr, start_ptr, unfolded_ptr, sequence, is_prompt, TILE
    )
    index = 0  # of the sequence's first chunk among those of all
    for block in range(0, sequence, 64):
        i = block + tl.arange(0, 64)
        chunks = chunks_of(cu_ptr, start_ptr, unfolded_ptr, i, sequence, is_prompt, TILE)
        index += tl.sum(chunks, 0)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    n = tl.arange(0, KEYS)
    in_state = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    s = tl.zeros([BLOCK_V, KEYS], tl.float32)
    if read > 0:
        s_ptrs = state_ptr + read * state_slot + in_state
        s = load_keys(s_ptrs, n[None, :], K_DIM, KEYS).to(tl.float32)
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
    factors_ptr += of_tile * (TILE * (3 * K_DIM if GATE.by_channel else 4))
    decays_ptr += of_tile * (K_DIM if GATE.by_channel else 1)
    places = tl.arange(0, TILE)
    eye = tl.where(places[:, None] == places[None, :], 1.0, 0.0).to(q_ptr.dtype.element_ty)

    # What is replayed and its chunk's other tokens, if they complete it.
    t0 = first // TILE
    completes = (first < start) & ((t0 + 1) * TILE <= last)
    if completes:
        k, v, y, d, added, decay = _tile(
            s.to(q_ptr.dtype.element_ty), q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr,
            weights_ptr, factors_ptr,
            decays_ptr, eye, t0, first, start, end, p, n, q_row, k_row, v_row,
            HEADS, K_HEADS, RING, K_DIM, KEYS, V_DIM, TILE, SPLIT, GATE.by_channel, True,
        )  # fmt: skip
        _store(y_ptr, y, t0, start, end, p, y_row, TILE)
        s = tl.dot(d, added, s * decay, input_precision="ieee")
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
            k, v, y, d, added, decay = _tile(
                s.to(q_ptr.dtype.element_ty), q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr,
                weights_ptr, factors_ptr,
                decays_ptr, eye, t, first, start, end, p, n, q_row, k_row, v_row,
                HEADS, K_HEADS, RING, K_DIM, KEYS, V_DIM, TILE, SPLIT, GATE.by_channel, False,
            )  # fmt: skip
            _store(y_ptr, y, t, start, end, p, y_row, TILE)
            s = tl.dot(d, added, s * decay, input_precision="ieee")
        if slot > 0:
            s_ptrs = state_ptr + slot * state_slot + in_state
            store_keys(s_ptrs, s.to(state_ptr.dtype.element_ty), n[None, :], K_DIM, KEYS)
    for t in range(last // TILE, tl.cdiv(end, TILE)):
        k, v, y, d, added, decay = _tile(
            s.to(q_ptr.dtype.element_ty), q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr,
            weights_ptr, factors_ptr,
            decays_ptr, eye, t, first, start, end, p, n, q_row, k_row, v_row,
            HEADS, K_HEADS, RING, K_DIM, KEYS, V_DIM, TILE, SPLIT, GATE.by_channel, True,
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
                b = tl.load(b_ptr + row * b_row + head, is_own, 0.0)
                keep_decays(
                    a_ptr, a_row, ring_a_ptr, row, ring + place, is_own, head, n,
                    HEADS, K_DIM, KEYS, GATE.by_channel,
                )  # fmt: skip
                tl.store(ring_b_ptr + for_ring, b, mask=is_own)
                if head % (HEADS // K_HEADS) == 0:
                    to_k = ring_k_ptr + (place * (K_HEADS * K_DIM))[:, None] + n[None, :]
                    tl.store(to_k, k, mask=of_keys(is_own[:, None], n[None, :], K_DIM, KEYS))
        if (t + 1) * TILE < end:
            s = tl.dot(d, added, s * decay, input_precision="ieee")


@_kernel
def _decode_kernel(
    states, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, ring_k_ptr, ring_v_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, factors_ptr, decays_ptr, state_ptr, y_ptr,
    cu_ptr, start_ptr, unfolded_ptr, read_ptr, write_ptr, ring_ptr, cu_checkpoints_ptr,
    position_ptr, slot_ptr, tokens, sequences, is_prompt,
    q_row, k_row, v_row, a_row, b_row, y_row, state_slot,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, GATE: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Of sequences of one token, or none, all of whose chunk is in the ring. states: a tensor
    descriptor, of all rows of all states."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if sequence == sequences:  # the padding
        wait_for_inputs()
        store_padding(y_ptr, cu_ptr, sequence, tokens, y_row, head * V_DIM + p)
        return
    read = tl.load(read_ptr + sequence).to(tl.int64)
    write = tl.load(write_ptr + sequence).to(tl.int64)
    ring = tl.load(ring_ptr + sequence).to(tl.int64) * RING
    checkpoint = tl.load(slot_ptr + sequence).to(tl.int64)
    checkpoint_position = tl.load(position_ptr + sequence)
    begin, start, end, first, last = of_sequence(cu_ptr, start_ptr, unfolded_ptr, sequence, 0, TILE)
    n = tl.arange(0, KEYS)
    in_state = head * (V_DIM * K_DIM) + p[:, None] * K_DIM + n[None, :]
    key_head = head // (HEADS // K_HEADS)
    t = first // TILE
    old_k, old_v = _replayed(
        ring_k_ptr + ring * (K_HEADS * K_DIM) + key_head * K_DIM,
        ring_v_ptr + ring * (HEADS * V_DIM) + head * V_DIM,
        t, first, start, p, n, HEADS, K_HEADS, RING, K_DIM, KEYS, V_DIM, TILE,
    )  # fmt: skip
    first_row = (read.to(tl.int32) * HEADS + head) * V_DIM + tl.program_id(0) * BLOCK_V
    is_read = p[:, None] < tl.where(read > 0, V_DIM, 0)
    before = tl.where(is_read, states.load([first_row, 0]), 0.0).to(q_ptr.dtype.element_ty)
    wait_for_inputs()  # the state and the ring were there before
    let_next_start()
    if end == start:  # padding, behind all others
        return
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    origin = begin - start
    q, k, v = _own(
        q_ptr + origin * q_row + key_head * K_DIM, k_ptr + origin * k_row + key_head * K_DIM,
        v_ptr + origin * v_row + head * V_DIM, t, start, end, p, n, q_row, k_row, v_row,
        K_DIM, KEYS, TILE,
    )  # fmt: skip
    places = tl.arange(0, TILE)
    at = t * TILE + places
    is_own = (at >= start) & (at < end)
    k = tl.where(is_own[:, None], k, old_k)
    v = tl.where(is_own[:, None], v, old_v)
    eye = tl.where(places[:, None] == places[None, :], 1.0, 0.0).to(q_ptr.dtype.element_ty)
    # Each has one chunk, so that the sequence's number is its chunk's.
    of_tile = tl.cast(sequence - t, tl.int64) * HEADS + head
    factors_ptr += of_tile * (TILE * (3 * K_DIM if GATE.by_channel else 4))
    decays_ptr += of_tile * (K_DIM if GATE.by_channel else 1)
    y, d, added, decay = _chunk(
        before, q, k, v, r_ptr + of_tile * (TILE * R_ROW), weights_ptr + of_tile * (TILE * TILE),
        factors_ptr, decays_ptr, eye, t, n, HEADS, K_DIM, KEYS, TILE, SPLIT, GATE.by_channel,
    )  # fmt: skip
    _store(y_ptr + origin * y_row + head * V_DIM, y, t, start, end, p, y_row, TILE)
    is_complete = last > first
    if is_complete == 0:
        place = ring + at % RING
        to_v = ring_v_ptr + (place * (HEADS * V_DIM))[:, None] + head * V_DIM + p[None, :]
        tl.store(to_v, v, mask=is_own[:, None])
        if tl.program_id(0) == 0:
            row = tl.cast(begin, tl.int64)
            here = (ring + start % RING) * HEADS
            tl.store(ring_b_ptr + here + head, tl.load(b_ptr + row * b_row + head))
            to_a = ring_a_ptr + here * (K_DIM if GATE.by_channel else 1)
            a = load_decay(a_ptr + row * a_row, head, n, K_DIM, KEYS, GATE)
            store_decay(to_a, a, head, n, K_DIM, KEYS, GATE)
            if head % (HEADS // K_HEADS) == 0:
                to_k = ring_k_ptr + (place * (K_HEADS * K_DIM))[:, None] + key_head * K_DIM
                has_own = of_keys(is_own[:, None], n[None, :], K_DIM, KEYS)
                tl.store(to_k + n[None, :], k, mask=has_own)
    if is_complete | (write != read):
        # Loaded once more: kept, it would take the registers of other programs.
        s = tl.where(is_read, states.load([first_row, 0]).to(tl.float32), 0.0)
        if is_complete:
            s = tl.dot(d, added, s * decay, input_precision="ieee")
        values = s.to(state_ptr.dtype.element_ty)
        if write > 0:
            s_ptrs = state_ptr + write * state_slot + in_state
            store_keys(s_ptrs, values, n[None, :], K_DIM, KEYS)
        if (checkpoint > 0) & (checkpoint_position > first) & (checkpoint_position <= last):
            s_ptrs = state_ptr + checkpoint * state_slot + in_state
            store_keys(s_ptrs, values, n[None, :], K_DIM, KEYS)


@triton.jit
def _tile(
    before, q_ptr, k_ptr, v_ptr, ring_k_ptr, ring_v_ptr, r_ptr, weights_ptr, factors_ptr,
    decays_ptr, eye, t, first, start, end, p, n, q_row, k_row, v_row,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    KEYS: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    BY_CHANNEL: tl.constexpr, REPLAYS: tl.constexpr,
):  # fmt: skip
    """_chunk of what the call and, where it REPLAYS, the ring have of a chunk; and k [TILE, n] and
    v [TILE, p] as they came."""
    q, k, v = _own(q_ptr, k_ptr, v_ptr, t, start, end, p, n, q_row, k_row, v_row, K_DIM, KEYS, TILE)
    if REPLAYS:
        at = t * TILE + tl.arange(0, TILE)
        own = (at >= start) & (at < end)
        old_k, old_v = _replayed(
            ring_k_ptr, ring_v_ptr, t, first, start, p, n,
            HEADS, K_HEADS, RING, K_DIM, KEYS, V_DIM, TILE,
        )  # fmt: skip
        k = tl.where(own[:, None], k, old_k)
        v = tl.where(own[:, None], v, old_v)
    y, d, added, decay = _chunk(
        before, q, k, v, r_ptr, weights_ptr, factors_ptr, decays_ptr, eye, t, n,
        HEADS, K_DIM, KEYS, TILE, SPLIT, BY_CHANNEL,
    )  # fmt: skip
    return k, v, y, d, added, decay


@triton.jit
def _own(
    q_ptr, k_ptr, v_ptr, t, start, end, p, n, q_row, k_row, v_row,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the call has of a chunk: q and k [TILE, n], v [TILE, p]; zeros else."""
    places = tl.arange(0, TILE)
    at = t * TILE + places
    own = ((at >= start) & (at < end))[:, None]
    rows = (tl.cast(t * TILE, tl.int64) + places)[:, None]
    has_own = of_keys(own, n[None, :], K_DIM, KEYS)
    q = tl.load(q_ptr + rows * q_row + n[None, :], has_own, 0.0)
    k = tl.load(k_ptr + rows * k_row + n[None, :], has_own, 0.0)
    return q, k, tl.load(v_ptr + rows * v_row + p[None, :], own, 0.0)


@triton.jit
def _replayed(
    ring_k_ptr, ring_v_ptr, t, first, start, p, n,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, RING: tl.constexpr, K_DIM: tl.constexpr,
    KEYS: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the ring has of a chunk: k [TILE, n], v [TILE, p]; zeros else."""
    at = t * TILE + tl.arange(0, TILE)
    old = ((at >= first) & (at < start))[:, None]
    place = (at % RING)[:, None]
    has_old = of_keys(old, n[None, :], K_DIM, KEYS)
    k = tl.load(ring_k_ptr + place * (K_HEADS * K_DIM) + n[None, :], has_old, 0.0)
    return k, tl.load(ring_v_ptr + place * (HEADS * V_DIM) + p[None, :], old, 0.0)


@triton.jit
def _chunk(
    before, q, k, v, r_ptr, weights_ptr, factors_ptr, decays_ptr, eye, t, n,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A chunk's tokens from the state at its beginning, rounded to the type of q: y^T [p, TILE]
    float32; and what they do to the state: it is multiplied by a decay, and d [p, TILE] times added
    [TILE, n] goes in."""
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    places = tl.arange(0, TILE)
    here = tl.cast(t, tl.int64) * HEADS
    in_r = tl.arange(0, R_ROW)
    r = tl.load(r_ptr + here * (TILE * R_ROW) + places[:, None] * R_ROW + in_r[None, :])
    weights = tl.load(weights_ptr + here * (TILE * TILE) + places[:, None] * TILE + places[None, :])
    if BY_CHANNEL:
        q_factor, k_factor, add_factor = 1.0, 1.0, 1.0
        q, k, added, decay = load_scaled(factors_ptr, decays_ptr, here, n, K_DIM, KEYS, TILE)
    else:
        of_token = factors_ptr + here * (TILE * 4) + (places * 4)[None, :]
        q_factor = tl.load(of_token)
        k_factor = tl.load(of_token + 1)
        add_factor = tl.load(of_token + 2)
        added = k
        decay = tl.load(decays_ptr + here)

    x = tl.dot(before, tl.trans(k), input_precision="ieee")
    # v^T comes from a product with I: it needs no other layout then, and no registers.
    x = tl.dot(tl.trans(v), eye, x * -k_factor, input_precision="ieee").to(k.dtype)
    if SPLIT:  # times both halves, which lie side by side
        x = tl.reshape(tl.permute(tl.join(x, x), (0, 2, 1)), [x.shape[0], R_ROW])
    d = tl.dot(x, tl.trans(r), input_precision="ieee")
    y = tl.dot(before, tl.trans(q), input_precision="ieee") * q_factor
    y = tl.dot(d.to(k.dtype), tl.trans(weights), y, input_precision="ieee")
    return y, (d * add_factor).to(k.dtype), added, decay


@triton.jit
def _store(y_ptr, y, t, start, end, p, y_row, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    at = t * TILE + place
    own = (at >= start) & (at < end)
    rows = y_ptr + tl.cast(t * TILE, tl.int64) * y_row + place[None, :] * y_row
    tl.store(rows + p[:, None], y.to(y_ptr.dtype.element_ty), mask=own[None, :])
