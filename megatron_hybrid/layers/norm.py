"""RMS norms. Statistics are in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.parts import Parts, shard, whole
from megatron_hybrid.parallel import ParallelContext


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def weight_parts(self) -> Parts:
        yield whole("weight", self.weight)

    def forward(self, x: Tensor, kernels: KernelSet) -> Tensor:
        """[..., size] -> [..., size] in the weight's dtype."""
        return kernels.norm.rms_norm(x, self.weight, self.eps)

    def after_adding(
        self, x: Tensor, residual: Tensor, multiplier: float, kernels: KernelSet
    ) -> tuple[Tensor, Tensor]:
        """The norm of residual + multiplier * x, and that sum; `residual` may be overwritten."""
        return kernels.norm.add_rms_norm(x, residual, multiplier, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """weight * norm(x * silu(gate)), each group of channels normalised by itself.

    The gate comes before the norm (mamba_ssm's `norm_before_gate=False`), which Nemotron-H, Bamba
    and Granite 4 have in common. Where a group spans ranks its sum of squares is all-reduced.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float,
        dtype: torch.dtype,
        parallel: ParallelContext,
    ) -> None:
        """`channels` and `groups` count all ranks'."""
        super().__init__()
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
        yield shard("weight", self.weight, 0, self.parallel.rank, self.channels)

    def forward(self, x: Tensor, gate: Tensor, kernels: KernelSet) -> Tensor:
        """x, gate [tokens, channels / ranks] -> the same in the weight's dtype."""
        if not self.spans_ranks:
            return kernels.norm.gated_rms_norm(x, gate, self.weight, self.group_size, self.eps)
        gated = F.silu(gate.float()).mul_(x)
        gated.mul_(self._inverse_rms_over_ranks(gated[:, None])[:, 0])
        return gated.to(self.weight.dtype).mul_(self.weight)

    def _inverse_rms_over_ranks(self, part: Tensor) -> Tensor:
        """part [tokens, 1, channels / ranks] of this rank's group -> [tokens, 1, 1]."""
        squares = part.new_zeros((part.shape[0], self.groups))
        squares[:, self.my_group] = part[:, 0].square().sum(dim=1)
        squares = self.parallel.all_reduce(squares)[:, self.my_group, None, None]
        return squares.div(self.group_size).add_(self.eps).rsqrt_()
