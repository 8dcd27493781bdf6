"""What the prefill of Kimi delta attention knows of a tile without the state (the symbols are those
of reference.py; l and s are places in a tile, n channels):

    M[l, s] = beta[l] sum over n of k[l, n] k[s, n] exp(G[l, n] - G[s, n])  for s < l, else 0
    P[l, s] =         sum over n of q[l, n] k[s, n] exp(G[l, n] - G[s, n])  for s <= l, else 0

and what the walk multiplies states with: exp(G) q, exp(G) k and exp(G[last] - G) k.

Sums of pairs are products of matrices if the decay between two tokens is one of two factors, from l
to some place and from there to s. Where a tile forgets little, its middle is that place for all
pairs: a factor is e^40 at most and the other one as small. Where it forgets more, the pairs that
lie on both sides of the middle are computed so, with factors of at most 1, and then each half like
a tile of its own, down to where it forgets little, or is a single token. So nothing overflows
whatever the decays are, and what is lost is nothing beside what else is in the sum.
"""

from __future__ import annotations

import triton.language as tl

from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import gates
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import load_keys, of_keys, store_keys
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare import tile_at
from megatron_hybrid.kernels.launching import launched

LARGEST = tl.constexpr(58.0)  # of log2 of a factor: e^40


@launched(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["cu_chunks_ptr"])
def prepare_channels_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr,
    r_ptr, weights_ptr, beta_ptr, decays_ptr, scaled_ptr, cu_chunks_ptr, tokens,
    q_row, k_row, a_row, b_row, scale,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of a tile and a head: M, in float32, where R will lie, P, beta, and exp(G[last]) [n] at the
    tile's number; the three scaled matrices lie token by token, [3, tokens, HEADS, n]."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    begin, length = tile_at(cu_chunks_ptr, tile, TILE, CHUNK)
    if length <= 0:
        return
    places = tl.arange(0, TILE)
    valid = places < length
    n = tl.arange(0, KEYS)
    in_head = head * K_DIM + n
    q_ptr += begin * q_row
    k_ptr += begin * k_row
    a_ptr += begin * a_row
    has_key = of_keys(valid[:, None], n[None, :], K_DIM, KEYS)
    q = tl.load(q_ptr + places[:, None] * q_row + in_head[None, :], has_key, 0.0)
    k = tl.load(k_ptr + places[:, None] * k_row + in_head[None, :], has_key, 0.0)
    a = tl.load(a_ptr + places[:, None] * a_row + in_head[None, :], has_key, 0.0)
    b = tl.load(b_ptr + begin * b_row + head + places * b_row, valid, 0.0)
    bias = load_keys(bias_ptr + in_head, n, K_DIM, KEYS)[None, :]
    decay, beta = gates(a, b, tl.load(rate_ptr + head), bias, GATE)
    cs = tl.cumsum(tl.where(has_key, decay, 0.0), 0)  # log2(e) * G
    kind = q.dtype
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + EPS) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]

    last = tl.sum(tl.where(places[:, None] == TILE - 1, cs, 0.0), 0)
    at = decays_ptr + tl.cast(tile, tl.int64) * (HEADS * K_DIM) + in_head
    store_keys(at, tl.exp2(last), n, K_DIM, KEYS)
    at = begin * (HEADS * K_DIM) + places[:, None] * (HEADS * K_DIM) + in_head[None, :]
    size = tl.cast(tokens, tl.int64) * (HEADS * K_DIM)  # of a matrix of all tokens
    start = tl.exp2(cs)
    tl.store(scaled_ptr + at, (start * q).to(kind), has_key)
    tl.store(scaled_ptr + size + at, (start * k).to(kind), has_key)
    to_end = tl.exp2(last[None, :] - cs)
    tl.store(scaled_ptr + 2 * size + at, (to_end * k).to(kind), has_key)

    # From the middle of each block, whose places follow one another.
    block = tl.full([], TILE, tl.int32)
    middle = tl.sum(tl.where(places[:, None] == TILE // 2 - 1, cs, 0.0), 0)
    from_middle = cs - middle[None, :]
    qk = tl.zeros([TILE, TILE], tl.float32)
    kk = tl.zeros([TILE, TILE], tl.float32)
    while (block > 1) & (tl.max(tl.max(tl.abs(from_middle), 1), 0) > LARGEST):
        half = block // 2
        grown = tl.exp2(tl.minimum(from_middle, 0.0))
        shrunk = (tl.exp2(tl.minimum(-from_middle, 0.0)) * k).to(kind)
        second = places % block >= half
        across = (places[:, None] // block == places[None, :] // block) & second[:, None]
        across &= (places % block < half)[None, :]
        pairs = tl.dot((grown * q).to(kind), tl.trans(shrunk), input_precision="ieee")
        qk = tl.where(across, pairs, qk)
        pairs = tl.dot((grown * k).to(kind), tl.trans(shrunk), input_precision="ieee")
        kk = tl.where(across, pairs, kk)
        block = half
        at_middle = places // half * half + tl.maximum(half // 2 - 1, 0)
        from_middle = cs - tl.gather(cs, tl.broadcast_to(at_middle[:, None], cs.shape), 0)
    inside = (places[:, None] // block == places[None, :] // block) & valid[:, None]
    shrunk = (tl.exp2(-from_middle) * k).to(kind)
    grown = tl.exp2(from_middle)
    pairs = tl.dot((grown * q).to(kind), tl.trans(shrunk), input_precision="ieee")
    qk = tl.where(inside, pairs, qk)
    qk = tl.where(places[:, None] >= places[None, :], qk, 0.0)
    pairs = tl.dot((grown * k).to(kind), tl.trans(shrunk), input_precision="ieee")
    kk = tl.where(inside, pairs, kk)
    kk = tl.where(places[:, None] > places[None, :], kk, 0.0)

    row = head * tl.cast(tokens, tl.int64) + begin
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    tl.store(beta_ptr + row + places, beta, valid)
    at = row * TILE + places[:, None] * TILE + places[None, :]
    tl.store(weights_ptr + at, qk.to(kind), valid[:, None])
    m_ptr = (r_ptr + row * R_ROW).to(tl.pointer_type(tl.float32))
    # Of M the blocks of 16 on the diagonal and below it are read.
    is_read = (places[:, None] // 16 >= places[None, :] // 16) & valid[:, None]
    tl.store(m_ptr + places[:, None] * TILE + places[None, :], kk * beta[:, None], is_read)
