"""The Mamba2 mixer: projection, short convolution, selective scan, gated norm, projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import Inputs, Mamba2Constants, Mamba2Tokens
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.norm import GatedRMSNorm
from megatron_hybrid.layers.parts import Parts, Rows, fused, prefixed, row_parallel, shard
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class Mamba2Config:
    """`norm`: "gate_first" normalises y * silu(z), "norm_first" y alone before the gate, "none"
    only gates. `in_multipliers` scale what the input projection gives for z, x, B, C and dt,
    `input_multiplier` what goes into it, `out_multiplier` the mixer's result."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    kernel_chunk: int
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm: str = "gate_first"
    norm_eps: float | None = None  # None: that of the model's other norms
    in_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    input_multiplier: float = 1.0
    out_multiplier: float = 1.0

    @property
    def inner_size(self) -> int:
        """Channels of x and of the gate."""
        return self.num_heads * self.head_dim

    def mixer(self, context: LayerContext) -> Mamba2:
        """As in LayerConfig."""
        return Mamba2(self, context)


class Mamba2(RecurrentMixer):
    """Heads are split over the ranks; groups too, or replicated where there are fewer than ranks.

    A rank's rows of the input projection, and its channels of the convolution:

        | z | x | B | C | dt |          | x | B | C |
    """

    kind = "mamba2"

    def __init__(self, config: Mamba2Config, context: LayerContext) -> None:
        context.spread(config.num_heads, "Mamba heads", config.num_groups, "Mamba groups")
        heads = context.share(config.num_heads, "Mamba heads")
        groups = context.share(config.num_groups, "Mamba groups", or_copy=True)
        inner, per_group = heads * config.head_dim, groups * config.state_size
        super().__init__(
            context,
            [inner, per_group, per_group],
            config.conv_width,
            config.conv_bias,
            state=(heads, config.head_dim, config.state_size),
            # x, B, dt
            inputs=((heads, config.head_dim), (groups, config.state_size), (heads,)),
            kernel_chunk=config.kernel_chunk,
        )
        self.config = config
        self.heads, self.groups, self.inner = heads, groups, inner
        self.in_sections = [inner, sum(self.conv_sections), heads]  # z, convolved, dt
        self.in_proj = context.to_rows(sum(self.in_sections), config.proj_bias)
        self.out_proj = context.to_hidden(inner, config.out_bias)
        self.dt_bias = parameter((heads,), torch.float32)
        self.A_log = parameter((heads,), torch.float32)
        self.D = parameter((heads,), torch.float32)
        self.A: Tensor  # [heads] float32, negative; see after_loading
        self.norm = None
        if config.norm != "none":
            self.norm = GatedRMSNorm(
                config.inner_size,
                config.num_groups,
                context.eps if config.norm_eps is None else config.norm_eps,
                context.dtype,
                context.parallel,
                norm_first=config.norm == "norm_first",
            )

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.mamba2_scan

    def weight_parts(self) -> Parts:
        rank, config = self.parallel.rank, self.config
        all_groups = config.num_groups * config.state_size
        # x, B and C of this rank, counted from where the whole x begins
        first_group = rank * config.num_groups // self.parallel.size
        starts = [rank * self.inner, config.inner_size + first_group * config.state_size]
        starts.append(starts[1] + all_groups)
        conv_total = config.inner_size + 2 * all_groups
        total = config.inner_size + conv_total + config.num_heads
        in_starts = [
            rank * self.inner,
            *(config.inner_size + start for start in starts),
            config.inner_size + conv_total + rank * self.heads,
        ]
        counts = [self.inner, *self.conv_sections, self.heads]
        rows = [
            Rows("in_proj", count, start, total, multiplier)
            for count, start, multiplier in zip(
                counts, in_starts, config.in_multipliers, strict=True
            )
        ]
        yield from fused(rows, self.in_proj, config.input_multiplier)
        yield from self.conv_parts("conv1d", starts, conv_total)
        for name in ("dt_bias", "A_log", "D"):
            yield shard(name, getattr(self, name), 0, rank, config.num_heads)
        if self.norm is not None:
            yield from prefixed("norm", self.norm.weight_parts())
        yield from row_parallel("out_proj", self.out_proj, config.out_multiplier)

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("A", -self.A_log.exp())

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels = plans.kernels
        gate, convolved, dt = self.in_proj.split(x, self.in_sections, kernels)
        values, b, c = self.convolve(convolved, plans).split(self.conv_sections, dim=1)
        values = values.unflatten(1, (self.heads, self.config.head_dim))
        b, c = (group.unflatten(1, (self.groups, self.config.state_size)) for group in (b, c))
        tokens = Mamba2Tokens(values, b, c, dt)
        constants = Mamba2Constants(
            self.A, self.D, self.dt_bias, self.config.dt_limit, self.rounding_seed(plans)
        )
        y = self.scan(tokens, constants, plans).reshape(-1, self.inner)
        if self.norm is None:
            gated = kernels.activation.gate(y, gate, "silu", self.out_proj.reader)
        else:
            gated = self.norm(y, gate, kernels, self.out_proj.reader)
        return self.out_proj(gated, kernels)
