"""What comes before and behind latent attention, in Triton: latents normed, rotated and stored, and
the products of each head with its own weights.

A program computes one token, or one tile of one head's, in an order that does not depend on how
many there are: a token's bits do not depend on what it is batched with.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8_MAX, KVCache
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.norm.triton import inverse_rms, scaled
from megatron_hybrid.kernels.paged_attention.triton import kept


def store_latents(
    query: Tensor,
    latent: Tensor,
    norm: LatentNorm,
    table: Tensor | None,
    interleaved: bool,
    cache: KVCache,
    kv_slot: Tensor,
) -> None:
    """LatentAttention.prepare; table: of rope/triton.py."""
    tokens, heads, width = query.shape
    size, turned = len(norm.weight), latent.shape[1] - len(norm.weight)
    if not tokens:
        return
    block = next_power_of_2(size)
    _store_kernel[(tokens,)](
        query, latent, norm.weight, table, cache.key, kv_slot,
        *query.stride()[:2], latent.stride(0), norm.eps, cache.k_scale,
        heads, width - turned, size, turned, INTERLEAVED=interleaved,
        LIMIT=FP8_MAX if cache.is_fp8 else 0.0, HEADS=next_power_of_2(heads),
        BLOCK=block, HALF=next_power_of_2(max(turned // 2, 1)),
        num_warps=min(max(block // 128, 1), 8), **OPTIONS,
    )  # fmt: skip


@launched
def _store_kernel(
    query, latent, weight, table, cache, kv_slot,
    query_stride, query_head_stride, latent_stride, eps, scale,
    heads: tl.constexpr, nope: tl.constexpr, size: tl.constexpr, turned: tl.constexpr,
    INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """One token. LIMIT: the largest number that can be stored; 0: what comes is stored."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)[None, :]
    weights = tl.load(weight + dim, mask=dim < size, other=0)
    wait_for_inputs()
    let_next_start()
    slot = tl.load(kv_slot + token).to(tl.int64) * (size + turned)
    source = latent + token * latent_stride
    numbers = tl.load(source + dim, mask=dim < size, other=0)
    inverse = inverse_rms(numbers, size, eps)
    normed = scaled(numbers.to(weights.dtype), inverse, weights).to(numbers.dtype)
    if LIMIT > 0:
        normed = kept(normed, scale, LIMIT)
    tl.store(cache + slot + dim, normed.to(cache.dtype.element_ty), mask=dim < size)

    # Pairs of numbers that turn together: each stays where it was.
    half: tl.constexpr = turned // 2
    pair = tl.arange(0, HALF)[None, :]
    first, second = pair, pair + half
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    inside = pair < half
    a = tl.load(source + size + first, mask=inside, other=0)
    b = tl.load(source + size + second, mask=inside, other=0)
    if table is not None:
        cosine = tl.load(table + token * turned + pair, mask=inside, other=1.0)
        sine = tl.load(table + token * turned + half + pair, mask=inside, other=0.0)
        kind = a.dtype
        x, y = a.to(tl.float32), b.to(tl.float32)
        a = (x * cosine - y * sine).to(kind)
        b = (y * cosine + x * sine).to(kind)
        head = tl.arange(0, HEADS)[:, None]
        own = (head < heads) & inside
        place = query + token * query_stride + head * query_head_stride + nope
        x = tl.load(place + first, mask=own, other=0).to(tl.float32)
        y = tl.load(place + second, mask=own, other=0).to(tl.float32)
        tl.store(place + first, (x * cosine - y * sine).to(kind), mask=own)
        tl.store(place + second, (y * cosine + x * sine).to(kind), mask=own)
    if LIMIT > 0:
        a, b = kept(a, scale, LIMIT), kept(b, scale, LIMIT)
    tl.store(cache + slot + size + first, a.to(cache.dtype.element_ty), mask=inside)
    tl.store(cache + slot + size + second, b.to(cache.dtype.element_ty), mask=inside)


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, K] (tokens and heads may be strided), weight [heads, N, K], strided in any
    way -> [tokens, heads, N]."""
    tokens, heads, depth = x.shape
    outputs = weight.shape[1]
    y = torch.empty(tokens, heads, outputs, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    rows = 16
    if x.dtype != torch.float32:  # of which a tile's sums may be made otherwise in another one
        rows = min(max(next_power_of_2(tokens), 16), 128)
    columns = min(max(next_power_of_2(outputs), 16), 128 if rows >= 64 else 64)
    _by_head_kernel[(cdiv(tokens, rows), cdiv(outputs, columns), heads)](
        x, weight, y, tokens, *x.stride()[:2], *weight.stride(), heads, outputs, depth,
        ROWS=rows, COLUMNS=columns, DEPTH=min(max(next_power_of_2(depth), 16), 64),
        num_warps=8 if rows == 128 else 4, num_stages=3, **OPTIONS,
    )  # fmt: skip
    return y


@launched(do_not_specialize=["tokens"])
def _by_head_kernel(
    x, weight, y, tokens, x_stride, x_head_stride, head_stride, row_stride, column_stride,
    heads: tl.constexpr, outputs: tl.constexpr, depth: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head, and some of its outputs, each a sum in the order of x."""
    head = tl.program_id(2)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    wait_for_inputs()
    let_next_start()
    of_x = x + (token * x_stride + head * x_head_stride)[:, None] + k[None, :]
    of_weight = weight + head * head_stride + k[:, None] * column_stride + column * row_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        inside = first + k < depth
        a = tl.load(of_x + first, mask=(token < tokens)[:, None] & inside[None, :], other=0.0)
        there = inside[:, None] & (column < outputs)[None, :]
        b = tl.load(of_weight + first * column_stride, mask=there, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = y + ((token * heads + head) * outputs)[:, None] + column[None, :]
    written = (token < tokens)[:, None] & (column < outputs)[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=written)
