"""Grouped-query attention over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.layers.inputs import KVSpec
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, Mixer
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, WeightPart, prefixed, scaled, section, shard, whole
from megatron_hybrid.parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes and constants of one attention layer. scale: of q k before the softmax."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k, before the rotation
    zero_centered_norm: bool = False  # see RMSNorm
    output_gate: bool = False  # sigmoid(gate) of each output; q_proj has q, gate of head by head
    input_multiplier: float = 1.0  # of what goes into it, before any bias
    out_multiplier: float = 1.0


class Attention(Mixer):
    """KV heads are split over the ranks, or replicated where there are fewer heads than ranks."""

    def __init__(
        self, config: AttentionConfig, context: LayerContext, input_size: int | None = None
    ) -> None:
        """`input_size`: where it is not the hidden size."""
        super().__init__()
        parallel, dtype, eps = context.parallel, context.dtype, context.eps
        ranks = parallel.size
        if config.num_heads % ranks:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {ranks} does not divide the model's "
                f"{config.num_heads} attention heads."
            )
        if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
            raise ConfigurationError(
                f"--tensor-model-parallel-size {ranks} neither divides nor is a multiple of the "
                f"model's {config.num_kv_heads} KV heads."
            )
        self.config = config
        self.layer = context.layer
        self.parallel = parallel
        self.heads = config.num_heads // ranks
        self.kv_heads = max(config.num_kv_heads // ranks, 1)
        self.first_kv_head = parallel.rank * config.num_kv_heads // ranks
        queries, keys = self.heads * config.head_dim, self.kv_heads * config.head_dim
        gates = queries if config.output_gate else 0
        self.qkv_sections = [queries + 2 * keys, gates]
        local = sum(self.qkv_sections)
        self.qkv_proj = ColumnParallelLinear(
            input_size or context.hidden_size,
            local * ranks,
            bias=config.qkv_bias,
            dtype=dtype,
            parallel=parallel,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            context.hidden_size,
            bias=config.output_bias,
            dtype=dtype,
            parallel=parallel,
            sums=False,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, eps, dtype, config.zero_centered_norm) for _ in "qk"
            )

    @property
    def attention(self) -> Attention:
        return self

    def kv_spec(self) -> KVSpec:
        """Of its cache on this rank."""
        return KVSpec(self.kv_heads, self.config.head_dim, self.qkv_proj.weight.dtype)

    def shape(self, block_size: int) -> AttentionShape:
        """What the kernels need to know of every attention layer of the model."""
        config, dtype = self.config, self.qkv_proj.weight.dtype
        return AttentionShape(
            self.heads, self.kv_heads, config.head_dim, config.scale, block_size, dtype
        )

    def weight_parts(self) -> Parts:
        config = self.config
        weights = self._qkv_parts("weight", self.qkv_proj.weight)
        yield from scaled(config.input_multiplier, weights)
        if self.qkv_proj.bias is not None:
            yield from self._qkv_parts("bias", self.qkv_proj.bias)
        width = config.num_heads * config.head_dim
        out = [shard("o_proj.weight", self.o_proj.weight, 1, self.parallel.rank, width)]
        if self.o_proj.bias is not None:
            out.append(whole("o_proj.bias", self.o_proj.bias))
        yield from scaled(config.out_multiplier, out)
        if self.q_norm is not None and self.k_norm is not None:
            yield from prefixed("q_norm", self.q_norm.weight_parts())
            yield from prefixed("k_norm", self.k_norm.weight_parts())

    def _qkv_parts(self, kind: str, parameter: Tensor) -> list[WeightPart]:
        dim, config, rank = self.config.head_dim, self.config, self.parallel.rank
        queries, keys = self.heads * dim, self.kv_heads * dim
        q, k, v, gate = parameter.split([queries, keys, keys, self.qkv_sections[1]], dim=0)
        kv_start, kv_total = self.first_kv_head * dim, config.num_kv_heads * dim
        query_parts = [shard(f"q_proj.{kind}", q, 0, rank, config.num_heads * dim)]
        if config.output_gate:
            query_parts = [
                section(
                    f"q_proj.{kind}",
                    rows.narrow(0, head * dim, dim),
                    0,
                    (2 * (rank * self.heads + head) + number) * dim,
                    2 * config.num_heads * dim,
                )
                for head in range(self.heads)
                for number, rows in enumerate((q, gate))
            ]
        return [
            *query_parts,
            section(f"k_proj.{kind}", k, 0, kv_start, kv_total),
            section(f"v_proj.{kind}", v, 0, kv_start, kv_total),
        ]

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values."""
        return self.attend(self.qkv_proj(x), plans, self.layer)

    def store(self, x: Tensor, plans: KernelPlans) -> None:
        """Write the keys and values of tokens [tokens, hidden], and attend to nothing."""
        kernels, dim = plans.kernels, self.config.head_dim
        rows = slice(self.heads * dim, (self.heads + 2 * self.kv_heads) * dim)
        bias = self.qkv_proj.bias
        projected = F.linear(x, self.qkv_proj.weight[rows], None if bias is None else bias[rows])
        key, value = projected.unflatten(1, (2 * self.kv_heads, dim)).chunk(2, dim=1)
        if self.k_norm is not None:
            key = self.k_norm(key, kernels)
        if plans.rotation is not None:
            key = kernels.rope.rotate(key, plans.rotation)
        kernels.attention.append(key, value, plans.caches.kv[self.layer], plans.attention)

    def attend(self, projected: Tensor, plans: KernelPlans, layer: int) -> Tensor:
        """What follows the projection, in the KV cache of `layer`."""
        kernels, dim = plans.kernels, self.config.head_dim
        qkv, gate = projected.split(self.qkv_sections, dim=1)
        qkv = qkv.unflatten(1, (self.heads + 2 * self.kv_heads, dim))
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = qk.split([self.heads, self.kv_heads], dim=1)
            qk = torch.cat((self.q_norm(query, kernels), self.k_norm(key, kernels)), dim=1)
        if plans.rotation is not None:
            qk = kernels.rope.rotate(qk, plans.rotation)
        query, key = qk.split([self.heads, self.kv_heads], dim=1)
        cache = plans.caches.kv[layer]
        kernels.attention.append(key, value, cache, plans.attention)
        out = kernels.attention.attend(query, cache, plans.attention).flatten(1)
        if self.config.output_gate:
            out = kernels.activation.gate(out, gate, "sigmoid")
        return self.o_proj(out)
