"""Grouped-query attention of which an index chooses what each token sees (Qwen's QSA)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape, KVCache
from megatron_hybrid.kernels.indexed_attention.protocol import IndexNorm, MeanPool
from megatron_hybrid.kernels.protocols import Inputs, Plan
from megatron_hybrid.layers.attention import Attention, AttentionConfig
from megatron_hybrid.layers.inputs import KVSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, Rows, prefixed
from megatron_hybrid.layers.rope import inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class IndexedAttentionConfig(AttentionConfig):
    """Attention, which must have positions and no window, and `index`, whose queries and keys are
    rotated alike."""

    index: IndexShape = field()

    def mixer(self, context: LayerContext) -> IndexedAttention:
        """As in LayerConfig."""
        return IndexedAttention(self, context)


class IndexedAttention(Attention):
    """Every rank has the whole index: all ranks' heads see the same tokens."""

    config: IndexedAttentionConfig

    def __init__(self, config: IndexedAttentionConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        assert config.rope is not None and not config.window
        self.kind = "indexed_attention"
        index = config.index
        self.index_sections = [index.heads * index.dim, index.dim]  # queries, a key
        own = sum(self.qkv_sections)
        self.qkv_proj = context.to_rows(own + sum(self.index_sections), config.qkv_bias)
        if self.qkv_proj.bias is not None:  # which the index has none of
            self.qkv_proj.bias.zero_()
        norm = index.dim, context.eps, context.dtype, config.zero_centered_norm
        self.index_q_norm, self.index_k_norm = RMSNorm(*norm), RMSNorm(*norm)
        self.register_buffer("frequencies", inverse_frequencies(config.rope), persistent=False)
        self.frequencies: Tensor

    def kv_spec(self) -> KVSpec:
        """As in CachedAttention."""
        index = self.config.index
        return replace(
            super().kv_spec(),
            index_dim=index.dim, index_dtype=self.dtype, index_group=index.group,
        )  # fmt: skip

    def shape(self, block_size: int) -> AttentionShape:
        """As in CachedAttention."""
        return replace(super().shape(block_size), index=self.config.index)

    def weight_parts(self) -> Parts:
        yield from super().weight_parts()
        for name, norm in (("q", self.index_q_norm), ("k", self.index_k_norm)):
            yield from prefixed(f"indexer.{name}_layernorm", norm.weight_parts())

    def _rows(self) -> list[Rows]:
        size = sum(self.index_sections)
        return [*super()._rows(), Rows("indexer.index_qk_proj", size, 0, size, has_bias=False)]

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values, and entries."""
        kernels, own = plans.kernels, sum(self.qkv_sections)
        projected, query, key = self.qkv_proj(x, kernels).split([own, *self.index_sections], dim=1)
        self._store_entries(key, plans)
        assert plans.positions is not None
        heads = query.unflatten(1, (self.config.index.heads, -1))
        indexed, plan = kernels.indexed_attention, plans.attention[self.kind]
        turned = indexed.turn(heads, self._norm(self.index_q_norm), plans.positions)
        indexed.select(turned, None, plans.caches.kv[self.layer], plan)
        return self.attend(projected, plans, self.layer)

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """As in CachedAttention."""
        super().store(x, plans)
        stop = self.qkv_proj.outputs
        rows = stop - self.config.index.dim, stop
        self._store_entries(self.qkv_proj.rows(x, *rows, plans.kernels), plans)

    def _store_entries(self, key: Tensor, plans: KernelPlans) -> None:
        assert plans.positions is not None
        plans.kernels.indexed_attention.store(
            key,
            MeanPool(self._norm(self.index_k_norm)),
            plans.positions,
            plans.caches.kv[self.layer],
            plans.attention[self.kind],
        )

    def _norm(self, norm: RMSNorm) -> IndexNorm:
        return IndexNorm(norm.weight, norm.eps, self.frequencies)

    def _paged(self, plans: KernelPlans) -> Plan:
        return plans.attention[self.kind].every

    def _attended(self, query: Tensor, cache: KVCache, plans: KernelPlans) -> Tensor:
        return plans.kernels.indexed_attention.attend(query, cache, plans.attention[self.kind])
