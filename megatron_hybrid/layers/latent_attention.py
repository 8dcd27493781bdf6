"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, 2.1): what is cached
of a token is one latent, which every head makes its key and its value of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from megatron_hybrid.kernels.paged_attention.protocol import PagedKernel
from megatron_hybrid.kernels.protocols import Inputs, Plan, Reader
from megatron_hybrid.layers.cached_attention import CachedAttention
from megatron_hybrid.layers.inputs import KVSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import ColumnParallelLinear
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import (
    Parts,
    Rows,
    fused,
    prefixed,
    row_parallel,
    shard,
)
from megatron_hybrid.layers.rope import RopeConfig


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Sizes and constants of one layer, by the names that DeepSeek's models have for them. scale:
    of q k before the softmax."""

    num_heads: int
    kv_lora_rank: int  # numbers of a latent
    qk_nope_head_dim: int  # of a head's query and key, what is not rotated
    qk_rope_head_dim: int  # and what is; of keys all heads have the same
    v_head_dim: int
    scale: float
    rope: RopeConfig | None = None  # None: without positions
    q_lora_rank: int | None = None  # queries are made of a latent of their own
    latent_bias: bool = False  # of the projections to latents
    output_bias: bool = False
    norm_eps: float = 1e-6  # of latents
    interleaved: bool = True  # neighbours rotate together; else numbers half a head apart
    head_gate: bool = False  # each head's output is multiplied by a sigmoid of its own

    def mixer(self, context: LayerContext) -> LatentAttention:
        """As in LayerConfig."""
        return LatentAttention(self, context)

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(CachedAttention):
    """Heads are split over the ranks; each rank makes and keeps whole latents.

    A head's keys and values are never made: its part of their weight (`kv_b_proj`) is multiplied
    with queries and with results (there, 2.1.2). So it is kept in the model's type, whatever the
    checkpoint has it in.
    """

    kind = "latent_attention"
    key_role = "kv_a_proj_with_mqa.weight"

    def __init__(self, config: LatentAttentionConfig, context: LayerContext) -> None:
        super().__init__(context, config.rope)
        self.config = config
        self.heads = context.share(config.num_heads, "attention heads")
        queries = config.q_lora_rank or self.heads * config.query_dim
        gates = self.heads if config.head_gate else 0
        # queries or the latent of them, the latent of keys and values, gates, what an index takes
        self.sections = [queries, config.cached_dim, gates, self.index_entry]
        self.in_proj = context.to_rows(sum(self.sections), config.latent_bias)
        if self.in_proj.bias is not None:  # which not all of it has
            self.in_proj.bias.zero_()
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if config.q_lora_rank is not None:
            rank, eps = config.q_lora_rank, config.norm_eps
            self.q_a_layernorm = RMSNorm(rank, eps, context.dtype)
            self.query_sections = [self.heads * config.query_dim, self.index_queries]
            self.q_b_proj = context.to_rows(sum(self.query_sections), False, rank)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.norm_eps, context.dtype)
        rows = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = parameter((self.heads * rows, config.kv_lora_rank), context.dtype)
        self.o_proj = context.to_hidden(self.heads * config.v_head_dim, config.output_bias)

    # Rows of the projections that are for an index alone: of a token, and of its queries' latent.
    index_entry = index_queries = 0

    def scale_by(self, k_scale: float, v_scale: float) -> None:
        """As in CachedAttention: of keys, which values are among."""
        self.k_scale = self.v_scale = k_scale

    def kv_spec(self) -> KVSpec:
        """As in CachedAttention: the same on every rank."""
        return KVSpec(1, self.config.cached_dim, self.kv_dtype, value_dim=0)

    def shape(self, block_size: int) -> AttentionShape:
        """As in CachedAttention."""
        config = self.config
        return AttentionShape(
            self.heads, 1, config.cached_dim, config.scale, block_size, self.dtype, self.kv_dtype,
            value_dim=config.kv_lora_rank,
        )  # fmt: skip

    @property
    def pair_size(self) -> int:
        config = self.config
        return self.heads * (config.query_dim + config.v_head_dim) // 2  # once they are made

    def kernel(self, kernels: KernelSet) -> PagedKernel:
        """As in CachedAttention."""
        return kernels.latent_attention

    @property
    def weights(self) -> LatentWeights:
        """A view of `kv_b_proj`."""
        by_head = self.kv_b_proj.unflatten(0, (self.heads, -1))
        return LatentWeights(by_head, self.config.qk_nope_head_dim)

    def plain_weights(self) -> Iterator[Tensor]:
        """What tokens are multiplied with besides linear layers' weights, of heads one's."""
        weights = self.weights
        yield from (weights.key[0].T, weights.value[0])

    @property
    def reader(self) -> Reader | None:
        return self.in_proj.reader

    def weight_parts(self) -> Parts:
        yield from fused(self._input_rows(), self.in_proj)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            yield from prefixed("q_a_layernorm", self.q_a_layernorm.weight_parts())
            yield from fused(self._query_rows("q_b_proj"), self.q_b_proj)
        yield from prefixed("kv_a_layernorm", self.kv_a_layernorm.weight_parts())
        total = len(self.kv_b_proj) * self.parallel.size
        yield shard("kv_b_proj.weight", self.kv_b_proj, 0, self.parallel.rank, total)
        yield from row_parallel("o_proj", self.o_proj)

    def _input_rows(self) -> list[Rows]:
        """Of `in_proj`."""
        config, (queries, latent, gates, _) = self.config, self.sections
        rows = [Rows("q_a_proj", queries, 0, queries)]
        if self.q_b_proj is None:
            rows = [one._replace(has_bias=False) for one in self._query_rows("q_proj")]
        rows.append(Rows("kv_a_proj_with_mqa", latent, 0, latent))
        if gates:
            first = self.parallel.rank * gates
            rows.append(Rows("g_proj", gates, first, config.num_heads, has_bias=False))
        return rows

    def _query_rows(self, role: str) -> list[Rows]:
        """Of what queries are made by."""
        query, rank = self.heads * self.config.query_dim, self.parallel.rank
        return [Rows(role, query, rank * query, self.config.num_heads * self.config.query_dim)]

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' latents."""
        config, kernels = self.config, plans.kernels
        queries, latent, gate, entry = self.in_proj(x, kernels).split(self.sections, dim=1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            both = self.q_b_proj(self.q_a_layernorm(queries, kernels), kernels)
            queries, index_queries = both.split(self.query_sections, dim=1)
            self._index(index_queries, entry, plans)
        query = queries.unflatten(1, (self.heads, config.query_dim))
        query, cache = self._prepare(query, latent, plans)
        out = self._attended(query, cache, plans)
        if not config.head_gate:
            return self.o_proj(out.flatten(1), kernels)
        gates = gate[:, :, None].expand(out.shape).flatten(1)
        gated = kernels.activation.gate(out.flatten(1), gates, "sigmoid", self.o_proj.reader)
        return self.o_proj(gated, kernels)

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """As in CachedAttention."""
        queries, latents, *_ = self.sections
        latent = self.in_proj.rows(x, queries, queries + latents, plans.kernels)
        self._prepare(latent.new_empty((len(latent), 0, self.config.query_dim)), latent, plans)

    def _index(self, query: Tensor, entry: Tensor, plans: KernelPlans) -> None:
        """query [tokens, index_queries], entry [tokens, index_entry]: for a layer that has an
        index."""

    def _attended(self, query: Tensor, cache: KVCache, plans: KernelPlans) -> Tensor:
        """[tokens, heads, v_head_dim]"""
        return plans.kernels.latent_attention.attend(query, self.weights, cache, self._paged(plans))

    def _paged(self, plans: KernelPlans) -> Plan:
        """Of attention to all tokens."""
        return plans.attention[self.kind]

    def _prepare(self, query: Tensor, latent: Tensor, plans: KernelPlans) -> tuple[Tensor, KVCache]:
        """What attention reads then: see kernels.latent_attention.protocol."""
        norm = LatentNorm(self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        key = plans.caches.kv[self.layer].key
        cache = KVCache(key, key[..., : self.config.kv_lora_rank], self.k_scale, self.v_scale)
        query = plans.kernels.latent_attention.prepare(
            query, latent, norm, plans.rotation.get(self.kind), self.config.interleaved, cache,
            self._paged(plans),
        )  # fmt: skip
        return query, cache
