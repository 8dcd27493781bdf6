"""Zamba's Mamba1 mixer: its channels are those of a few heads, each with step sizes, B and C made
from its own channels alone, and a scan of its own (Glorioso et al., "Zamba", arXiv 2405.16712)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import Inputs, Mamba1Constants, Mamba1Tokens
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.parts import Parts, Rows, fused, row_parallel, shard
from megatron_hybrid.layers.recurrent import RecurrentMixer

if TYPE_CHECKING:
    from megatron_hybrid.layers.mamba1 import Mamba1Config


class HeadedMamba1(RecurrentMixer):
    """Heads are split over the ranks. Of the input projection's rows those of x and of the gate z
    take turns, channel by channel: | x0 | z0 | x1 | z1 | ..."""

    kind = "headed_mamba1"

    def __init__(self, config: Mamba1Config, context: LayerContext) -> None:
        assert config.heads is not None
        heads = context.share(config.heads, "Mamba heads")
        channels, size, rank = config.inner_size // config.heads, config.state_size, config.dt_rank
        inner = heads * channels
        super().__init__(
            context,
            [inner],
            config.conv_width,
            config.conv_bias,
            state=(heads, channels, size),
            inputs=((channels,), (channels,), (size,)) * heads,  # x, dt, B
            kernel_chunk=config.kernel_chunk,
            scaled_over=-1,
        )
        self.config = config
        self.heads, self.channels = heads, channels
        self.low_sections = (rank, size, size)  # of step sizes, B, C
        self.in_proj = context.to_rows(2 * inner, config.proj_bias)
        self.x_proj = parameter((heads, sum(self.low_sections), channels), context.dtype)
        self.dt_proj = parameter((heads, channels, rank), context.dtype)
        self.out_proj = context.to_hidden(inner, config.proj_bias)
        self.dt_bias = parameter((heads, channels), torch.float32)
        self.A_log = parameter((heads, channels, size), torch.float32)
        self.D = parameter((heads, channels), torch.float32)
        self.A: Tensor  # [heads, channels, state] float32, negative; see after_loading

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.mamba1_scan

    def weight_parts(self) -> Parts:
        rank, total, heads = self.parallel.rank, self.config.inner_size, self.config.heads
        assert heads is not None
        inner = self.heads * self.channels
        yield from fused([Rows("in_proj", 2 * inner, rank * 2 * inner, 2 * total)], self.in_proj)
        yield from self.conv_parts("conv1d", [rank * inner], total)
        yield shard("x_proj_weight", self.x_proj, 0, rank, heads)
        yield shard("dt_proj_weight", self.dt_proj, 0, rank, heads)
        yield shard("dt_proj_bias", self.dt_bias, 0, rank, heads)
        yield shard("A_log", self.A_log, 0, rank, heads)
        yield shard("D", self.D, 0, rank, heads)
        yield from row_parallel("out_proj", self.out_proj)

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("A", -self.A_log.exp())

    def forward(self, inputs: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels = plans.kernels
        projected = self.in_proj(inputs, kernels).unflatten(1, (-1, 2))
        convolved, z = projected.movedim(2, 0).contiguous().unbind()
        x, seed = self.convolve(convolved, plans), self.rounding_seed(plans)
        y = torch.empty_like(x)
        for head in range(self.heads):
            own = slice(head * self.channels, (head + 1) * self.channels)
            projected = kernels.linear.multiply(x[:, own], self.x_proj[head])
            low, b, c = projected.split(self.low_sections, dim=1)
            dt = kernels.linear.multiply(low, self.dt_proj[head])
            tokens = Mamba1Tokens(x[:, own], z[:, own], dt, b, c)
            constants = Mamba1Constants(self.A[head], self.D[head], self.dt_bias[head], seed)
            y[:, own] = self.scan(tokens, constants, plans, head)
        return self.out_proj(y, kernels)
