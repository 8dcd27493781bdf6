"""Attention with a bias by distance, for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.cases import BLOCK, Bench, Calls, Case
from bench.indexed_cases import PREFILLS, TINY_PREFILLS
from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.layers.inputs import KVSpec, allocate_caches
from megatron_hybrid.layers.relative_attention import RelativeAttentionConfig


def relative_cases(bench: Bench) -> Iterator[Case]:
    """Beside the same without a bias; of a model's layers those that see all."""
    for config in (bench.model.attention, *bench.model.others.values()):
        if isinstance(config, RelativeAttentionConfig) and not config.window:
            kv, long = (70, 300) if bench.tiny else (8192, 65536)
            for batch, keys in [*((batch, kv) for batch in bench.batches()), (1, long)]:
                yield _case(bench, config, batch, 1, keys)
            for queries, keys in TINY_PREFILLS if bench.tiny else PREFILLS:
                yield _case(bench, config, 1, queries, keys)
            return


def _case(
    bench: Bench, config: RelativeAttentionConfig, sequences: int, queries: int, keys: int
) -> Case:
    """So many sequences alike. Operations are those of attention alone."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    plain = AttentionShape(heads, kv_heads, dim, config.scale, BLOCK, bench.dtype, bench.dtype)
    attention, paged = (
        bench.kernels.attention,
        bench.paged([queries] * sequences, [keys] * sequences),
    )
    tokens, blocks = sequences * queries, sequences * -(-keys // BLOCK)

    def make() -> Calls:
        spec = KVSpec(kv_heads, dim, bench.dtype)
        cache = allocate_caches({0: spec}, {}, blocks + 1, BLOCK, 1, bench.device).kv[0]
        for values in cache.tensors:
            values.copy_(bench.normal(*values.shape))
        query = bench.normal(tokens, heads, dim)
        weights = bench.normal(tokens, heads, config.profiles)
        bias = RelativeBias(weights, bench.normal(config.profiles, config.extent))
        plan = attention.plan(paged, replace(plain, relative=True))
        return {
            "ours": partial(attention.attend, query, cache, plan, bias),
            "without": partial(attention.attend, query, cache, attention.plan(paged, plain)),
        }

    pairs = tokens * (keys - queries / 2)
    moved = 2 * sequences * (keys * kv_heads + queries * heads) * dim * bench.item
    size = f"B={sequences} kv {keys}" if queries == 1 else f"{queries} on {keys}"
    return Case("bias by distance", size, moved, make, 4 * pairs * heads * dim)
