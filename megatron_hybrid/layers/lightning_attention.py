"""Lightning attention (Qin et al., "Lightning Attention-2", arXiv 2401.04658): linear attention
whose state decays by a constant of each head, a norm over groups of heads, gated by a sigmoid.

    S[t] = exp(-decay) S[t-1] + v[t] k[t]^T        y[t] = S[t] q[t]

This is Mamba2's scan with x = v, B = k, C = q, a group for each head, A = -decay, D = 0 and a step
size of 1: its kernels compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import (
    HeadNorms,
    Inputs,
    Mamba2Constants,
    Mamba2Tokens,
)
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.norm import GatedRMSNorm, RMSNorm
from megatron_hybrid.layers.parts import Parts, Rows, fused, prefixed, row_parallel
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.layers.rope import RopeConfig

_STEP = (1.0, 1.0)  # what step sizes are clamped to


@dataclass(frozen=True)
class LightningAttentionConfig:
    """A head's state decays by exp(-decay) a token, where decay is its slope times the factor of
    the layer's block. `scale`: of y. `silu`: of q, k and v. `by_heads`: the checkpoint's projection
    has q, k and v of one head after the other (MiniMax), not all q, then all k, then all v.
    """

    num_heads: int
    head_dim: int
    slopes: tuple[float, ...]  # of each head
    factors: tuple[float, ...]  # of each block of the model
    norm_groups: int
    norm_eps: float
    kernel_chunk: int
    scale: float = 1.0
    silu: bool = False
    by_heads: bool = False
    qk_norm: bool = False  # RMS norm of each head of q and k, before the rotation
    rope: RopeConfig | None = None  # of q and k; None: without positions

    def mixer(self, context: LayerContext) -> LightningAttention:
        """As in LayerConfig."""
        return LightningAttention(self, context)


class LightningAttention(RecurrentMixer):
    """Heads are split over the ranks. A rank's rows of the input projection:

    | q | k | v | gate |
    """

    kind = "lightning_attention"

    def __init__(self, config: LightningAttentionConfig, context: LayerContext) -> None:
        heads = context.share(config.num_heads, "heads of lightning attention")
        channels = config.num_heads * config.head_dim
        context.spread(channels, "channels", config.norm_groups, "groups of norms")
        context.share(config.norm_groups, "groups of lightning attention's norm", or_copy=True)
        of_heads = heads, config.head_dim
        super().__init__(
            context,
            [],
            state=(*of_heads, config.head_dim),
            inputs=(of_heads, of_heads, (heads,)),  # v, k, step sizes
            kernel_chunk=config.kernel_chunk,
        )
        self.config = config
        self.rope = config.rope
        self.heads, self.inner = heads, heads * config.head_dim
        self.in_proj = context.to_rows(4 * self.inner, bias=False)
        self.out_proj = context.to_hidden(self.inner, bias=False)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, context.eps, context.dtype) for _ in "qk"
            )
        # Of scale y it makes what it makes of y with this eps.
        eps = config.norm_eps / config.scale**2
        self.norm = GatedRMSNorm(
            config.num_heads * config.head_dim,
            config.norm_groups,
            eps,
            context.dtype,
            context.parallel,
            norm_first=True,
            activation="sigmoid",
        )
        self.A: Tensor  # [heads] float32, negative; see after_loading
        self.nothing: Tensor  # [heads] float32 zeros: D, and the bias of step sizes
        self.steps: Tensor  # [1, heads] zeros, which are clamped to _STEP

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.mamba2_scan

    def weight_parts(self) -> Parts:
        rank, total = self.parallel.rank, self.parallel.size * self.inner
        first, dim = rank * self.inner, self.config.head_dim
        if self.config.by_heads:
            rows = [
                Rows("in_proj_qkv", dim, (3 * head + part) * dim, 3 * total)
                for part in range(3)
                for head in range(rank * self.heads, (rank + 1) * self.heads)
            ]
        else:
            starts = (part * total + first for part in range(3))
            rows = [Rows("in_proj_qkv", self.inner, start, 3 * total) for start in starts]
        yield from fused([*rows, Rows("in_proj_gate", self.inner, first, total)], self.in_proj)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield from prefixed(name, norm.weight_parts())
        yield from prefixed("norm", self.norm.weight_parts())
        yield from row_parallel("out_proj", self.out_proj)

    def after_loading(self) -> None:
        super().after_loading()
        config, weight = self.config, self.norm.weight
        first, factor = self.parallel.rank * self.heads, config.factors[self.layer]
        slopes = torch.tensor(config.slopes[first : first + self.heads], dtype=torch.float64)
        self.derive("A", (-slopes * factor).float().to(weight.device))
        self.derive("nothing", torch.zeros_like(self.A))
        self.derive("steps", torch.zeros_like(self.A, dtype=weight.dtype)[None])

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels, norms = plans.kernels, None
        qkv, gate = self.in_proj.split(x, [3 * self.inner, self.inner], kernels)
        if self.config.silu:
            qkv = plain_rows(kernels.activation.activate(qkv, "silu", gated=False))
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        heads, rotation = qkv.unflatten(1, (-1, self.config.head_dim)), plans.rotation
        q, k, v = kernels.rope.turn(heads, norms, rotation.get(self.kind))
        tokens = Mamba2Tokens(v, k, q, self.steps.expand(len(v), -1))
        constants = Mamba2Constants(
            self.A, self.nothing, self.nothing, _STEP, self.rounding_seed(plans)
        )
        y = self.scan(tokens, constants, plans).flatten(1)
        return self.out_proj(self.norm(y, gate, kernels, self.out_proj.reader), kernels)
