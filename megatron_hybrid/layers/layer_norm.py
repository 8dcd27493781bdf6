"""Layer norms (Ba, Kiros and Hinton, 2016), in plain torch, for models that have those."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import Unsummed
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.linear.reference import rounded
from megatron_hybrid.kernels.protocols import Inputs, Reader
from megatron_hybrid.layers.mixer import parameter
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Parts, whole
from megatron_hybrid.parallel import RankGroup


class LayerNorm(RMSNorm):
    """(x - mean(x)) / std(x) * weight + bias, where others have an RMSNorm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, eps, dtype)
        self.bias = parameter((size,), dtype)

    def weight_parts(self) -> Parts:
        yield from super().weight_parts()
        yield whole("bias", self.bias)

    def forward(self, x: Tensor, kernels: KernelSet) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(self.dtype)

    def after_adding(
        self,
        x: Tensor | Unsummed,
        residual: Tensor,
        multiplier: float,
        kernels: KernelSet,
        ranks: RankGroup | None,
        into: Reader | None = None,
    ) -> tuple[Inputs, Tensor]:
        x = x if isinstance(x, Tensor) else x.sum()
        if ranks is not None:
            x = ranks.all_reduce(x)
        residual = torch.add(residual, x, alpha=multiplier)
        return rounded(self(residual, kernels), into), residual
