"""The gated delta rule in Triton; what it computes and its calls are those of reference.py.

Prefill takes two kernels. The first one prepares all tiles at once, where a tile is a kernel chunk
or a part of one (the symbols are those of reference.py, places l and s in a tile):

    M[l, s] = beta[l] exp(G[l] - G[s]) (k[l] . k[s])  for s < l, else 0
    R       = (I + M)^-1                              (the UT transform of arXiv 2406.06484)
    u       = R (beta v)        w = R (beta exp(G) k)
    P[l, s] = exp(G[l] - G[s]) (q[l] . k[s])          for s <= l, else 0

The second one walks over a sequence tile by tile. A program takes some columns of S^T [k_dim,
v_dim] of one head and keeps them in registers:

    d       = u - w S^T
    y       = exp(G) q S^T + P d
    S^T     = exp(G[last]) S^T + k^T (exp(G[last] - G) d)

q, k and v go into the products as they come: the lengths of q and k and the decays, factors of rows
and columns, are put into the [tile, tile] matrices or into the products' results.

Kernel chunks lie on the grid of the sequence's positions, and tiles in chunks, so a state on the
grid comes from the same operations however the prefill was cut.

No sequence of a call may write a slot that another one reads: each program reads its initial state
when it starts, which may be after another has ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import PrefillSegments
from megatron_hybrid.kernels.gated_delta_rule.triton_decode import (
    EPS,
    checked_output,
    decode,
    gates,
)

__all__ = ["DeltaRulePlan", "decode", "plan", "prefill"]

_VARYING = ["tokens"]  # from step to step: no value of theirs is worth compiling anew


@dataclass(frozen=True, slots=True)
class DeltaRulePlan:
    segments: PrefillSegments
    kernel_chunk: int


class Tiling(NamedTuple):
    """How the kernels cover their work; all are powers of two."""

    tile: int  # tokens, at least 16
    block_v: int  # columns of S^T, at least 16
    prepare_warps: int
    num_warps: int
    num_stages: int


def plan(segments: PrefillSegments, kernel_chunk: int) -> DeltaRulePlan:
    """Nothing is read here: the kernels find their tiles themselves. kernel_chunk must be a power
    of two of at least 16."""
    if kernel_chunk < 16 or kernel_chunk & (kernel_chunk - 1):
        raise ValueError(
            f"The kernel chunk {kernel_chunk} is none of 16, 32, 64 and so on, in which the gated "
            "delta rule's kernels work."
        )
    return DeltaRulePlan(segments, kernel_chunk)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    plan: DeltaRulePlan,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """As in reference.py. k_dim and v_dim must be powers of two of at least 16. `tiling`: another
    than the one that _tiling chooses."""
    y = checked_output(q, k, v, a, b, state, out)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    tokens, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    s, chunk = plan.segments, plan.kernel_chunk
    sequences = s.start_position.shape[0]
    chunks = s.cu_chunk_seqlens[chunk]
    t = tiling or _tiling(v, sequences)
    tile = min(t.tile, chunk)
    shape = {"K_DIM": k_dim, "V_DIM": v_dim, "TILE": tile}

    u = torch.empty(heads, tokens, v_dim, dtype=v.dtype, device=v.device)
    w = torch.empty(heads, tokens, k_dim, dtype=v.dtype, device=v.device)
    weights = torch.empty(heads, tokens, tile, dtype=v.dtype, device=v.device)
    factors = torch.empty(heads, tokens, 4, dtype=torch.float32, device=v.device)
    if tokens:
        _prepare_kernel[(heads, (chunks.shape[0] - 1) * (chunk // tile))](
            q, k, v, a, b, A, dt_bias, u, w, weights, factors, chunks, tokens,
            q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0),
            heads // k_heads, k_dim**-0.5,
            **shape,
            TILES=chunk // tile,
            PRECISION="ieee" if v.dtype == torch.float32 else "tf32x3",
            num_warps=t.prepare_warps,
        )  # fmt: skip
    _walk_kernel[(v_dim // t.block_v, heads, sequences)](
        q, k, u, w, weights, factors, state, y, tokens,
        s.cu_seqlens, s.start_position, s.read_slot, s.write_slot,
        s.cu_checkpoints, s.checkpoint_position, s.checkpoint_slot,
        q.stride(0), k.stride(0), y.stride(0), state.stride(0), heads // k_heads,
        **shape,
        CHUNK=chunk,
        BLOCK_V=t.block_v,
        STAGES=t.num_stages,
        num_warps=t.num_warps,
    )  # fmt: skip
    return y


def _tiling(v: Tensor, sequences: int) -> Tiling:
    heads, v_dim = v.shape[1:]
    if v.dtype == torch.float32:  # no tensor cores: small tiles
        return Tiling(32, min(v_dim, 32), prepare_warps=4, num_warps=4, num_stages=1)
    # 64 columns where they keep most processors busy: q, k, w and P are read once a program.
    wide = v_dim >= 64 and 4 * sequences * heads * (v_dim // 64) >= 3 * _processors(v.device)
    return Tiling(64, 64 if wide else min(v_dim, 32), prepare_warps=4, num_warps=4, num_stages=2)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _aligned(rows: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, as a model's do. For others Triton 3.6 compiles
    pipelined loads that leave shared memory."""
    if rows.data_ptr() % 16 or rows.stride(0) * rows.element_size() % 16:
        return rows.contiguous()
    return rows


@triton.jit
def _inverse(m, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + m)^-1 of m [TILE, TILE], strictly lower triangular."""
    # The 16 x 16 blocks on the diagonal by elimination, one column after the other.
    block = tl.arange(0, TILE // 16)
    on_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    m_blocks = tl.reshape(m, [TILE // 16, 16, TILE // 16, 16])
    diagonal = tl.sum(tl.where(on_diagonal, m_blocks, 0.0), 2)  # [TILE // 16, 16, 16]
    place = tl.arange(0, 16)
    r = tl.where(place[:, None] == place[None, :], 1.0, 0.0)[None, :, :]
    r = tl.broadcast_to(r, [TILE // 16, 16, 16])
    for i in tl.static_range(15):
        column = tl.sum(tl.where((place == i)[None, None, :], diagonal, 0.0), 2)
        row = tl.sum(tl.where((place == i)[None, :, None], r, 0.0), 1)
        r -= column[:, :, None] * row[:, None, :]
    r = tl.reshape(tl.where(on_diagonal, r[:, :, None, :], 0.0), [TILE, TILE])
    # Two neighbours on the diagonal, and L below the first one, make a block of twice their size:
    # (R^-1 + L)^-1 = R - R L R, because L R L = 0.
    place = tl.arange(0, TILE)
    for doubling in tl.static_range(TILE // 32):
        block = place // (16 * 2**doubling)
        below = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])
        lr = tl.dot(tl.where(below, m, 0.0), r, input_precision=PRECISION)
        r -= tl.dot(r, lr, input_precision=PRECISION)
    return r


@triton.jit(do_not_specialize=_VARYING)
def _prepare_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    u_ptr, w_ptr, weights_ptr, factors_ptr, cu_chunks_ptr, tokens,
    q_row, k_row, v_row, a_row, b_row, heads_per_key, scale,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """u, w and P of the formulas above, and each token's factors: exp(G) over the length of q,
    exp(G[last] - G) over that of k, and exp(G[last])."""
    head = tl.program_id(0)
    chunk = tl.program_id(1) // TILES
    begin = tl.load(cu_chunks_ptr + chunk).to(tl.int64) + tl.program_id(1) % TILES * TILE
    length = (tl.load(cu_chunks_ptr + chunk + 1) - begin).to(tl.int32)
    if length <= 0:
        return
    places = tl.arange(0, TILE)
    valid = places < length
    n = tl.arange(0, K_DIM)
    p = tl.arange(0, V_DIM)
    at_key = head // heads_per_key * K_DIM
    k_ptrs = k_ptr + begin * k_row + at_key + places[:, None] * k_row + n[None, :]
    k = tl.load(k_ptrs, mask=valid[:, None], other=0.0)
    q_ptrs = q_ptr + begin * q_row + at_key + places[:, None] * q_row + n[None, :]
    q = tl.load(q_ptrs, mask=valid[:, None], other=0.0)
    v_ptrs = v_ptr + begin * v_row + head * V_DIM + places[:, None] * v_row + p[None, :]
    v = tl.load(v_ptrs, mask=valid[:, None], other=0.0)
    a = tl.load(a_ptr + begin * a_row + places * a_row + head, mask=valid, other=0.0)
    b = tl.load(b_ptr + begin * b_row + places * b_row + head, mask=valid, other=0.0)
    decay, beta = gates(a, b, decay_ptr, bias_ptr, head)
    beta = tl.where(valid, beta, 0.0)
    cs = tl.cumsum(tl.where(valid, decay, 0.0), 0)  # log2(e) * G
    last = tl.sum(tl.where(places == TILE - 1, cs, 0.0), 0)
    q32 = q.to(tl.float32)
    k32 = k.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q32 * q32, 1) + EPS) * scale
    k_factor = tl.rsqrt(tl.sum(k32 * k32, 1) + EPS)

    row = head * tl.cast(tokens, tl.int64) + begin
    at = factors_ptr + (row + places) * 4
    tl.store(at, tl.exp2(cs) * q_factor, valid)
    tl.store(at + 1, tl.exp2(last - cs) * k_factor, valid)
    tl.store(at + 2, tl.exp2(last) + tl.zeros([TILE], tl.float32), valid)

    # Above the diagonal exp2 may overflow; the selections drop it.
    between = tl.exp2(cs[:, None] - cs[None, :]) * k_factor[None, :]
    weights = tl.dot(q, tl.trans(k), input_precision="ieee") * between * q_factor[:, None]
    weights = tl.where(places[:, None] >= places[None, :], weights, 0.0).to(v.dtype)
    at = (row + places[:, None]) * TILE + places[None, :]
    tl.store(weights_ptr + at, weights, valid[:, None])

    m = tl.dot(k, tl.trans(k), input_precision="ieee") * between * (beta * k_factor)[:, None]
    r = _inverse(tl.where(places[:, None] > places[None, :], m, 0.0), TILE, PRECISION)
    u = tl.dot((r * beta[None, :]).to(v.dtype), v, input_precision="ieee")
    at = (row + places[:, None]) * V_DIM + p[None, :]
    tl.store(u_ptr + at, u.to(v.dtype), valid[:, None])
    r *= (beta * k_factor * tl.exp2(cs))[None, :]
    w = tl.dot(r.to(v.dtype), k, input_precision="ieee")
    at = (row + places[:, None]) * K_DIM + n[None, :]
    tl.store(w_ptr + at, w.to(v.dtype), valid[:, None])


@triton.jit
def _tile_bounds(tile, first, rest, cut, TILE: tl.constexpr):
    pass


@triton.jit(do_not_specialize=_VARYING)
def _walk_kernel(
    q_ptr, k_ptr, u_ptr, w_ptr, weights_ptr, factors_ptr, state_ptr, y_ptr, tokens,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr,
    q_row, k_row, y_row, state_slot, heads_per_key,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    # Tokens that complete a cut chunk, and their tiles. In tokens from the segment's first one, tile
    # t begins at t * TILE, and shift less if it is not one of these.
    cut = tl.minimum((CHUNK - start % CHUNK) % CHUNK, length)
    cut_tiles = tl.cdiv(cut, TILE)
    tiles = cut_tiles + tl.cdiv(length - cut, TILE)
    shift = cut_tiles * TILE - cut

    places = tl.arange(0, TILE)
    n = tl.arange(0, K_DIM)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = head * tl.cast(tokens, tl.int64) + first_token
    at_key = head // heads_per_key * K_DIM
    q_ptr += first_token * q_row + at_key
    k_ptr += first_token * k_row + at_key
    u_ptr += row * V_DIM
    w_ptr += row * K_DIM
    weights_ptr += row * TILE
    factors_ptr += row * 4
    y_ptr += first_token * y_row + head * V_DIM
    in_state = head * (V_DIM * K_DIM) + n[:, None] + p[None, :] * K_DIM

    s = tl.zeros([K_DIM, BLOCK_V], tl.float32)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    if read > 0:
        s = tl.load(state_ptr + read * state_slot + in_state).to(tl.float32)
    checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    due = length + 1
    if checkpoint < last_checkpoint:
        due = tl.load(position_ptr + checkpoint).to(tl.int32) - start
    for tile in tl.range(tiles, num_stages=STAGES):
        begin = tile * TILE
        end = tl.minimum(begin + TILE, cut)
        if tile >= cut_tiles:
            begin -= shift
            end = tl.minimum(begin + TILE, length)
        valid = places < end - begin
        offset = tl.cast(begin, tl.int64)
        w = tl.load(w_ptr + offset * K_DIM + places[:, None] * K_DIM + n[None, :], mask=valid[:, None], other=0.0)
        q = tl.load(q_ptr + offset * q_row + places[:, None] * q_row + n[None, :], mask=valid[:, None], other=0.0)
        k = tl.load(k_ptr + offset * k_row + places[:, None] * k_row + n[None, :], mask=valid[:, None], other=0.0)
        weights = tl.load(weights_ptr + offset * TILE + places[:, None] * TILE + places[None, :], mask=valid[:, None], other=0.0)
        u = tl.load(u_ptr + offset * V_DIM + places[:, None] * V_DIM + p[None, :], mask=valid[:, None], other=0.0)
        q_factor = tl.load(factors_ptr + (offset + places) * 4, mask=valid, other=0.0)
        k_factor = tl.load(factors_ptr + (offset + places) * 4 + 1, mask=valid, other=0.0)
        last = tl.load(factors_ptr + offset * 4 + 2)

        before = s.to(w.dtype)
        d = u - tl.dot(w, before, input_precision="ieee")
        y = tl.dot(q, before, input_precision="ieee") * q_factor[:, None]
        y = tl.dot(weights, d.to(w.dtype), y, input_precision="ieee")
        tl.store(y_ptr + offset * y_row + places[:, None] * y_row + p[None, :], y.to(y_ptr.dtype.element_ty), mask=valid[:, None])
        s = tl.dot(tl.trans(k), (d * k_factor[:, None]).to(w.dtype), s * last, input_precision="ieee")
        if end == due:
            slot = tl.load(slot_ptr + checkpoint).to(tl.int64)
            if slot > 0:
                tl.store(state_ptr + slot * state_slot + in_state, s.to(state_ptr.dtype.element_ty))
            checkpoint += 1
            if checkpoint < last_checkpoint:
                due = tl.load(position_ptr + checkpoint).to(tl.int32) - start
    slot = tl.load(write_ptr + sequence).to(tl.int64)
    if slot > 0:
        tl.store(state_ptr + slot * state_slot + in_state, s.to(state_ptr.dtype.element_ty))
