"""Kimi delta attention (KDA): projection, short convolution of q, k and v, the gated delta rule
with a decay for each channel of the keys, gated norm of each head, projection ("Kimi Linear",
arXiv 2510.26692)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens, Inputs
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, sections, shard, whole
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class KimiDeltaAttentionConfig:
    """`gate_rank`: decays (f) and output gates (g) come from this many numbers, which heads share
    (f_a_proj, f_b_proj, g_a_proj, g_b_proj); None: from a projection each (f_proj, g_proj).
    `lower_bound`: of the log of a token's decay, which is a sigmoid of it then; None: a softplus.
    `nested_A_log`: A_log is [1, 1, heads, 1] in the checkpoint."""

    num_heads: int
    head_dim: int
    conv_width: int
    gate_rank: int | None = None
    lower_bound: float | None = None
    kernel_chunk: int = 64
    nested_A_log: bool = False

    def mixer(self, context: LayerContext) -> KimiDeltaAttention:
        """As in LayerConfig."""
        return KimiDeltaAttention(self, context)


class KimiDeltaAttention(RecurrentMixer):
    """Heads are split over the ranks; numbers that they share are computed by each. A rank's rows
    of the input projection, and its channels of the convolution:

        | q | k | v | b | f | g |          | q | k | v |
    """

    kind = "kimi_delta_attention"
    takes_chunk_bounds = True

    def __init__(self, config: KimiDeltaAttentionConfig, context: LayerContext) -> None:
        heads = context.share(config.num_heads, "heads of its Kimi delta attention")
        dim = config.head_dim
        channels, head = heads * dim, (heads, dim)
        super().__init__(
            context,
            [channels] * 3,
            config.conv_width,
            bias=False,
            state=(*head, dim),
            inputs=(head, head, head, (heads,)),  # k, v, a, b
            kernel_chunk=config.kernel_chunk,
        )
        self.config = config
        self.heads = heads
        rank = config.gate_rank
        self.in_sections = [3 * channels, heads, *[rank or channels] * 2]
        self.in_proj = context.to_rows(sum(self.in_sections), bias=False)
        self.f_b_proj = self.g_b_proj = None
        if rank is not None:
            self.f_b_proj, self.g_b_proj = (
                context.to_rows(channels, bias=False, inputs=rank) for _ in "fg"
            )
        self.o_proj = context.to_hidden(channels, bias=False)
        self.dt_bias = parameter((channels,), torch.float32)
        self.A_log = parameter((heads,), torch.float32)
        self.eps = context.eps
        self.norm_weight = parameter((dim,), context.dtype)  # of every head
        self.A: Tensor  # [heads] float32, negative; see after_loading
        self.norm_weights: Tensor  # [heads * dim]

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.gated_delta_rule

    def weight_parts(self) -> Parts:
        rank, config, (size, *_) = self.parallel.rank, self.config, self.conv_sections
        total = config.num_heads * config.head_dim

        def own(*names: str) -> list[Rows]:
            return [Rows(name, size, rank * size, total) for name in names]

        rows = own("q_proj", "k_proj", "v_proj")
        rows.append(Rows("b_proj", self.heads, rank * self.heads, config.num_heads))
        shared = config.gate_rank
        if shared is None:
            rows += own("f_proj", "g_proj")
        else:
            rows += [Rows(name, shared, 0, shared) for name in ("f_a_proj", "g_a_proj")]
        yield from fused(rows, self.in_proj)
        if self.f_b_proj is not None and self.g_b_proj is not None:
            yield from fused(own("f_b_proj"), self.f_b_proj)
            yield from fused(own("g_b_proj"), self.g_b_proj)
        convolved = own("q_conv1d", "k_conv1d", "v_conv1d")
        yield from sections("weight", convolved, self.conv_weight[:, None])
        yield shard("dt_bias", self.dt_bias, 0, rank, total)
        if config.nested_A_log:
            yield shard("A_log", self.A_log[None, None, :, None], 2, rank, config.num_heads)
        else:
            yield shard("A_log", self.A_log, 0, rank, config.num_heads)
        yield whole("o_norm.weight", self.norm_weight)
        yield from row_parallel("o_proj", self.o_proj)

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("A", -self.A_log.exp())
        self.derive("norm_weights", self.norm_weight.repeat(self.heads))

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        config, kernels = self.config, plans.kernels
        qkv, b, f, g = self.in_proj.split(x, self.in_sections, kernels)
        q, k, v = self.convolve(qkv, plans).split(self.conv_sections, dim=1)
        f, g = (
            low if up is None else up(low, kernels)
            for low, up in ((f, self.f_b_proj), (g, self.g_b_proj))
        )
        by_head = (self.heads, config.head_dim)
        q, k, v, f = (values.unflatten(1, by_head) for values in (q, k, v, f))
        constants = DeltaRuleConstants(
            self.A,
            self.dt_bias.view(by_head),
            self.rounding_seed(plans),
            lower_bound=config.lower_bound,
        )
        y = self.scan(DeltaRuleTokens(q, k, v, f, b), constants, plans).flatten(1)
        weights, reader = self.norm_weights, self.o_proj.reader
        normed = kernels.norm.gated_rms_norm(
            y, g, weights, config.head_dim, self.eps, True, reader, "sigmoid"
        )
        return self.o_proj(normed, kernels)
