"""The gated delta rule in Triton; what it computes is in reference.py, its calls in
protocols.py.

Prefill takes two kernels. The first one prepares all tiles at once, where a tile is a kernel chunk
or a part of one (the symbols are those of reference.py; l and s are places in a tile):

    M[l, s] = beta[l] exp(G[l] - G[s]) (k[l] . k[s])  for s < l, else 0
    R       = (I + M)^-1                              (the UT transform of arXiv 2406.06484)
    u       = R (beta v)        w = R (beta exp(G) k)
    P[l, s] = exp(G[l] - G[s]) (q[l] . k[s])          for s <= l, else 0

The second one walks over a sequence tile by tile. A program takes some columns of S^T [k_dim,
v_dim] of one head and keeps them in registers:

    d       = u - w S^T
    y       = exp(G) q S^T + P d
    S^T     = exp(G[last]) S^T + k^T (exp(G[last] - G) d)

q, k and v go into the products as they come. The lengths of q and k and the decays are factors of
rows and columns: they go into the [tile, tile] matrices, or into the products' results.

Kernel chunks lie on the grid of the sequence's positions, and tiles in chunks, so a state on the
grid comes from the same operations however the prefill was cut, and whatever lies beside it.

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
from megatron_hybrid.kernels.gated_delta_rule.triton_decode import (
    EPS,
    decode,
    decode_runs,
    gates,
)
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens
from megatron_hybrid.kernels.state_rounding.triton import as_stored

__all__ = ["decode", "decode_runs", "plan", "prefill"]

# These differ from step to step, and so would their alignment: no compilation for each of those.
_INDICES = (
    "cu_chunks_ptr cu_seqlens_ptr start_ptr read_ptr write_ptr "
    "cu_checkpoints_ptr position_ptr slot_ptr"
).split()
_kernel = launched(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_INDICES)


class Tiling(NamedTuple):
    """How the kernels cover their work; sizes are powers of two of at least 16."""

    tile: int  # tokens; no more than the kernel chunk are taken
    block_v: int  # columns of S^T
    prepare_warps: int
    walk_warps: int
    walk_stages: int


def plan(segments: PrefillSegments, kernel_chunk: int) -> ChunkedSegments:
    """Nothing is read here: the kernels find their tiles themselves. The kernel chunk is a power of
    two of at least 16, and segments.cu_chunk_seqlens has its bounds."""
    if kernel_chunk < 16 or kernel_chunk & (kernel_chunk - 1):
        raise ValueError(
            f"The kernel chunk is {kernel_chunk}; the Triton kernels of the gated delta rule take "
            "powers of two from 16."
        )
    return ChunkedSegments(segments, kernel_chunk)


def prefill(
    tokens: DeltaRuleTokens,
    constants: DeltaRuleConstants,
    state: Tensor,
    plan: ChunkedSegments,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """k_dim and v_dim must be powers of two from 16, k_dim at most 128. `tiling`: another than the
    one that _tiling chooses."""
    y = checked_output(tokens, state, out)
    q, k, v, a, b = tokens
    q, k, v = aligned(q), aligned(k), aligned(v)
    count, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    if min(k_dim, v_dim) < 16 or k_dim & (k_dim - 1) or v_dim & (v_dim - 1) or k_dim > 128:
        raise ValueError(
            f"Heads of the gated delta rule have {k_dim} key and {v_dim} value dimensions; the "
            "Triton kernels take powers of two from 16, for keys up to 128."
        )
    s, chunk = plan
    sequences = s.start_position.shape[0]
    t = tiling or _tiling(v, sequences, s.longest)
    tile = min(t.tile, chunk)
    shape = {"K_DIM": k_dim, "V_DIM": v_dim, "TILE": tile}

    # Of each head, token by token: a tile's rows lie together.
    u = torch.empty(heads, count, v_dim, dtype=v.dtype, device=v.device)
    w = torch.empty(heads, count, k_dim, dtype=v.dtype, device=v.device)
    weights = torch.empty(heads, count, tile, dtype=v.dtype, device=v.device)
    factors = torch.empty(3, heads, count, dtype=torch.float32, device=v.device)
    chunks = s.cu_chunk_seqlens[chunk]
    if chunks.shape[0] > 1:
        _prepare_kernel[(heads, (chunks.shape[0] - 1) * (chunk // tile))](
            q, k, v, a, b, constants.A, constants.dt_bias, u, w, weights, factors, chunks, count,
            *row_strides(q, k, v, a, b), heads // k_heads, k_dim**-0.5,
            **shape, CHUNK=chunk, SPLIT=v.dtype != torch.float32, num_warps=t.prepare_warps,
        )  # fmt: skip
    _walk_kernel[(v_dim // t.block_v, heads, sequences)](
        q, k, u, w, weights, factors, state, y, count,
        *s.of_sequences, *row_strides(q, k, y, state), heads // k_heads,
        constants.rounding_seed,
        **shape, CHUNK=chunk, BLOCK_V=t.block_v, STAGES=t.walk_stages, num_warps=t.walk_warps,
    )  # fmt: skip
    return y


def _tiling(v: Tensor, sequences: int, longest: int) -> Tiling:
    """The fastest of those tried on an H200, all of which give the same bits."""
    heads, v_dim = v.shape[1:]
    if v.dtype == torch.float32:  # no tensor cores: what fits into registers
        return Tiling(16, 16, prepare_warps=4, walk_warps=8, walk_stages=1)
    # Every program reads all of q, k, w and P: the more columns, the less is read in all. But most
    # processors should have a program.
    if 4 * sequences * heads * (v_dim // 64) < 3 * processors(v.device):
        # Without loads ahead Triton 3.6 compiles so few columns wrongly.
        return Tiling(64, min(v_dim, 32), prepare_warps=4, walk_warps=4, walk_stages=3)
    # Tiles loaded ahead hide how long that takes. A short sequence has few of them: there other
    # programs on the same processor hide it, for which memory is left.
    if longest > 128:
        return Tiling(64, 64, prepare_warps=4, walk_warps=8, walk_stages=3)
    return Tiling(64, 64, prepare_warps=4, walk_warps=4, walk_stages=1)


@triton.jit
def _product(x, y, SPLIT: tl.constexpr):
    """x y of float32 matrices. SPLIT: on tensor cores, each as the sum of a large and a small
    bfloat16; without the product of the small ones the result is good to about 2^-16."""
    if not SPLIT:
        return tl.dot(x, y, input_precision="ieee")
    x_large = x.to(tl.bfloat16)
    y_large = y.to(tl.bfloat16)
    x_small = (x - x_large.to(tl.float32)).to(tl.bfloat16)
    y_small = (y - y_large.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(x_large, y_large, tl.dot(x_large, y_small, tl.dot(x_small, y_large)))


@triton.jit
def _exact_product(r, x, SPLIT: tl.constexpr):
    """r x of a float32 r and inputs x. Neither may r be rounded to the inputs' type: sums of its
    rows cancel, and what is left of them would be the same error in every token."""
    if not SPLIT:
        return tl.dot(r, x, input_precision="ieee")
    large = r.to(x.dtype)
    small = (r - large.to(tl.float32)).to(x.dtype)
    return tl.dot(large, x, tl.dot(small, x))


@triton.jit
def _inverse(m, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """(I + m)^-1 of m [TILE, TILE], strictly lower triangular."""
    # The 16 x 16 blocks on the diagonal by elimination, one column after the other.
    block = tl.arange(0, TILE // 16)
    on_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.reshape(m, [TILE // 16, 16, TILE // 16, 16])
    blocks = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)
    place = tl.arange(0, 16)
    r = tl.where(place[:, None] == place[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(blocks)
    for i in tl.static_range(15):
        column = tl.sum(tl.where((place == i)[None, None, :], blocks, 0.0), 2)
        row = tl.sum(tl.where((place == i)[None, :, None], r, 0.0), 1)
        r -= column[:, :, None] * row[:, None, :]
    r = tl.reshape(tl.where(on_diagonal, r[:, :, None, :], 0.0), [TILE, TILE])
    # Then blocks of twice the size: two neighbours on the diagonal, and L, what lies below the
    # first. (R^-1 + L)^-1 = R - R L R, because L R L = 0.
    place = tl.arange(0, TILE)
    for doublings in tl.static_range(TILE // 32):
        block = place // (16 * 2**doublings)
        below = (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])
        r -= _product(r, _product(tl.where(below, m, 0.0), r, SPLIT), SPLIT)
    return r


@_kernel
def _prepare_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr,
    u_ptr, w_ptr, weights_ptr, factors_ptr, cu_chunks_ptr, tokens,
    q_row, k_row, v_row, a_row, b_row, heads_per_key, scale,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """u, w and P of a tile, and the factors of the walk: of each token exp(G) for q and
    exp(G[last] - G) for k, both over the length of q or k, and at the first one exp(G[last])."""
    head = tl.program_id(0)
    chunk = tl.program_id(1) // (CHUNK // TILE)
    begin = tl.load(cu_chunks_ptr + chunk).to(tl.int64)
    begin += tl.program_id(1) % (CHUNK // TILE) * TILE
    length = (tl.load(cu_chunks_ptr + chunk + 1) - begin).to(tl.int32)
    if length <= 0:
        return
    places = tl.arange(0, TILE)
    valid = places < length
    n = tl.arange(0, K_DIM)
    p = tl.arange(0, V_DIM)
    at_key = head // heads_per_key * K_DIM
    q_ptr += begin * q_row + at_key
    k_ptr += begin * k_row + at_key
    v_ptr += begin * v_row + head * V_DIM
    q = tl.load(q_ptr + places[:, None] * q_row + n[None, :], valid[:, None], 0.0)
    k = tl.load(k_ptr + places[:, None] * k_row + n[None, :], valid[:, None], 0.0)
    v = tl.load(v_ptr + places[:, None] * v_row + p[None, :], valid[:, None], 0.0)
    a = tl.load(a_ptr + begin * a_row + head + places * a_row, valid, 0.0)
    b = tl.load(b_ptr + begin * b_row + head + places * b_row, valid, 0.0)
    decay, beta = gates(a, b, decay_ptr, bias_ptr, head)
    cs = tl.cumsum(tl.where(valid, decay, 0.0), 0)  # log2(e) * G
    last = tl.sum(tl.where(places == TILE - 1, cs, 0.0), 0)
    q32 = q.to(tl.float32)
    k32 = k.to(tl.float32)
    q_factor = tl.rsqrt(tl.sum(q32 * q32, 1) + EPS) * scale
    k_factor = tl.rsqrt(tl.sum(k32 * k32, 1) + EPS)

    row = head * tl.cast(tokens, tl.int64) + begin
    plane = tl.num_programs(0) * tl.cast(tokens, tl.int64)
    factors_ptr += row
    tl.store(factors_ptr + places, tl.exp2(cs) * q_factor, valid)
    tl.store(factors_ptr + plane + places, tl.exp2(last - cs) * k_factor, valid)
    tl.store(factors_ptr + 2 * plane, tl.exp2(last))

    # Above the diagonal exp2 may overflow; the selections drop it.
    between = tl.exp2(cs[:, None] - cs[None, :]) * k_factor[None, :]
    weights = tl.dot(q, tl.trans(k), input_precision="ieee") * between * q_factor[:, None]
    weights = tl.where(places[:, None] >= places[None, :], weights, 0.0).to(v.dtype)
    at = row * TILE + places[:, None] * TILE + places[None, :]
    tl.store(weights_ptr + at, weights, valid[:, None])

    m = tl.dot(k, tl.trans(k), input_precision="ieee") * between * (beta * k_factor)[:, None]
    r = _inverse(tl.where(places[:, None] > places[None, :], m, 0.0), TILE, SPLIT)
    r *= beta[None, :]
    u = _exact_product(r, v, SPLIT)
    at = row * V_DIM + places[:, None] * V_DIM + p[None, :]
    tl.store(u_ptr + at, u.to(v.dtype), valid[:, None])
    r *= (tl.exp2(cs) * k_factor)[None, :]
    w = _exact_product(r, k, SPLIT)
    at = row * K_DIM + places[:, None] * K_DIM + n[None, :]
    tl.store(w_ptr + at, w.to(v.dtype), valid[:, None])


@_kernel
def _walk_kernel(
    q_ptr, k_ptr, u_ptr, w_ptr, weights_ptr, factors_ptr, state_ptr, y_ptr, tokens,
    cu_seqlens_ptr, start_ptr, read_ptr, write_ptr,
    cu_checkpoints_ptr, position_ptr, slot_ptr,
    q_row, k_row, y_row, state_slot, heads_per_key, seed,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_token).to(tl.int32)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    # The segment's first tokens, if they complete a chunk, are tiles of their own; the last of
    # these is short of `missing` tokens, by which all later ones begin earlier.
    cut = tl.minimum((CHUNK - start % CHUNK) % CHUNK, length)
    cut_tiles = tl.cdiv(cut, TILE)
    missing = cut_tiles * TILE - cut
    tiles = tl.cdiv(length + missing, TILE)

    places = tl.arange(0, TILE)
    n = tl.arange(0, K_DIM)
    p = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = head * tl.cast(tokens, tl.int64) + first_token
    plane = tl.num_programs(1) * tl.cast(tokens, tl.int64)
    at_key = head // heads_per_key * K_DIM
    q_ptr += first_token * q_row + at_key
    k_ptr += first_token * k_row + at_key
    u_ptr += row * V_DIM
    w_ptr += row * K_DIM
    weights_ptr += row * TILE
    factors_ptr += row
    y_ptr += first_token * y_row + head * V_DIM
    in_state = head * (V_DIM * K_DIM) + n[:, None] + p[None, :] * K_DIM

    s = tl.zeros([K_DIM, BLOCK_V], tl.float32)
    read = tl.load(read_ptr + sequence).to(tl.int64)
    if read > 0:
        s = tl.load(state_ptr + read * state_slot + in_state).to(tl.float32)
    checkpoint = tl.load(cu_checkpoints_ptr + sequence).to(tl.int32)
    last_checkpoint = tl.load(cu_checkpoints_ptr + sequence + 1).to(tl.int32)
    due = length + 1  # tokens before the next checkpoint
    if checkpoint < last_checkpoint:
        due = tl.load(position_ptr + checkpoint).to(tl.int32) - start
    for tile in tl.range(tiles, num_stages=STAGES):
        is_cut = tile < cut_tiles
        begin = tile * TILE - tl.where(is_cut, 0, missing)
        end = tl.minimum(begin + TILE, tl.where(is_cut, cut, length))
        valid = places < end - begin
        at = tl.cast(begin, tl.int64)
        w = tl.load(w_ptr + at * K_DIM + places[:, None] * K_DIM + n[None, :], valid[:, None], 0.0)
        q = tl.load(q_ptr + at * q_row + places[:, None] * q_row + n[None, :], valid[:, None], 0.0)
        k = tl.load(k_ptr + at * k_row + places[:, None] * k_row + n[None, :], valid[:, None], 0.0)
        weights = tl.load(
            weights_ptr + at * TILE + places[:, None] * TILE + places[None, :], valid[:, None], 0.0
        )
        u = tl.load(u_ptr + at * V_DIM + places[:, None] * V_DIM + p[None, :], valid[:, None], 0.0)
        q_factor = tl.load(factors_ptr + at + places, valid, 0.0)
        k_factor = tl.load(factors_ptr + plane + at + places, valid, 0.0)
        decay = tl.load(factors_ptr + 2 * plane + at)

        before = s.to(w.dtype)
        d = u - tl.dot(w, before, input_precision="ieee")
        y = tl.dot(q, before, input_precision="ieee") * q_factor[:, None]
        y = tl.dot(weights, d.to(w.dtype), y, input_precision="ieee")
        y_ptrs = y_ptr + at * y_row + places[:, None] * y_row + p[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), valid[:, None])
        added = (d * k_factor[:, None]).to(w.dtype)
        s = tl.dot(tl.trans(k), added, s * decay, input_precision="ieee")
        if end == due:  # a loop alone would keep the compiler from issuing loads ahead
            while end == due:
                _store_state(
                    state_ptr, slot_ptr + checkpoint, state_slot, in_state, s, seed, start + end
                )
                checkpoint += 1
                due = length + 1
                if checkpoint < last_checkpoint:
                    due = tl.load(position_ptr + checkpoint).to(tl.int32) - start
    _store_state(state_ptr, write_ptr + sequence, state_slot, in_state, s, seed, start + length)


@triton.jit
def _store_state(state_ptr, slot_ptr, state_slot, in_state, s, seed, position):
    slot = tl.load(slot_ptr).to(tl.int64)
    if slot > 0:
        stored = as_stored(s, state_ptr.dtype.element_ty, seed, position, in_state)
        tl.store(state_ptr + slot * state_slot + in_state, stored)
