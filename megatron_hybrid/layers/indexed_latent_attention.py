"""Multi-head latent attention of which an index chooses what each token sees: DeepSeek sparse
attention (DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, 2.1), over pools of tokens as GLM has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape, KVCache
from megatron_hybrid.kernels.indexed_attention.protocol import GatedPool
from megatron_hybrid.kernels.protocols import Plan
from megatron_hybrid.layers.inputs import KVSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.latent_attention import LatentAttention, LatentAttentionConfig
from megatron_hybrid.layers.layer_norm import LayerNorm
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, prefixed, whole

_KEY_EPS = 1e-6  # of the index's norm


@dataclass(frozen=True, kw_only=True)
class IndexedLatentConfig(LatentAttentionConfig):
    """Latent attention, whose queries are made of a latent, and `index`. `shared`: the layer has
    none, and sees what the last layer that has one has chosen."""

    index: IndexShape = field()
    shared: bool = False

    def mixer(self, context: LayerContext) -> IndexedLatentAttention:
        """As in LayerConfig."""
        return IndexedLatentAttention(self, context)


class IndexedLatentAttention(LatentAttention):
    """Every rank has the whole index: all ranks' heads see the same tokens."""

    kind = "indexed_latent_attention"
    config: IndexedLatentConfig

    def __init__(self, config: IndexedLatentConfig, context: LayerContext) -> None:
        assert config.q_lora_rank is not None
        index = config.index
        # of a token its key, its gate in its group's key, and a weight for each head of the index
        self.index_sections = [index.dim, index.dim, index.heads]
        self.index_entry = 0 if config.shared else sum(self.index_sections)
        self.index_queries = 0 if config.shared else index.heads * index.dim
        super().__init__(config, context)
        if not config.shared:
            self.index_k_norm = LayerNorm(index.dim, _KEY_EPS, context.dtype)
            self.index_bias = parameter((index.group, index.dim), context.dtype)

    def kv_spec(self) -> KVSpec:
        """As in CachedAttention."""
        index, spec = self.config.index, super().kv_spec()
        if self.config.shared:
            return spec
        return replace(
            spec, index_dim=2 * index.dim, index_dtype=self.dtype, index_group=index.group
        )

    def shape(self, block_size: int) -> AttentionShape:
        """As in CachedAttention."""
        return replace(super().shape(block_size), index=self.config.index)

    def weight_parts(self) -> Parts:
        yield from super().weight_parts()
        if not self.config.shared:
            yield from prefixed("indexer.k_norm", self.index_k_norm.weight_parts())
            yield whole("indexer.index_kpool_compress_ape", self.index_bias)

    def _input_rows(self) -> list[Rows]:
        rows = super()._input_rows()
        if not self.config.shared:
            names = "wk", "index_kpool_compress_gate", "weights_proj"
            rows += [
                Rows(f"indexer.{name}", size, 0, size, has_bias=False)
                for name, size in zip(names, self.index_sections, strict=True)
            ]
        return rows

    def _query_rows(self, role: str) -> list[Rows]:
        rows = super()._query_rows(role)
        if not self.config.shared:
            rows.append(Rows("indexer.wq_b", self.index_queries, 0, self.index_queries))
        return rows

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """As in CachedAttention."""
        super().store(x, plans)
        if not self.config.shared:
            stop = self.in_proj.outputs
            entry = self.in_proj.rows(x, stop - self.index_entry, stop, plans.kernels)
            self._store_entry(entry, plans)

    def _index(self, query: Tensor, entry: Tensor, plans: KernelPlans) -> None:
        if self.config.shared:
            return
        weights = self._store_entry(entry, plans)
        heads = query.unflatten(1, (self.config.index.heads, -1))
        cache, plan = plans.caches.kv[self.layer], plans.attention[self.kind]
        plans.kernels.indexed_attention.select(heads, weights.float(), cache, plan)

    def _store_entry(self, entry: Tensor, plans: KernelPlans) -> Tensor:
        """Gives the weights of the index's heads."""
        key, gate, weights = entry.split(self.index_sections, dim=1)
        assert plans.positions is not None
        plans.kernels.indexed_attention.store(
            torch.cat((self.index_k_norm(key, plans.kernels), gate), dim=1),
            GatedPool(self.index_bias),
            plans.positions,
            plans.caches.kv[self.layer],
            plans.attention[self.kind],
        )
        return weights

    def _paged(self, plans: KernelPlans) -> Plan:
        return plans.attention[self.kind].every

    def _attended(self, query: Tensor, cache: KVCache, plans: KernelPlans) -> Tensor:
        indexed, plan = plans.kernels.indexed_attention, plans.attention[self.kind]
        return indexed.attend_latents(query, self.weights, cache, plan)
