"""RMS norms. Statistics are in float32."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.activation.reference import ACTIVATIONS
from megatron_hybrid.kernels.experts.protocol import Unsummed
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.parts import Parts, shard, whole
from megatron_hybrid.parallel import RankGroup


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension; of a `zero_centered` norm the checkpoint holds
    weight - 1, and the weight is kept in float32."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.dtype = dtype
        self.zero_centered = zero_centered
        kept = torch.float32 if zero_centered else dtype
        self.weight = nn.Parameter(torch.empty(size, dtype=kept), requires_grad=False)

    def weight_parts(self) -> Parts:
        """Its weight, which every rank holds whole."""
        yield replace(whole("weight", self.weight), offset=1.0 if self.zero_centered else 0.0)

    def forward(self, x: Tensor, kernels: KernelSet) -> Tensor:
        """[..., size] -> [..., size] in the model's dtype."""
        return kernels.norm.rms_norm(x, self.weight, self.eps, self.dtype)

    def after_adding(
        self,
        x: Tensor | Unsummed,
        residual: Tensor,
        multiplier: float,
        kernels: KernelSet,
        ranks: RankGroup | None,
        into: Reader | None = None,
    ) -> tuple[Inputs, Tensor]:
        """The norm of residual + multiplier * (sum of the ranks' x), and that sum; `residual` may
        be overwritten. `ranks`: None: x is the sum. `into`: who reads the norm."""
        alone = ranks is None or ranks.size == 1
        if not isinstance(x, Tensor):
            if alone:
                return x.add_rms_norm(residual, multiplier, self.weight, self.eps, self.dtype, into)
            x = x.sum()
        if ranks is not None and not alone:
            fused = kernels.norm.add_rms_norm_over_ranks
            shared = fused and ranks.shared_rows(x.shape[0], x.shape[1], x.dtype)
            if fused and shared is not None:
                return fused(x, residual, multiplier, self.weight, self.eps, self.dtype, shared)
            x = ranks.all_reduce(x)
        return kernels.norm.add_rms_norm(
            x, residual, multiplier, self.weight, self.eps, self.dtype, into
        )


class StreamsNorm(RMSNorm):
    """Of several streams, each normed by itself, with weights of its own."""

    def __init__(
        self, streams: int, size: int, eps: float, dtype: torch.dtype, zero_centered: bool = False
    ) -> None:
        """`size`: of one stream."""
        super().__init__(streams * size, eps, dtype, zero_centered)
        self.streams = streams

    def forward(self, x: Tensor, kernels: KernelSet) -> Tensor:
        """[tokens, streams * size] -> [tokens, streams, size] in the model's dtype."""
        weight = self.weight.view(self.streams, -1)
        return kernels.norm.rms_norm(x.view(-1, *weight.shape), weight, self.eps, self.dtype)


class GatedRMSNorm(nn.Module):
    """weight * norm(x * act(gate)), each group of channels normalised by itself; where `norm_first`
    (mamba_ssm's `norm_before_gate`), weight * norm(x) * act(gate). `activation`: as in Norm.

    Where a group spans ranks its sum of squares is all-reduced.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float,
        dtype: torch.dtype,
        parallel: RankGroup,
        norm_first: bool = False,
        activation: str = "silu",
    ) -> None:
        """`channels` and `groups` count all ranks'."""
        super().__init__()
        self.activation = activation
        self.norm_first = norm_first
        self.channels = channels
        self.group_size = channels // groups
        self.eps = eps
        self.parallel = parallel
        local = channels // parallel.size
        self.spans_ranks = groups < parallel.size
        # With fewer groups than ranks: which group this rank has a part of.
        self.groups = groups
        self.my_group = parallel.rank * groups // parallel.size
        self.weight = nn.Parameter(torch.empty(local, dtype=dtype), requires_grad=False)

    def weight_parts(self) -> Parts:
        """This rank's channels of its weight."""
        yield shard("weight", self.weight, 0, self.parallel.rank, self.channels)

    def forward(
        self, x: Tensor, gate: Tensor, kernels: KernelSet, into: Reader | None = None
    ) -> Inputs:
        """x, gate [tokens, channels / ranks] -> the same in the weight's dtype, or rounded for who
        reads it."""
        if not self.spans_ranks:
            return kernels.norm.gated_rms_norm(
                x, gate, self.weight, self.group_size, self.eps, self.norm_first, into,
                self.activation,
            )  # fmt: skip
        gates = ACTIVATIONS[self.activation](gate.float())
        values = x.float() if self.norm_first else gates * x
        values = values * self._inverse_rms_over_ranks(values[:, None])[:, 0]
        normed = values.to(self.weight.dtype).mul_(self.weight)
        return gates.mul_(normed).to(self.weight.dtype) if self.norm_first else normed

    def _inverse_rms_over_ranks(self, part: Tensor) -> Tensor:
        """part [tokens, 1, channels / ranks] of this rank's group -> [tokens, 1, 1]."""
        squares = part.new_zeros((part.shape[0], self.groups))
        squares[:, self.my_group] = part[:, 0].square().sum(dim=1)
        squares = self.parallel.all_reduce(squares)[:, self.my_group, None, None]
        return squares.div(self.group_size).add_(self.eps).rsqrt_()
