"""RMS norms. Statistics are in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the weight's dtype."""
        x = x.to(self.weight.dtype)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


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
        self.local_groups = max(groups // parallel.size, 1)
        self.spans_ranks = groups < parallel.size
        # With fewer groups than ranks: which group this rank has a part of.
        self.groups = groups
        self.my_group = parallel.rank * groups // parallel.size
        self.weight = nn.Parameter(torch.empty(local, dtype=dtype), requires_grad=False)

    def weight_parts(self) -> Parts:
        yield shard("weight", self.weight, 0, self.parallel.rank, self.channels)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [tokens, channels / ranks] -> [tokens, channels / ranks] in the weight's dtype."""
        gated = F.silu(gate.float()).mul_(x)
        by_group = gated.view(gated.shape[0], self.local_groups, -1)
        squares = by_group.square().sum(dim=2)  # [tokens, local groups]
        if self.spans_ranks:
            everyone = squares.new_zeros((squares.shape[0], self.groups))
            everyone[:, self.my_group] = squares[:, 0]
            everyone = self.parallel.all_reduce(everyone)
            squares = everyone[:, self.my_group, None]
        by_group.mul_(squares.div_(self.group_size).add_(self.eps).rsqrt_()[:, :, None])
        return gated.to(self.weight.dtype) * self.weight
