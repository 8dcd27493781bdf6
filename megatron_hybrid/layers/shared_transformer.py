"""Zamba's shared blocks: a few transformer blocks, each used by several layers, which differ in a
projection and, in Zamba2, in low-rank adapters (Glorioso et al., "The Zamba2 Suite", arXiv
2411.15242)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_hybrid.layers.adapters import of_copy
from megatron_hybrid.layers.attention import Attention, AttentionConfig
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.mlp import MLP, MLPConfig
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, inner_parts, section, shard, whole


@dataclass(frozen=True)
class SharedTransformerConfig:
    """Sizes of the blocks that layers take in turn. `mixer`: letter of what these layers are."""

    attention: AttentionConfig
    mlp: MLPConfig
    num_blocks: int  # that the layers take in turn
    adapter_rank: int = 0  # 0: without adapters
    attention_adapters: bool = False  # also of q, k and v; the MLP always has one
    mixer: str = "M"


class SharedTransformer(nn.Module):
    """Attention, which reads the hidden states and the embeddings side by side, and an MLP. It has
    no residuals: its result is an addition to a Mamba layer's input."""

    def __init__(self, config: SharedTransformerConfig, context: LayerContext) -> None:
        super().__init__()
        hidden, eps, dtype = context.hidden_size, context.eps, context.dtype
        self.input_norm = RMSNorm(2 * hidden, eps, dtype)
        self.self_attn = Attention(config.attention, context, input_size=2 * hidden)
        self.mlp_norm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(config.mlp, context)

    def weight_parts(self) -> Parts:
        """The weights that it needs on this rank."""
        return inner_parts(self)


class SharedTransformerUse(nn.Module):
    """A layer's use of a shared block: its adapters, its KV cache and its projection."""

    def __init__(
        self,
        config: SharedTransformerConfig,
        shared: SharedTransformer,
        context: LayerContext,
        use: int = 0,
        uses: int = 1,
    ) -> None:
        """`use`: which of the block's `uses` it is."""
        super().__init__()
        self.shared = shared
        self.use, self.uses = use, uses
        self.layer = context.layer
        self.parallel = context.parallel
        dtype, hidden, rank = context.dtype, context.hidden_size, config.adapter_rank
        attention, mlp = shared.self_attn, shared.mlp
        rows = attention.heads * attention.config.head_dim
        self.qkv_down = self.qkv_up = None
        if config.attention_adapters:
            self.qkv_down = parameter((3, rank, 2 * hidden), dtype)
            self.qkv_up = parameter((3, rows, rank), dtype)
        self.mlp_down = self.mlp_up = None
        if rank:
            self.mlp_down = parameter((rank, hidden), dtype)
            self.mlp_up = parameter((mlp.up_proj.outputs, rank), dtype)
        self.linear = parameter((hidden, hidden), dtype)

    def weight_parts(self) -> Parts:
        """Without the shared block's."""
        rank, config = self.parallel.rank, self.shared.self_attn.config
        if self.qkv_down is not None and self.qkv_up is not None:
            total = config.num_heads * config.head_dim
            for name, down, up in zip("qkv", self.qkv_down, self.qkv_up, strict=True):
                yield whole(f"self_attn.{name}_adapter.down", down)
                yield shard(f"self_attn.{name}_adapter.up", up, 0, rank, total)
        if self.mlp_down is not None and self.mlp_up is not None:
            yield whole("mlp.adapter.down", self.mlp_down)
            gate, up = self.mlp_up.chunk(2)
            total = self.shared.mlp.config.intermediate_size
            yield section("mlp.adapter.up", gate, 0, rank * len(gate), 2 * total)
            yield section("mlp.adapter.up", up, 0, total + rank * len(up), 2 * total)
        yield whole("linear.weight", self.linear)

    def forward(self, x: Tensor, plans: KernelPlans) -> Tensor:
        """x [tokens, hidden], the residual stream -> [tokens, hidden]."""
        plans = replace(plans, kernels=of_copy(plans.kernels, self.use, self.uses))
        shared, kernels, multiply = self.shared, plans.kernels, plans.kernels.linear.multiply
        assert plans.embeddings is not None
        both = shared.input_norm(torch.cat((x, plans.embeddings.to(x.dtype)), dim=1), kernels)
        attention = shared.self_attn
        qkv = attention.qkv_proj(both, kernels)
        if self.qkv_down is not None and self.qkv_up is not None:
            down = multiply(both, self.qkv_down.flatten(0, 1)).chunk(3, dim=1)
            up = [multiply(low, own) for low, own in zip(down, self.qkv_up, strict=True)]
            qkv = qkv + torch.cat(up, dim=1)
        y = self.parallel.all_reduce(attention.attend(qkv, plans, self.layer))
        y = shared.mlp_norm(y, kernels)
        inner = shared.mlp.up_proj(y, kernels)
        if self.mlp_down is not None and self.mlp_up is not None:
            inner = inner + multiply(multiply(y, self.mlp_down), self.mlp_up)
        y = self.parallel.all_reduce(shared.mlp.activate(inner, plans))
        return multiply(y, self.linear)
