"""The Mamba1 mixer: projection, short convolution, step sizes and B, C from the convolved inputs,
selective scan with its gate, projection (Gu and Dao, "Mamba", arXiv 2312.00752)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.projected import LowRank
from megatron_hybrid.kernels.protocols import Inputs, Mamba1Constants, Mamba1Tokens
from megatron_hybrid.kernels.replay_protocol import Replays
from megatron_hybrid.layers.headed_mamba1 import HeadedMamba1
from megatron_hybrid.layers.kernel_plans import KernelPlans, PartKind
from megatron_hybrid.layers.linear import RowParallelLinear
from megatron_hybrid.layers.mixer import LayerContext, parameter
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, Rows, fused, prefixed, row_parallel, shard
from megatron_hybrid.layers.recurrent import RecurrentMixer


@dataclass(frozen=True)
class Mamba1Config:
    """`norms`: of the step sizes' low rank, B and C: "none", "learned" (Jamba) or "plain", without
    weights (Falcon-Mamba)."""

    inner_size: int
    state_size: int
    dt_rank: int
    conv_width: int
    kernel_chunk: int = 16
    conv_bias: bool = True
    proj_bias: bool = False
    norms: str = "none"
    norms_eps: float = 1e-6
    heads: int | None = None  # with a scan each (Zamba); None: one scan of all channels

    def mixer(self, context: LayerContext) -> RecurrentMixer:
        """As in LayerConfig."""
        return Mamba1(self, context) if self.heads is None else HeadedMamba1(self, context)


class Mamba1(RecurrentMixer):
    """Channels are split over the ranks. A rank's rows of the input projection: | x | z |."""

    kind = "mamba1"

    def __init__(self, config: Mamba1Config, context: LayerContext) -> None:
        parallel, dtype = context.parallel, context.dtype
        inner, size = context.share(config.inner_size, "Mamba channels"), config.state_size
        super().__init__(
            context,
            [inner],
            config.conv_width,
            config.conv_bias,
            state=(inner, size),
            inputs=((inner,), (inner,), (size,)),  # x, dt, B
            kernel_chunk=config.kernel_chunk,
            scaled_over=-1,  # a channel's states are of one size, channels are not
        )
        self.config = config
        self.inner = inner
        self.low_sections = (config.dt_rank, size, size)  # of step sizes, B, C
        self.in_proj = context.to_rows(2 * inner, config.proj_bias)
        self.x_proj = RowParallelLinear(
            inner, sum(self.low_sections), bias=False, dtype=dtype, parallel=parallel
        )
        self.dt_proj = context.to_rows(inner, bias=False, inputs=config.dt_rank)
        self.out_proj = context.to_hidden(inner, config.proj_bias)
        self.dt_norm = self.b_norm = self.c_norm = None
        if config.norms != "none":
            self.dt_norm, self.b_norm, self.c_norm = (
                RMSNorm(width, config.norms_eps, dtype) for width in self.low_sections
            )
        self.dt_bias = parameter((inner,), torch.float32)
        self.A_log = parameter((inner, size), torch.float32)
        self.D = parameter((inner,), torch.float32)
        self.A: Tensor  # [channels, state] float32, negative; see after_loading
        self.low_weights: Tensor  # [sum(low_sections)] of the norms

    def kernel(self, kernels: KernelSet | Replays) -> Any:
        return kernels.mamba1_scan

    def weight_parts(self) -> Parts:
        rank, total = self.parallel.rank, self.config.inner_size
        first = rank * self.inner
        halves = [Rows("in_proj", self.inner, half + first, 2 * total) for half in (0, total)]
        yield from fused(halves, self.in_proj)
        yield from self.conv_parts("conv1d", [first], total)
        yield from row_parallel("x_proj", self.x_proj)
        if self.config.norms == "learned":
            for name in ("dt_norm", "b_norm", "c_norm"):
                yield from prefixed(name, getattr(self, name).weight_parts())
        yield from fused([Rows("dt_proj", self.inner, first, total)], self.dt_proj)
        yield shard("dt_proj.bias", self.dt_bias, 0, rank, total)
        yield shard("A_log", self.A_log, 0, rank, total)
        yield shard("D", self.D, 0, rank, total)
        yield from row_parallel("out_proj", self.out_proj)

    def after_loading(self) -> None:
        super().after_loading()
        self.derive("A", -self.A_log.exp())
        if self.config.norms == "plain":
            for norm in (self.dt_norm, self.b_norm, self.c_norm):
                assert norm is not None
                norm.weight.fill_(1)
        if self.dt_norm is not None and self.b_norm is not None and self.c_norm is not None:
            norms = (self.dt_norm, self.b_norm, self.c_norm)
            self.derive("low_weights", torch.cat([norm.weight for norm in norms]))

    def forward(self, x: Inputs, plans: KernelPlans) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; reads and writes the sequences' states."""
        kernels = plans.kernels
        x, z = self.in_proj.split(x, [self.inner, self.inner], kernels)
        x = self.convolve(x, plans)
        return self.out_proj(self._scanned(x, z, self.x_proj(x, kernels), plans), kernels)

    def _scanned(self, x: Tensor, z: Tensor, projected: Tensor, plans: KernelPlans) -> Tensor:
        """The norms and the step sizes of what x_proj gives, and the scan -> [tokens, channels]."""
        kernels = plans.kernels
        constants = Mamba1Constants(self.A, self.D, self.dt_bias, self.rounding_seed(plans))
        fused, part = kernels.projected_mamba1, self.only_part(plans, PartKind.DECODE)
        is_plain = self.dt_proj.is_plain and kernels.adapters is None
        if fused is not None and part is not None and is_plain:
            low_rank, state = self._low_rank(projected), self.state(plans).ssm
            if fused.takes(part.scan, low_rank, state):
                return fused.decode(x, z, low_rank, constants, state, part.scan)
        if self.dt_norm is not None:
            projected = kernels.norm.rms_norm_parts(
                projected, self.low_sections, self.low_weights, self.config.norms_eps
            )
        low, b, c = projected.split(self.low_sections, dim=1)
        tokens = Mamba1Tokens(x, z, self.dt_proj(low, kernels), b, c)
        return self.scan(tokens, constants, plans)

    def _low_rank(self, projected: Tensor) -> LowRank:
        """Of a plain dt_proj."""
        weight = self.dt_proj.weight
        assert isinstance(weight, Tensor)
        norms = None if self.dt_norm is None else self.low_weights
        return LowRank(projected, weight, norms, self.config.norms_eps)
