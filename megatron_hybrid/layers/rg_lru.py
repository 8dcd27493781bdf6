"""Griffin's recurrent block: two projections, one of them through a convolution and the real-gated
linear recurrent unit, the other through an activation, their product, projection (De et al.,
"Griffin", 2024, arXiv 2402.19427, sections 2.3 and 2.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.channel_scans import RGLRUConstants, RGLRUTokens
from megatron_hybrid.kernels.elementwise import sigmoid
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import Inputs
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.kernels.rg_lru.reference import log_decays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, shard
from megatron_hybrid.layers.recurrent import RecurrentMixer

_SHARPNESS = 8.0  # c in the paper: of the gate, in the exponent


@dataclass(frozen=True)
class RGLRUConfig:
    """Sizes of one recurrent block. `heads`: blocks of channels, each with gates of its own."""

    channels: int
    heads: int
    conv_width: int
    activation: str  # a key of kernels.activation's ACTIVATIONS

    def mixer(self, context: LayerContext) -> RGLRU:
        """As in LayerConfig."""
        return RGLRU(self, context)


class RGLRU(RecurrentMixer):
    """Heads are split over the ranks. A rank's rows of the input projection: | x | y |."""

    kind = "rg_lru"

    def __init__(self, config: RGLRUConfig, context: LayerContext) -> None:
        heads = context.share(config.heads, "heads of the recurrent unit")
        width = config.channels // config.heads
        channels = heads * width
        super().__init__(
            context,
            [channels],
            config.conv_width,
            True,
            state=(channels,),
            inputs=((channels,), (channels,)),  # x, gate
            kernel_chunk=16,
            scaled_over=-1,
        )
        self.config = config
        self.heads, self.channels, self.width = heads, channels, width
        self.in_proj = context.to_rows(2 * channels, bias=True)
        # Of each head | input gate | recurrence gate |, as linear layers have their weights.
        self.gates = parameter((heads, 2, width, width), context.dtype)
        self.gates_bias = parameter((heads, 2, width), context.dtype)
        self.recurrent_param = parameter((channels,), torch.float32)
        self.linear_out = context.to_hidden(channels, bias=True)
        self.decay: Tensor  # [channels] float32, negative; see after_loading

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.rg_lru

    def weight_parts(self) -> Parts:
        rank, heads, total = self.parallel.rank, self.config.heads, self.config.channels
        first = rank * self.channels
        halves = [Rows(name, self.channels, first, total) for name in ("linear_x", "linear_y")]
        yield from fused(halves, self.in_proj)
        yield from self.conv_parts("conv_1d", [first], total)
        for number, gate in enumerate(("input_gate", "recurrent_gate")):
            weight, bias = self.gates[:, number].mT, self.gates_bias[:, number]
            yield shard(f"rg_lru.{gate}_weight", weight, 0, rank, heads)
            yield shard(f"rg_lru.{gate}_bias", bias, 0, rank, heads)
        yield shard("rg_lru.recurrent_param", self.recurrent_param, 0, rank, total)
        yield from row_parallel("linear_out", self.linear_out)

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("decay", -_SHARPNESS * F.softplus(self.recurrent_param))

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels = plans.kernels
        x, y = self.in_proj.split(x, [self.channels, self.channels], kernels)
        x = self.convolve(x, plans, silu=False)
        input_gate, gate = self._gates(x, kernels)
        constants = RGLRUConstants(self.decay, self.rounding_seed(plans))
        scale = torch.sqrt(1 - torch.exp(2 * log_decays(gate, constants)))
        if plans.positions is not None:  # a sequence's first token goes in as it is
            scale.masked_fill_(plans.positions[:, None] == 0, 1)
        x = x * sigmoid(input_gate) * scale.to(x.dtype)
        h = self.scan(RGLRUTokens(x, gate), constants, plans)
        gated = kernels.activation.gate(h, y, self.config.activation, self.linear_out.reader)
        return self.linear_out(gated, kernels)

    def _gates(self, x: Tensor, kernels: KernelSet) -> tuple[Tensor, Tensor]:
        """x [tokens, channels] -> the gates before their sigmoids, [tokens, channels] each."""
        out = x.new_empty(2, *x.shape)
        for head in range(self.heads):
            own = slice(head * self.width, (head + 1) * self.width)
            weight, bias = self.gates[head].flatten(0, 1), self.gates_bias[head].flatten()
            both = kernels.linear.multiply(x[:, own], weight, bias)
            out[0, :, own], out[1, :, own] = both.split(self.width, dim=1)
        return out[0], out[1]
