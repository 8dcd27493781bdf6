"""Grouped-query attention over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8, AttentionShape, KVCache
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.paged_attention.protocol import PagedKernel
from megatron_hybrid.kernels.protocols import HeadNorms, Inputs, Plan, Reader
from megatron_hybrid.layers.cached_attention import CachedAttention
from megatron_hybrid.layers.inputs import KVSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import (
    Part,
    Parts,
    Rows,
    WeightPart,
    fused,
    prefixed,
    row_parallel,
    section,
)
from megatron_hybrid.layers.rope import RopeConfig


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes and constants of one attention layer. scale: of q k before the softmax."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None = None  # of q and k; None: without positions
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k, before the rotation
    norm_over_heads: bool = False  # of q and of k one norm over all their heads instead
    zero_centered_norm: bool = False  # see RMSNorm
    key_multiplier: float = 1.0  # of keys; it is a factor of `scale`, and they are stored without
    output_gate: bool = False  # sigmoid(gate) of each output; q_proj has q, gate of head by head
    head_gate: bool = False  # sigmoid(g_proj(x)) of each head's outputs instead
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all
    input_multiplier: float = 1.0  # of what goes into it, before any bias
    out_multiplier: float = 1.0

    def mixer(self, context: LayerContext) -> GroupedQueryAttention:
        """As in LayerConfig."""
        return Attention(self, context)


class GroupedQueryAttention(CachedAttention):
    """Heads, their KV cache, and the projection of what they give. KV heads are split over the
    ranks, or replicated where there are fewer heads than ranks."""

    def __init__(self, config: AttentionConfig, context: LayerContext) -> None:
        super().__init__(context, config.rope)
        self.config = config
        self.kind = "sliding_attention" if config.window else "attention"
        if self.kv_dtype == FP8:
            self.scale_by(1.0, 1.0)
        context.spread(config.num_heads, "attention heads", config.num_kv_heads, "KV heads")
        self.heads = context.share(config.num_heads, "attention heads")
        self.kv_heads = context.share(config.num_kv_heads, "KV heads", or_copy=True)
        self.o_proj = context.to_hidden(self.heads * config.head_dim, config.output_bias)

    def scale_by(self, k_scale: float, v_scale: float) -> None:
        """As in CachedAttention."""
        self.k_scale, self.v_scale = k_scale / self.config.key_multiplier, v_scale

    def kv_spec(self) -> KVSpec:
        """As in CachedAttention."""
        return KVSpec(self.kv_heads, self.config.head_dim, self.kv_dtype, window=self.config.window)

    def shape(self, block_size: int) -> AttentionShape:
        """As in CachedAttention."""
        config, dtype = self.config, self.dtype
        dtypes = dtype, self.kv_dtype
        return AttentionShape(
            self.heads, self.kv_heads, config.head_dim, config.scale, block_size, *dtypes,
            window=config.window,
        )  # fmt: skip

    @property
    def pair_size(self) -> int:
        return self.heads * self.config.head_dim

    def kernel(self, kernels: KernelSet) -> PagedKernel:
        """As in CachedAttention."""
        return kernels.attention

    def _cache(self, plans: KernelPlans, layer: int) -> KVCache:
        cache = plans.caches.kv[layer]
        return replace(cache, k_scale=self.k_scale, v_scale=self.v_scale)


class Attention(GroupedQueryAttention):
    """Queries, keys and values are one projection, with gates behind them."""

    key_role = "k_proj.weight"

    def __init__(
        self, config: AttentionConfig, context: LayerContext, input_size: int | None = None
    ) -> None:
        """`input_size`: where it is not the hidden size."""
        super().__init__(config, context)
        assert not (config.output_gate and config.head_gate)
        queries, keys = self.heads * config.head_dim, self.kv_heads * config.head_dim
        self.qkv_sections = [queries + 2 * keys, sum(rows.size for rows in self._beside())]
        self.qkv_proj = context.to_rows(sum(self.qkv_sections), config.qkv_bias, input_size)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            sizes = (queries, keys) if config.norm_over_heads else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (
                RMSNorm(size, context.eps, context.dtype, config.zero_centered_norm)
                for size in sizes
            )

    @property
    def reader(self) -> Reader | None:
        return self.qkv_proj.reader

    def weight_parts(self) -> Parts:
        config = self.config
        yield from fused(self._rows(), self.qkv_proj, config.input_multiplier)
        yield from row_parallel("o_proj", self.o_proj, config.out_multiplier)
        for name, norm in (("q", self.q_norm), ("k", self.k_norm)):
            if norm is not None:
                parts = prefixed(f"{name}_norm", norm.weight_parts())
                if config.norm_over_heads:  # its channels are the projection's rows
                    (rows,) = (rows for rows in self._qkv_rows() if rows.role == f"{name}_proj")
                    parts = (_channels(part, rows) for part in parts)
                yield from parts

    def _rows(self) -> list[Rows]:
        """Of the projection."""
        return self._qkv_rows()

    def _qkv_rows(self) -> list[Rows]:
        dim, rank = self.config.head_dim, self.parallel.rank
        queries, first = self.config.num_heads * dim, rank * self.heads * dim
        q = [Rows("q_proj", self.heads * dim, first, queries)]
        if self.config.output_gate:
            q = self._in_turn(0)
        return [*q, *self._kv(), *self._beside()]

    def _kv(self) -> list[Rows]:
        config, dim = self.config, self.config.head_dim
        first = self.parallel.rank * config.num_kv_heads // self.parallel.size * dim
        size, total = self.kv_heads * dim, config.num_kv_heads * dim
        return [Rows(name, size, first, total) for name in ("k_proj", "v_proj")]

    def _beside(self) -> list[Rows]:
        """Of gates, which lie behind those of queries, keys and values."""
        config = self.config
        if config.output_gate:
            return self._in_turn(config.head_dim)
        if config.head_gate:
            return [Rows("g_proj", self.heads, self.parallel.rank * self.heads, config.num_heads)]
        return []

    def _in_turn(self, behind: int) -> list[Rows]:
        """Of queries or gates: in the checkpoint a head's gate follows its query."""
        dim, total = self.config.head_dim, 2 * self.config.num_heads * self.config.head_dim
        heads = range(self.parallel.rank * self.heads, (self.parallel.rank + 1) * self.heads)
        return [Rows("q_proj", dim, 2 * head * dim + behind, total) for head in heads]

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values."""
        return self.attend(self.qkv_proj(x, plans.kernels), plans, self.layer)

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """As in CachedAttention."""
        kernels, dim = plans.kernels, self.config.head_dim
        start, stop = self.heads * dim, (self.heads + 2 * self.kv_heads) * dim
        projected = self.qkv_proj.rows(x, start, stop, kernels)
        self._prepare(projected, plans, self._cache(plans, self.layer))

    def attend(self, projected: Tensor, plans: KernelPlans, layer: int) -> Tensor:
        """What follows the projection, in the KV cache of `layer`."""
        kernels = plans.kernels
        qkv, gate = projected.split(self.qkv_sections, dim=1)
        cache = self._cache(plans, layer)
        query = self._prepare(qkv, plans, cache)
        out = self._attended(query, cache, plans).flatten(1)
        if self.config.head_gate:
            gate = gate.repeat_interleave(self.config.head_dim, dim=1)
        if gate.shape[1]:
            gated = kernels.activation.gate(out, gate, "sigmoid", self.o_proj.reader)
            return self.o_proj(gated, kernels)
        return self.o_proj(out, kernels)

    def _attended(self, query: Tensor, cache: KVCache, plans: KernelPlans) -> Tensor:
        """[tokens, heads, head_dim]"""
        return plans.kernels.attention.attend(query, cache, self._paged(plans))

    def _paged(self, plans: KernelPlans) -> Plan:
        """Of attention to all tokens."""
        return plans.attention[self.kind]

    def _prepare(self, qkv: Tensor, plans: KernelPlans, cache: KVCache) -> Tensor:
        """[tokens, (heads + 2 * kv_heads) * head_dim], as projected -> queries [tokens, heads,
        head_dim] for attention; keys and values go into the cache."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            if self.config.norm_over_heads:
                qkv = self._normed_over_heads(qkv, self.q_norm, self.k_norm, plans.kernels)
            else:
                norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        heads = qkv.unflatten(1, (-1, self.config.head_dim))
        rotation, paged = plans.rotation.get(self.kind), self._paged(plans)
        return plans.kernels.rope.prepare(heads, norms, rotation, cache, paged)

    def _normed_over_heads(
        self, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, kernels: KernelSet
    ) -> Tensor:
        """qkv [tokens, ...] with q and k normed over all ranks' heads; of keys, too, that several
        ranks have each has an equal part."""
        keys = k_norm.weight.shape[0]
        sections = [qkv.shape[1] - 2 * keys, keys, keys]  # no queries where KV alone is stored
        query, key, value = qkv.split(sections, dim=1)
        if self.parallel.size == 1:
            normed = [q_norm(query, kernels)] if sections[0] else []
            return torch.cat([*normed, k_norm(key, kernels), value], dim=1)
        wide, norms = (query.float(), key.float()), (q_norm, k_norm)
        squares = self.parallel.all_reduce(torch.stack([x.square().sum(1) for x in wide], dim=1))
        parts = []
        for x, total, norm in zip(wide, squares.split(1, dim=1), norms, strict=True):
            scale = (total / max(x.shape[1] * self.parallel.size, 1) + norm.eps).rsqrt()
            parts.append((x * scale).to(norm.weight.dtype) * norm.weight[: x.shape[1]])
        return torch.cat([*(part.to(qkv.dtype) for part in parts), value], dim=1)


def _channels(part: Part, rows: Rows) -> WeightPart:
    """A norm's weight, whole, as these of all ranks' channels."""
    assert isinstance(part, WeightPart)
    own = section(part.role, part.target, 0, rows.start, rows.total)
    return replace(own, offset=part.offset)
