"""Latent attention, for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.attention_cases import PREFILLS, TINY_PREFILLS
from bench.cases import BLOCK, EPS, Bench, Calls, Case
from megatron_hybrid.kernels.contract import FP8, AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from megatron_hybrid.layers.inputs import KVSpec, allocate_caches
from megatron_hybrid.layers.latent_attention import LatentAttentionConfig
from megatron_hybrid.layers.rope import RopeConfig, inverse_frequencies
from megatron_hybrid.models.config import LATENT_ATTENTION

DRAFTS = 4


def latent_cases(bench: Bench) -> Iterator[Case]:
    config = bench.model.others.get(LATENT_ATTENTION)
    if not isinstance(config, LatentAttentionConfig):
        return
    latent = _Latent(bench, config)
    kv, long = (70, 300) if bench.tiny else (1024, 65536)
    for batch in bench.batches():
        yield latent.decode(batch, kv)
    yield latent.decode(1, 8 * kv)
    yield latent.decode(1, long)
    for batch in bench.batches():
        yield latent.decode(batch, kv, queries=1 + DRAFTS)
    for batch in bench.batches():
        yield latent.decode(batch, kv if bench.tiny else 8192)
        yield latent.decode(batch, kv if bench.tiny else 8192, FP8)
    for sequences, queries, keys in TINY_PREFILLS if bench.tiny else PREFILLS:
        yield latent.prefill(sequences, queries, keys)
    for rows in bench.rows():
        yield latent.prepare(rows)


class _Latent:
    def __init__(self, bench: Bench, config: LatentAttentionConfig) -> None:
        self.bench, self.config = bench, config

    def decode(
        self, batch: int, kv: int, dtype: torch.dtype | None = None, queries: int = 1
    ) -> Case:
        """Of so many sequences alike. `dtype`: that latents are kept in; None: the model's."""
        bench, config = self.bench, self.config
        paged = bench.paged([queries] * batch, [kv] * batch, longest_run=queries)
        calls = partial(self._attend, batch * queries, paged, batch * -(-kv // BLOCK), dtype)
        item = bench.item if dtype is None else dtype.itemsize
        weights = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        moved = batch * kv * config.cached_dim * item + weights * config.kv_lora_rank * bench.item
        size = f"B={batch} kv {kv}{f' x {queries}' if queries > 1 else ''}"
        size += "" if dtype is None else " FP8"
        pairs = batch * queries * kv * config.num_heads
        flops = 2 * pairs * (config.cached_dim + config.kv_lora_rank)
        return Case("latent decode", size, moved, calls, flops)

    def prefill(self, sequences: int, queries: int, keys: int) -> Case:
        """So many sequences alike, as a step outside of CUDA graphs computes them; operations are
        those of heads' own keys and values, which are fewer than what our kernel does."""
        bench, config = self.bench, self.config
        paged = bench.paged([queries] * sequences, [keys] * sequences)
        tokens = sequences * queries

        def make() -> Calls:
            calls = self._attend(tokens, paged, sequences * -(-keys // BLOCK), None)
            if queries == keys:
                heads = sequences, queries, config.num_heads
                key = bench.normal(*heads, config.query_dim).transpose(1, 2)
                value = bench.normal(*heads, config.v_head_dim).transpose(1, 2)
                query = bench.normal(*heads, config.query_dim).transpose(1, 2)
                calls["SDPA of heads' keys and values"] = lambda: F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, scale=config.scale
                )
            return calls

        pairs = sequences * queries * (keys - queries / 2) * config.num_heads
        flops = 2 * pairs * (config.query_dim + config.v_head_dim)
        moved = sequences * keys * config.cached_dim * bench.item
        size = f"{queries} on {keys}"
        return Case(
            "latent prefill", f"{sequences} x {size}" if sequences > 1 else size, moved, make, flops
        )

    def prepare(self, tokens: int) -> Case:
        bench, config, latent = self.bench, self.config, self.bench.kernels.latent_attention
        plan = latent.plan(bench.paged([tokens], [tokens]), self._shape(None))
        rope = config.rope or RopeConfig(10000.0, config.qk_rope_head_dim)
        frequencies = inverse_frequencies(rope).to(bench.device)
        rotation = bench.kernels.rope.plan(bench.integers(range(tokens)), frequencies, bench.dtype)
        norm = LatentNorm(bench.normal(config.kv_lora_rank), EPS)

        def make() -> Calls:
            query = bench.normal(tokens, config.num_heads, config.query_dim)
            rows = bench.normal(tokens, config.cached_dim)
            cache = self._cache(-(-tokens // BLOCK), None)
            return {
                "ours": lambda: latent.prepare(
                    query, rows, norm, rotation, config.interleaved, cache, plan
                )
            }

        turned = config.num_heads * config.qk_rope_head_dim
        moved = 2 * tokens * (turned + config.cached_dim) * bench.item
        return Case("latent prepare", f"{tokens} tokens", moved, make)

    def _attend(
        self, tokens: int, paged: PagedSequences, blocks: int, dtype: torch.dtype | None
    ) -> Calls:
        bench, config, latent = self.bench, self.config, self.bench.kernels.latent_attention
        plan = latent.plan(paged, self._shape(dtype))
        query = bench.normal(tokens, config.num_heads, config.query_dim)
        rows = config.qk_nope_head_dim + config.v_head_dim
        both: Tensor = bench.normal(config.num_heads, rows, config.kv_lora_rank)
        weights = LatentWeights(both, config.qk_nope_head_dim)
        cache = self._cache(blocks, dtype)
        return {"ours": lambda: latent.attend(query, weights, cache, plan)}

    def _shape(self, dtype: torch.dtype | None) -> AttentionShape:
        bench, config = self.bench, self.config
        return AttentionShape(
            config.num_heads, 1, config.cached_dim, config.scale, BLOCK, bench.dtype,
            dtype or bench.dtype, value_dim=config.kv_lora_rank,
        )  # fmt: skip

    def _cache(self, blocks: int, dtype: torch.dtype | None) -> KVCache:
        bench, config = self.bench, self.config
        spec = KVSpec(1, config.cached_dim, dtype or bench.dtype, value_dim=0)
        key = allocate_caches({0: spec}, {}, blocks + 1, BLOCK, 1, bench.device).kv[0].key
        key.copy_(bench.normal(*key.shape))
        return KVCache(key, key[..., : config.kv_lora_rank])
