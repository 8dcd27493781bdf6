"""Experts that every token goes to beside those that it chooses, with weights of the same router
(Inkling's shared experts)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.mixer import LayerContext
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.parts import Parts, Rows, columns, fused


class Sinks(nn.Module):
    """The ranks that have the same tokens have a part of each one's inner size; none travels."""

    numbers: Tensor  # [sinks] int32

    def __init__(self, count: int, expert: MLPConfig, context: LayerContext) -> None:
        """`expert`: what each of them is."""
        super().__init__()
        self.count, self.expert, self.parallel = count, expert, context.parallel
        local = context.share(expert.intermediate_size, "channels inside a shared expert")
        rows = 2 * local if expert.gated else local
        hidden, dtype = context.hidden_size, context.dtype
        # Those of all, one below the other.
        self.up_proj = Linear(hidden, count * rows, bias=False, dtype=dtype)
        self.down_proj = Linear(local, count * hidden, bias=False, dtype=dtype)
        self.register_buffer("numbers", torch.arange(count, dtype=torch.int32), persistent=False)

    def weight_parts(self) -> Parts:
        """As those of experts."""
        rank, total = self.parallel.rank, self.expert.intermediate_size
        local = self.down_proj.inputs
        names = ("gate_proj", "up_proj") if self.expert.gated else ("up_proj",)
        rows = [
            Rows(f"experts.{i}.{name}", local, rank * local, total)
            for i in range(self.count)
            for name in names
        ]
        yield from fused(rows, self.up_proj)
        width = self.down_proj.outputs // self.count
        for i in range(self.count):
            yield columns(f"experts.{i}.down_proj", self.down_proj, rank, total, i * width, width)

    def after_loading(self) -> None:
        """Raises ConfigurationError for experts in several formats."""
        for layer in (self.up_proj, self.down_proj):
            layer.stacked(self.count)

    def forward(self, x: Inputs, weights: Tensor, plans: KernelPlans) -> Tensor:
        """x [tokens, hidden], weights [tokens, sinks] float32 -> [tokens, hidden], this rank's part
        of the sum."""
        up, down = self.up_proj.stacked(self.count), self.down_proj.stacked(self.count)
        layer = ExpertWeights(up, down, self.expert.activation, self.expert.gated)
        kernels, adapters = plans.kernels.experts, plans.kernels.adapters
        every = self.numbers.expand(len(weights), -1).contiguous()
        adapted = None
        if adapters is not None:
            adapted = adapters.of_experts(self.up_proj, self.down_proj)
        if adapted is not None:
            return kernels.mix_adapted(x, every, weights, layer, adapted)
        return kernels.mix(x, every, weights, layer)
