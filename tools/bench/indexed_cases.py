"""Attention with an index, for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from bench.cases import BLOCK, Bench, Calls, Case
from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from megatron_hybrid.kernels.protocols import Plan
from megatron_hybrid.layers.indexed_attention import IndexedAttentionConfig
from megatron_hybrid.layers.indexed_latent_attention import IndexedLatentConfig
from megatron_hybrid.layers.inputs import KVSpec, allocate_caches

PREFILLS = [(8192, 8192), (2048, 32768), (32, 65536)]  # queries of a sequence, on so many keys
TINY_PREFILLS = [(96, 96), (32, 300)]
_ALIKE = 64  # tokens side by side


def indexed_cases(bench: Bench) -> Iterator[Case]:
    """What is chosen, and attention to that, beside attention to all tokens."""
    for config in bench.model.others.values():
        if isinstance(config, IndexedAttentionConfig) or (
            isinstance(config, IndexedLatentConfig) and not config.shared
        ):
            indexed = _Indexed(bench, config)
            for batch in bench.batches():
                yield from indexed.cases(batch, 1, 70 if bench.tiny else 8192)
            yield from indexed.cases(1, 1, 300 if bench.tiny else 65536)
            for queries, keys in TINY_PREFILLS if bench.tiny else PREFILLS:
                yield from indexed.cases(1, queries, keys)
            return


class _Indexed:
    def __init__(self, bench: Bench, config: IndexedAttentionConfig | IndexedLatentConfig) -> None:
        self.bench, self.index = bench, config.index
        self.latent = config if isinstance(config, IndexedLatentConfig) else None
        if isinstance(config, IndexedLatentConfig):
            heads = config.num_heads, 1, config.cached_dim
            self.entry = 2 * config.index.dim
            value_dim, self.width = config.kv_lora_rank, config.cached_dim
        else:
            heads = config.num_heads, config.num_kv_heads, config.head_dim
            self.entry = config.index.dim
            value_dim, self.width = None, 2 * config.num_kv_heads * config.head_dim
        self.shape = AttentionShape(
            *heads, config.scale, BLOCK, bench.dtype, bench.dtype, value_dim=value_dim,
            index=config.index,
        )  # fmt: skip

    def cases(self, sequences: int, queries: int, keys: int) -> Iterator[Case]:
        """So many sequences alike; floors of what has to be read of each token's choice if no two
        share it."""
        bench, index = self.bench, self.index
        paged = bench.paged([queries] * sequences, [keys] * sequences)
        size = f"B={sequences} kv {keys}" if queries == 1 else f"{queries} on {keys}"
        groups = (keys - queries / 2) / index.group
        tokens = sequences * queries
        moved = sequences * keys / index.group * index.dim * bench.item
        flops = 2 * tokens * groups * index.heads * index.dim
        make = partial(self._select, tokens, paged, sequences * -(-keys // BLOCK))
        yield Case("index, choice", size, moved, make, flops)
        seen = min(keys, index.budget)
        moved = sequences * min(keys, queries * seen) * self.width * bench.item
        numbers = self.shape.head_dim + (self.shape.value_dim or self.shape.head_dim)
        flops = 2 * tokens * seen * self.shape.heads * numbers
        make = partial(self._attend, tokens, paged, sequences * -(-keys // BLOCK))
        yield Case("index, attention", size, moved, make, flops)
        if queries > 1:
            yield Case("index, attention, alike", size, moved, partial(make, alike=True), flops)

    def _select(self, tokens: int, paged: PagedSequences, blocks: int) -> Calls:
        indexed, index = self.bench.kernels.indexed_attention, self.index
        cache, plan = self._cache(blocks), self._plan(paged)
        query = self.bench.normal(tokens, index.heads, index.dim)
        weights = None if self.latent is None else self.bench.normal(tokens, index.heads).float()
        return {"ours": lambda: indexed.select(query, weights, cache, plan)}

    def _attend(
        self, tokens: int, paged: PagedSequences, blocks: int, alike: bool = False
    ) -> Calls:
        """`alike`: neighbours choose mostly the same, else each as it happens."""
        bench, kernels = self.bench, self.bench.kernels
        cache, plan = self._cache(blocks), self._plan(paged)
        index = bench.normal(tokens, self.index.heads, self.index.dim)
        if alike:
            own = bench.normal(-(-tokens // _ALIKE), *index.shape[1:])
            index = 0.9 * own.repeat_interleave(_ALIKE, 0)[:tokens] + 0.19**0.5 * index
        weights = None if self.latent is None else bench.normal(tokens, self.index.heads).float()
        kernels.indexed_attention.select(index, weights, cache, plan)
        if self.latent is None:
            query = bench.normal(tokens, self.shape.heads, self.shape.head_dim)
            return {
                "ours": lambda: kernels.indexed_attention.attend(query, cache, plan),
                "to all tokens": lambda: kernels.attention.attend(query, cache, plan.every),
            }
        config = self.latent
        query = bench.normal(tokens, config.num_heads, config.query_dim)
        rows = config.qk_nope_head_dim + config.v_head_dim
        both: Tensor = bench.normal(config.num_heads, rows, config.kv_lora_rank)
        parts = LatentWeights(both, config.qk_nope_head_dim)
        attend, every = kernels.indexed_attention.attend_latents, kernels.latent_attention.attend
        return {
            "ours": lambda: attend(query, parts, cache, plan),
            "to all tokens": lambda: every(query, parts, cache, plan.every),
        }

    def _plan(self, paged: PagedSequences) -> Plan:
        kernels = self.bench.kernels
        of_all = kernels.attention if self.latent is None else kernels.latent_attention
        every = of_all.plan(paged, replace(self.shape, index=None))
        return kernels.indexed_attention.plan(paged, self.shape, every)

    def _cache(self, blocks: int) -> KVCache:
        bench, shape = self.bench, self.shape
        spec = KVSpec(
            shape.kv_heads, shape.head_dim, bench.dtype,
            value_dim=None if self.latent is None else 0,
            index_dim=self.entry, index_dtype=bench.dtype, index_group=self.index.group,
        )  # fmt: skip
        cache = allocate_caches({0: spec}, {}, blocks + 1, BLOCK, 1, bench.device).kv[0]
        for values in (cache.key, cache.value, cache.index):
            if values is not None and values.numel():
                values.copy_(bench.normal(*values.shape))
        if self.latent is not None:
            cache = replace(cache, value=cache.key[..., : shape.value_dim])
        return cache
