"""Grouped-query attention over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.layers.inputs import KVSpec
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, WeightPart, section, shard, whole
from megatron_hybrid.layers.step import Step
from megatron_hybrid.parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear


@dataclass(frozen=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k, before the rotation


class Attention(nn.Module):
    """KV heads are split over the ranks, or replicated where there are fewer heads than ranks."""

    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        eps: float,
        layer: int,
        dtype: torch.dtype,
        parallel: ParallelContext,
    ) -> None:
        super().__init__()
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
        self.layer = layer
        self.parallel = parallel
        self.heads = config.num_heads // ranks
        self.kv_heads = max(config.num_kv_heads // ranks, 1)
        self.first_kv_head = parallel.rank * config.num_kv_heads // ranks
        local = (self.heads + 2 * self.kv_heads) * config.head_dim
        self.qkv_proj = ColumnParallelLinear(
            hidden_size, local * ranks, bias=config.qkv_bias, dtype=dtype, parallel=parallel
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            hidden_size,
            bias=config.output_bias,
            dtype=dtype,
            parallel=parallel,
        )
        self.q_norm = RMSNorm(config.head_dim, eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps, dtype) if config.qk_norm else None

    def kv_spec(self) -> KVSpec:
        return KVSpec(self.kv_heads, self.config.head_dim, self.qkv_proj.weight.dtype)

    def shape(self, block_size: int) -> AttentionShape:
        """What the kernels need to know of every attention layer of the model."""
        config, dtype = self.config, self.qkv_proj.weight.dtype
        return AttentionShape(
            self.heads, self.kv_heads, config.head_dim, config.scale, block_size, dtype
        )

    def weight_parts(self) -> Parts:
        yield from self._qkv_parts("weight", self.qkv_proj.weight)
        if self.qkv_proj.bias is not None:
            yield from self._qkv_parts("bias", self.qkv_proj.bias)
        width = self.config.num_heads * self.config.head_dim
        yield shard("o_proj.weight", self.o_proj.weight, 1, self.parallel.rank, width)
        if self.o_proj.bias is not None:
            yield whole("o_proj.bias", self.o_proj.bias)
        if self.q_norm is not None and self.k_norm is not None:
            yield whole("q_norm.weight", self.q_norm.weight)
            yield whole("k_norm.weight", self.k_norm.weight)

    def _qkv_parts(self, kind: str, parameter: Tensor) -> list[WeightPart]:
        dim, config = self.config.head_dim, self.config
        q, k, v = parameter.split(
            [self.heads * dim, self.kv_heads * dim, self.kv_heads * dim], dim=0
        )
        kv_start, kv_total = self.first_kv_head * dim, config.num_kv_heads * dim
        return [
            shard(f"q_proj.{kind}", q, 0, self.parallel.rank, config.num_heads * dim),
            section(f"k_proj.{kind}", k, 0, kv_start, kv_total),
            section(f"v_proj.{kind}", v, 0, kv_start, kv_total),
        ]

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values."""
        kernels = step.kernels
        tokens, dim = x.shape[0], self.config.head_dim
        qkv = self.qkv_proj(x).view(tokens, self.heads + 2 * self.kv_heads, dim)
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = qk.split([self.heads, self.kv_heads], dim=1)
            qk = torch.cat((self.q_norm(query, kernels), self.k_norm(key, kernels)), dim=1)
        if step.rotation is not None:
            qk = kernels.rope.rotate(qk, step.rotation)
        query, key = qk.split([self.heads, self.kv_heads], dim=1)
        cache = step.caches.kv[self.layer]
        kernels.attention.append(key, value, cache, step.attention)
        out = kernels.attention.attend(query, cache, step.attention)
        return self.o_proj(out.view(tokens, self.heads * dim))
