"""What the prefill of Kimi delta attention knows of a tile without the state (the symbols are those
of reference.py; l and s are places in a tile, n channels):

    M[l, s] = beta[l] sum over n of k[l, n] k[s, n] exp(G[l, n] - G[s, n])  for s < l, else 0
    P[l, s] =         sum over n of q[l, n] k[s, n] exp(G[l, n] - G[s, n])  for s <= l, else 0

and what the walk multiplies states with: exp(G) q, exp(G) k and exp(G[last] - G) k.

Sums of pairs are products of matrices if the decay between two tokens is one of two factors, from l
to some place and from there to s. Where a tile forgets little, its middle is that place for all
pairs: a factor is 2^100 at most and the other one as small. That is the first kernel. It leaves
tiles that forget more to the second one: there the pairs on both sides of the middle are computed
so, with factors of at most 1, and then each half like a tile of its own, down to where it forgets
little, or is a single token. So nothing overflows whatever the decays are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import gates
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import load_keys, of_keys, store_keys
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare import halves, tile_at
from megatron_hybrid.kernels.launching import launched

LARGEST = tl.constexpr(100.0)  # of log2 of a factor

_kernel = launched(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["cu_chunks_ptr"])


@_kernel
def prepare_channels_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr,
    r_ptr, weights_ptr, beta_ptr, decays_ptr, scaled_ptr, left_ptr, cu_chunks_ptr, tokens,
    q_row, k_row, a_row, b_row, scale,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of a tile and a head: M, in float32, where R will lie, P, beta, and exp(G[last]) [n] at the
    tile's number; the three scaled matrices lie token by token, [3, tokens, HEADS, n]. left: how
    many tiles of heads are left to the next kernel, and their numbers, in any order."""
    head, tile = tl.program_id(0), tl.program_id(1)
    begin, length = tile_at(cu_chunks_ptr, tile, TILE, CHUNK)
    if length <= 0:
        return
    q, k = _load(q_ptr, k_ptr, begin, length, q_row, k_row, head, K_DIM, KEYS, TILE)
    beta, decay = _gates(
        a_ptr, b_ptr, rate_ptr, bias_ptr, begin, length, a_row, b_row, head, K_DIM, KEYS, GATE, TILE
    )
    up_to = tl.arange(0, TILE)[:, None]
    places = tl.arange(0, TILE)[None, :]
    ones = tl.full([TILE, TILE], 1.0, tl.float32)
    large, small = halves(decay) if SPLIT else (decay, decay)
    first = tl.where(places < TILE // 2, ones, 0.0)
    from_middle = _sums(tl.where(places <= up_to, ones, 0.0) - first, large, small, SPLIT)
    if tl.max(tl.max(tl.abs(from_middle), 1), 0) > LARGEST:
        place = tl.atomic_add(left_ptr, 1)
        tl.store(left_ptr + 1 + place, tile * HEADS + head)
        return
    q, k = _over_lengths(q, k, scale)
    kind = q_ptr.dtype.element_ty
    grown = tl.exp2(from_middle)
    grown_q = grown * q
    grown_k = grown * k
    shrunk = tl.exp2(-from_middle) * k
    qk, kk = _pairs(grown_q, grown_k, shrunk, kind)
    _store_pairs(
        r_ptr, weights_ptr, beta_ptr, qk, kk, beta, begin, length, tokens, head, TILE, SPLIT
    )
    half = tl.arange(0, 16)[:, None]  # of the tile: the first two rows of a product, which has 16
    halves_of = tl.where(places // (TILE // 2) == half, 1.0, 0.0)
    sums = _sums(halves_of, large, small, SPLIT)
    to_middle = tl.exp2(tl.sum(tl.where(half == 0, sums, 0.0), 0))
    to_last = tl.exp2(tl.sum(tl.where(half == 1, sums, 0.0), 0))
    _store_decays(decays_ptr, to_middle * to_last, tile, head, HEADS, K_DIM, KEYS)
    to_middle = to_middle[None, :]
    to_last = to_last[None, :]
    _store_scaled(
        scaled_ptr, to_middle * grown_q, to_middle * grown_k, to_last * shrunk,
        begin, length, tokens, head, kind, HEADS, K_DIM, KEYS, TILE,
    )  # fmt: skip


@_kernel
def prepare_left_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr,
    r_ptr, weights_ptr, beta_ptr, decays_ptr, scaled_ptr, left_ptr, cu_chunks_ptr, tokens,
    q_row, k_row, a_row, b_row, scale,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The same of the tiles that the first one has left, by any number of programs."""
    count = tl.load(left_ptr)
    for place in range(tl.program_id(0), count, tl.num_programs(0)):
        number = tl.load(left_ptr + 1 + place)
        tile, head = number // HEADS, number % HEADS
        begin, length = tile_at(cu_chunks_ptr, tile, TILE, CHUNK)
        beta, decay = _gates(
            a_ptr, b_ptr, rate_ptr, bias_ptr, begin, length, a_row, b_row, head, K_DIM, KEYS, GATE,
            TILE,
        )  # fmt: skip
        cs = tl.cumsum(decay, 0)
        q, k = _load(q_ptr, k_ptr, begin, length, q_row, k_row, head, K_DIM, KEYS, TILE)
        q, k = _over_lengths(q, k, scale)
        kind = q_ptr.dtype.element_ty
        qk, kk = pairs_by_halves(cs, q, k, kind, TILE, False)
        _store_pairs(
            r_ptr, weights_ptr, beta_ptr, qk, kk, beta, begin, length, tokens, head, TILE, SPLIT
        )
        last = tl.sum(decay, 0)
        _store_decays(decays_ptr, tl.exp2(last), tile, head, HEADS, K_DIM, KEYS)
        start = tl.exp2(cs)
        _store_scaled(
            scaled_ptr, start * q, start * k, tl.exp2(last[None, :] - cs) * k,
            begin, length, tokens, head, kind, HEADS, K_DIM, KEYS, TILE,
        )  # fmt: skip


@triton.jit
def pairs_by_halves(cs, q, k, kind: tl.constexpr, TILE: tl.constexpr, IN_ORDER: tl.constexpr):
    """_pairs of queries and keys [places, n] with the decays between them, whatever these are.
    IN_ORDER: a pair's bits do not depend on the places behind it: halves go down to single ones."""
    places = tl.arange(0, TILE)
    on_diagonal = places[:, None] == places[None, :]
    qk = tl.where(on_diagonal, tl.sum(q * k, 1)[:, None], 0.0)
    kk = tl.zeros([TILE, TILE], tl.float32)
    block = tl.full([], TILE, tl.int32)  # places that follow one another
    while block > 1:
        half = block // 2
        at_middle = places // block * block + half - 1
        from_middle = cs - tl.gather(cs, tl.broadcast_to(at_middle[:, None], cs.shape), 0)
        same = places[:, None] // block == places[None, :] // block
        grown = tl.exp2(tl.minimum(from_middle, LARGEST))
        shrunk = tl.exp2(tl.minimum(-from_middle, LARGEST)) * k
        new_qk, new_kk = _pairs(grown * q, grown * k, shrunk, kind)
        is_small = tl.max(tl.max(tl.abs(from_middle), 1), 0) <= LARGEST
        if is_small & (not IN_ORDER):  # all pairs of a block
            block = tl.full([], 1, tl.int32)
        else:  # those on both sides of its middle
            same &= (places % block >= half)[:, None] & (places % block < half)[None, :]
            block = half
        qk = tl.where(same, new_qk, qk)
        kk = tl.where(same, new_kk, kk)
    return qk, kk


@triton.jit
def _gates(
    a_ptr, b_ptr, rate_ptr, bias_ptr, begin, length, a_row, b_row, head,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """beta [places], and log2(e) * g [places, n]."""
    places = tl.arange(0, TILE)
    valid = places < length
    n = tl.arange(0, KEYS)
    has_key = of_keys(valid[:, None], n[None, :], K_DIM, KEYS)
    in_head = head * K_DIM + n
    a_ptr += begin * a_row
    a = tl.load(a_ptr + places[:, None] * a_row + in_head[None, :], has_key, 0.0)
    b = tl.load(b_ptr + begin * b_row + head + places * b_row, valid, 0.0)
    bias = load_keys(bias_ptr + in_head, n, K_DIM, KEYS)[None, :]
    decay, beta = gates(a, b, tl.load(rate_ptr + head), bias, GATE)
    return beta, tl.where(has_key, decay, 0.0)


@triton.jit
def _sums(of, large, small, SPLIT: tl.constexpr):
    """Sums over places s of `of` [places, s], whose numbers are 1, 0 and -1, times decays [s, n]: a
    product, so that every place has its own without going from row to row. SPLIT: of decays that
    are rounded to 16 bits behind their first one, halves of which are given."""
    if SPLIT:
        of = of.to(tl.bfloat16)
        sums = tl.dot(of, large, tl.dot(of, small))
    else:
        sums = tl.dot(of, large, input_precision="ieee")
    return sums


@triton.jit
def _load(
    q_ptr, k_ptr, begin, length, q_row, k_row, head,
    K_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """q and k [places, n] as they come."""
    places = tl.arange(0, TILE)
    n = tl.arange(0, KEYS)
    has_key = of_keys((places < length)[:, None], n[None, :], K_DIM, KEYS)
    in_head = (head * K_DIM + n)[None, :]
    q_ptr += begin * q_row
    k_ptr += begin * k_row
    q = tl.load(q_ptr + places[:, None] * q_row + in_head, has_key, 0.0)
    k = tl.load(k_ptr + places[:, None] * k_row + in_head, has_key, 0.0)
    return q, k


@triton.jit
def _over_lengths(q, k, scale):
    """q and k in float32 over their lengths, q times `scale`."""
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + EPS) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
    return q, k


@triton.jit
def _pairs(q, k, other, kind: tl.constexpr):
    """Products of queries and of keys with other keys, [places, n] each."""
    other = tl.trans(other.to(kind))
    qk = tl.dot(q.to(kind), other, input_precision="ieee")
    return qk, tl.dot(k.to(kind), other, input_precision="ieee")


@triton.jit
def _store_decays(
    decays_ptr, decays, tile, head,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """exp(G[last]) [n] of a tile."""
    n = tl.arange(0, KEYS)
    at = decays_ptr + (tl.cast(tile, tl.int64) * HEADS + head) * K_DIM + n
    store_keys(at, decays, n, K_DIM, KEYS)


@triton.jit
def _store_scaled(
    scaled_ptr, q, k, added, begin, length, tokens, head,
    kind: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """exp(G) q, exp(G) k and exp(G[last] - G) k."""
    places = tl.arange(0, TILE)
    n = tl.arange(0, KEYS)
    has_key = of_keys((places < length)[:, None], n[None, :], K_DIM, KEYS)
    scaled_ptr += begin * (HEADS * K_DIM)
    size = tl.cast(tokens, tl.int64) * (HEADS * K_DIM)  # of a matrix of all tokens
    at = places[:, None] * (HEADS * K_DIM) + (head * K_DIM + n)[None, :]
    tl.store(scaled_ptr + at, q.to(kind), has_key)
    tl.store(scaled_ptr + size + at, k.to(kind), has_key)
    tl.store(scaled_ptr + 2 * size + at, added.to(kind), has_key)


@triton.jit
def _store_pairs(
    r_ptr, weights_ptr, beta_ptr, qk, kk, beta, begin, length, tokens, head,
    TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    places = tl.arange(0, TILE)
    valid = places < length
    row = head * tl.cast(tokens, tl.int64) + begin
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    tl.store(beta_ptr + row + places, beta, valid)
    at = places[:, None] * TILE + places[None, :]
    qk = tl.where(places[:, None] >= places[None, :], qk, 0.0)
    kind = weights_ptr.dtype.element_ty
    tl.store(weights_ptr + row * TILE + at, qk.to(kind), valid[:, None])
    m_ptr = (r_ptr + row * R_ROW).to(tl.pointer_type(tl.float32))
    kk = tl.where(places[:, None] > places[None, :], kk, 0.0)
    # Of M the blocks of 16 on the diagonal and below it are read.
    is_read = (places[:, None] // 16 >= places[None, :] // 16) & valid[:, None]
    tl.store(m_ptr + at, kk * beta[:, None], is_read)
