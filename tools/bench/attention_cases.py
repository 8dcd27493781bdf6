"""Attention and what prepares it, for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from bench.cases import BLOCK, EPS, Bench, Calls, Case
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.kernels.protocols import HeadNorms
from megatron_hybrid.layers.rope import RopeConfig, inverse_frequencies

# So many sequences, of so many queries each, on so many keys.
PREFILLS = [
    *[(1, 8192, 8192), (64, 128, 128), (1, 8192, 65536), (1, 2048, 32768)],
    *[(8, 256, 16384), (1, 32, 65536)],
]
TINY_PREFILLS = [(1, 96, 96), (2, 32, 300)]


def attention_cases(bench: Bench) -> Iterator[Case]:
    if bench.model.attention is None:
        return
    kv, long = (70, 300) if bench.tiny else (1024, 65536)
    for batch in bench.batches():
        yield _decode_attention(bench, batch, kv)
    yield _decode_attention(bench, 1, long)
    for batch in bench.batches():
        yield _decode_attention_fp8(bench, batch, kv if bench.tiny else 8192)
    yield _decode_attention_fp8(bench, 1, long)
    for sequences, queries, keys in TINY_PREFILLS if bench.tiny else PREFILLS:
        yield _prefill_attention(bench, sequences, queries, keys)
    for rows in bench.rows():
        yield _append(bench, rows)
    for rows in bench.rows():
        yield _rope(bench, rows)


def _decode_attention(bench: Bench, batch: int, kv: int) -> Case:
    attention, shape = bench.kernels.attention, bench.attention_shape()
    paged = bench.paged([1] * batch, [kv] * batch)
    plan = attention.plan(paged, shape)
    blocks = batch * -(-kv // BLOCK)

    def make() -> Calls:
        query = bench.normal(batch, shape.heads, shape.head_dim)
        cache = bench.kv_cache(blocks)
        dense = [
            values[1:].reshape(batch, -1, shape.kv_heads, shape.head_dim)[:, :kv]
            for values in (cache.key, cache.value)
        ]
        key, value = (values.transpose(1, 2) for values in dense)
        calls: Calls = {
            "ours": lambda: attention.attend(query, cache, plan),
            "SDPA": lambda: F.scaled_dot_product_attention(
                query[:, :, None], key, value, scale=shape.scale, enable_gqa=True
            ),
        }
        if bench.kernels.name == "gpu":
            from megatron_hybrid.kernels.paged_attention.triton import TritonAttention

            own = TritonAttention()
            planned = own.plan(paged, shape)
            calls["our own kernel"] = lambda: own.attend(query, cache, planned)
        return calls

    moved = batch * kv * shape.kv_heads * shape.head_dim * 2 * bench.item
    flops = 4 * batch * kv * shape.heads * shape.head_dim
    return Case("attention decode", f"B={batch} kv {kv}", moved, make, flops)


def _decode_attention_fp8(bench: Bench, batch: int, kv: int) -> Case:
    """Over keys and values in FP8, beside the same in the model's type."""
    attention, paged = bench.kernels.attention, bench.paged([1] * batch, [kv] * batch)

    def make() -> Calls:
        query = bench.normal(batch, bench.attention().num_heads, bench.attention().head_dim)
        calls: Calls = {}
        for label, dtype in (("ours", FP8), ("ours, not in FP8", bench.dtype)):
            plan = attention.plan(paged, bench.attention_shape(dtype))
            cache = bench.kv_cache(batch * -(-kv // BLOCK), dtype)
            calls[label] = partial(attention.attend, query, cache, plan)
        return calls

    shape = bench.attention_shape(FP8)
    moved = batch * kv * shape.kv_heads * shape.head_dim * 2
    flops = 4 * batch * kv * shape.heads * shape.head_dim
    return Case("attention decode", f"B={batch} kv {kv} FP8", moved, make, flops)


def _prefill_attention(bench: Bench, sequences: int, queries: int, keys: int) -> Case:
    """So many sequences alike, as a step outside of CUDA graphs computes them."""
    attention, shape = bench.kernels.attention, bench.attention_shape()
    plan = attention.plan(bench.paged([queries] * sequences, [keys] * sequences), shape)

    def make() -> Calls:
        query = bench.normal(sequences * queries, shape.heads, shape.head_dim)
        cache = bench.kv_cache(sequences * -(-keys // BLOCK))
        calls: Calls = {"ours": lambda: attention.attend(query, cache, plan)}
        if queries == keys:
            key, value = (
                values[1:].flatten(0, 1)[: sequences * keys]
                .unflatten(0, (sequences, keys)).transpose(1, 2)
                for values in (cache.key, cache.value)
            )  # fmt: skip
            calls["SDPA"] = lambda: F.scaled_dot_product_attention(
                query.unflatten(0, (sequences, queries)).transpose(1, 2), key, value,
                is_causal=True, scale=shape.scale, enable_gqa=True,
            )  # fmt: skip
        return calls

    seen = sequences * queries * (keys - queries / 2)  # pairs of a query and a key that it sees
    width = shape.head_dim * bench.item
    moved = 2 * sequences * (keys * shape.kv_heads + queries * shape.heads) * width
    flops = 4 * seen * shape.heads * shape.head_dim
    size = f"{queries} on {keys}"
    if sequences > 1:
        size = f"{sequences} x {size}"
    return Case("attention prefill", size, moved, make, flops)


def _append(bench: Bench, tokens: int) -> Case:
    attention, shape = bench.kernels.attention, bench.attention_shape()
    lengths = [tokens] if tokens > 1 else [1]
    paged = bench.paged(lengths, lengths)
    plan = attention.plan(paged, shape)
    blocks = -(-tokens // BLOCK)
    heads = [shape.heads + shape.kv_heads, shape.kv_heads]

    def make() -> Calls:
        qkv = bench.normal(tokens, sum(heads), shape.head_dim)
        qk, value = qkv.split(heads, dim=1)
        key, cache = qk[:, shape.heads :], bench.kv_cache(blocks)
        return {"ours": lambda: attention.append(key, value, cache, plan)}

    moved = 4 * tokens * shape.kv_heads * shape.head_dim * bench.item
    return Case("append KV", f"{tokens} tokens", moved, make)


def _rope(bench: Bench, tokens: int) -> Case:
    """Also with norms, where heads have them; the rotation of models without one would be
    Llama's."""
    attention, shape = bench.kernels.attention, bench.attention_shape()
    given = bench.model.rope or RopeConfig(10000.0, shape.head_dim)
    config = replace(given, rotary_dim=min(given.rotary_dim, shape.head_dim))
    frequencies = inverse_frequencies(config).to(bench.device)
    plan = bench.kernels.rope.plan(bench.integers(range(tokens)), frequencies, bench.dtype)
    paged = attention.plan(bench.paged([tokens], [tokens]), shape)
    norms = None
    if bench.attention().qk_norm:
        kind = torch.float32 if bench.attention().zero_centered_norm else bench.dtype
        query, key = bench.normal(2, shape.head_dim, dtype=kind)
        norms = HeadNorms(query, key, EPS)
    heads = shape.heads + 2 * shape.kv_heads

    def make() -> Calls:
        qkv = bench.normal(tokens, heads, shape.head_dim)
        cache = bench.kv_cache(-(-tokens // BLOCK))
        return {"ours": lambda: bench.kernels.rope.prepare(qkv, norms, plan, cache, paged)}

    moved = 2 * tokens * heads * shape.head_dim * bench.item
    return Case("rope", f"{tokens} tokens{', norms' if norms else ''}", moved, make)
