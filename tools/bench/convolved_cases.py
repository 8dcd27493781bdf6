"""The heads of convolved attention, for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator

from bench.cases import Bench, Calls, Case
from megatron_hybrid.kernels.convolved_heads import reference
from megatron_hybrid.kernels.convolved_heads.protocol import HeadTokens
from megatron_hybrid.layers.convolved_attention import ConvolvedAttentionConfig
from megatron_hybrid.models.config import CONVOLVED_ATTENTION


def convolved_cases(bench: Bench) -> Iterator[Case]:
    config = bench.model.others.get(CONVOLVED_ATTENTION)
    if isinstance(config, ConvolvedAttentionConfig):
        for rows in bench.rows():
            yield _mix(bench, config, rows)


def _mix(bench: Bench, config: ConvolvedAttentionConfig, tokens: int) -> Case:
    """As a layer calls it, beside the same in plain torch."""
    attention, taps = config.attention, config.grouped_width
    dim, kv_heads = attention.head_dim, attention.num_kv_heads
    heads = attention.num_heads + kv_heads

    def make() -> Calls:
        projected = bench.normal(tokens, (heads + kv_heads) * dim)
        newest, value = bench.normal(tokens, (heads + kv_heads) * dim).split(
            [heads * dim, kv_heads * dim], dim=1
        )
        older = [bench.normal(tokens, heads * dim) for _ in range(taps - 1)]
        of_tokens = HeadTokens(projected, (*older, newest), value)
        layer = bench.normal(heads, dim, taps * dim), bench.normal(heads, dim), kv_heads
        return {
            "ours": lambda: bench.kernels.convolved_heads.mix(of_tokens, *layer),
            "torch": lambda: reference.mix(of_tokens, *layer),
        }

    matrices = heads * dim * taps * dim
    moved = (tokens * dim * ((1 + taps) * heads + heads + 2 * kv_heads) + matrices) * bench.item
    flops = 2 * tokens * matrices
    return Case("convolved heads", f"{tokens} tokens", moved, make, flops)
