"""What the Replay of Kimi delta attention in Triton has of its own; see triton_replay.py."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.gated_delta_rule.triton_decode import EPS
from megatron_hybrid.kernels.gated_delta_rule.triton_gates import gates
from megatron_hybrid.kernels.gated_delta_rule.triton_keys import load_keys, of_keys, store_keys
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare import inverse, store_r
from megatron_hybrid.kernels.gated_delta_rule.triton_prepare_channels import pairs_by_halves


@triton.jit
def prepare_chunk(
    q, k, a_ptr, b_ptr, rate_ptr, bias_ptr, ring_a_ptr, ring_b_ptr,
    r_ptr, weights_ptr, scaled_ptr, decays_ptr, own, old, row, in_ring, a_row, b_row, scale,
    head, here, n, HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """R beta, P, the three scaled matrices of the walk, and exp(G[last]), of a head of a chunk, q
    and k [places, n]: the here-th of all. own, old: the places whose token the call has, in its
    rows, and those whose token the ring has."""
    places = tl.arange(0, TILE)
    in_head = (head * K_DIM + n)[None, :]
    has_own = of_keys(own[:, None], n[None, :], K_DIM, KEYS)
    has_old = of_keys(old[:, None], n[None, :], K_DIM, KEYS)
    own_a = tl.load(a_ptr + row[:, None] * a_row + in_head, has_own, 0.0)
    old_a = tl.load(ring_a_ptr + in_ring[:, None] * (HEADS * K_DIM) + in_head, has_old, 0.0)
    own_b = tl.load(b_ptr + row * b_row + head, own, 0.0)
    old_b = tl.load(ring_b_ptr + in_ring * HEADS + head, old, 0.0)
    bias = load_keys(bias_ptr + head * K_DIM + n, n, K_DIM, KEYS)[None, :]
    rate = tl.load(rate_ptr + head)
    a = tl.where(own[:, None], own_a, old_a)
    decay, beta = gates(a, tl.where(own, own_b, old_b), rate, bias, GATE)
    decay = tl.where(has_own | has_old, decay, 0.0)
    beta = tl.where(own | old, beta, 0.0)
    cs = tl.cumsum(decay, 0)  # log2(e) * G
    kind = q.dtype
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + EPS) * scale)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
    qk, kk = pairs_by_halves(cs, q, k, kind, TILE, True)

    last = tl.sum(decay, 0)
    start = tl.exp2(cs)
    store_keys(decays_ptr + here * K_DIM + n, tl.exp2(last), n, K_DIM, KEYS)
    to_scaled = scaled_ptr + here * (3 * TILE * K_DIM) + places[:, None] * K_DIM + n[None, :]
    SIZE: tl.constexpr = TILE * K_DIM
    added = tl.exp2(last[None, :] - cs) * k
    store_keys(to_scaled, (start * q).to(kind), n[None, :], K_DIM, KEYS)
    store_keys(to_scaled + SIZE, (start * k).to(kind), n[None, :], K_DIM, KEYS)
    store_keys(to_scaled + 2 * SIZE, added.to(kind), n[None, :], K_DIM, KEYS)

    qk = tl.where(places[:, None] >= places[None, :], qk, 0.0)
    to_weights = weights_ptr + here * (TILE * TILE)
    tl.store(to_weights + places[:, None] * TILE + places[None, :], qk.to(kind))
    m = tl.where(places[:, None] > places[None, :], kk * beta[:, None], 0.0)
    r = tl.reshape(inverse(tl.reshape(m, [1, TILE, TILE]), SPLIT), [TILE, TILE])
    R_ROW: tl.constexpr = TILE * 2 if SPLIT else TILE
    to_r = r_ptr + here * (TILE * R_ROW) + places[:, None] * R_ROW + places[None, :]
    store_r(to_r, r * beta[None, :], places[:, None] >= 0, TILE, SPLIT)


@triton.jit
def load_scaled(
    scaled_ptr, decays_ptr, here, n, K_DIM: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """exp(G) q, exp(G) k and exp(G[last] - G) k [places, n], and exp(G[last]) [1, n]."""
    SIZE: tl.constexpr = TILE * K_DIM
    places = tl.arange(0, TILE)
    at = scaled_ptr + here * (3 * SIZE) + places[:, None] * K_DIM + n[None, :]
    q = load_keys(at, n[None, :], K_DIM, KEYS)
    k = load_keys(at + SIZE, n[None, :], K_DIM, KEYS)
    added = load_keys(at + 2 * SIZE, n[None, :], K_DIM, KEYS)
    return q, k, added, load_keys(decays_ptr + here * K_DIM + n, n, K_DIM, KEYS)[None, :]


@triton.jit
def keep_decays(
    a_ptr, a_row, ring_a_ptr, row, in_ring, is_own, head, n,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, KEYS: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A head's decays of rows of the call, as they came, to places of the ring."""
    if BY_CHANNEL:
        in_head = (head * K_DIM + n)[None, :]
        kept = of_keys(is_own[:, None], n[None, :], K_DIM, KEYS)
        a = tl.load(a_ptr + row[:, None] * a_row + in_head, kept, 0.0)
        tl.store(ring_a_ptr + in_ring[:, None] * (HEADS * K_DIM) + in_head, a, kept)
    else:
        a = tl.load(a_ptr + row * a_row + head, is_own, 0.0)
        tl.store(ring_a_ptr + in_ring * HEADS + head, a, is_own)
