"""RMS norms. Statistics are in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.layers.parts import Parts, shard, whole
from megatron_hybrid.parallel import ParallelContext


def inverse_rms(x: Tensor, size: int, eps: float) -> Tensor:
    """1 / sqrt(sum of squares over the last dimension / size + eps), [..., 1] float32.

    On a CPU this is much faster than F.rms_norm: 0.1 ms against 2 ms for [3000, 256].
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(size).add_(eps).rsqrt_()


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
        dtype = self.weight.dtype
        scaled = x.to(dtype) * inverse_rms(x, x.shape[-1], self.eps)
        return scaled.to(dtype).mul_(self.weight)


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
        """x, gate [tokens, channels / ranks] -> the same in the weight's dtype."""
        gated = F.silu(gate.float()).mul_(x)
        by_group = gated.view(gated.shape[0], self.local_groups, -1)
        if self.spans_ranks:
            by_group.mul_(self._inverse_rms_over_ranks(by_group))
        else:
            by_group.mul_(inverse_rms(by_group, self.group_size, self.eps))
        return gated.to(self.weight.dtype).mul_(self.weight)

    def _inverse_rms_over_ranks(self, part: Tensor) -> Tensor:
        """part [tokens, 1, channels / ranks] of this rank's group -> [tokens, 1, 1]."""
        squares = part.new_zeros((part.shape[0], self.groups))
        squares[:, self.my_group] = part[:, 0].square().sum(dim=1)
        squares = self.parallel.all_reduce(squares)[:, self.my_group, None, None]
        return squares.div(self.group_size).add_(self.eps).rsqrt_()
