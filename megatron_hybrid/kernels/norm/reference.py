"""RMS norms in plain torch. Statistics are in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import ACTIVATIONS
from megatron_hybrid.kernels.linear.reference import rounded
from megatron_hybrid.kernels.protocols import Inputs, Reader


def inverse_rms(x: Tensor, size: int, eps: float) -> Tensor:
    """1 / sqrt(sum of squares over the last dimension / size + eps), [..., 1] float32.

    On a CPU this is much faster than F.rms_norm: 0.1 ms against 2 ms for [3000, 256].
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(size).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """As in Norm."""
    scaled = x.to(weight.dtype) * inverse_rms(x, x.shape[-1], eps)
    return scaled.to(weight.dtype).mul_(weight).to(dtype or weight.dtype)


def rms_norm_parts(x: Tensor, sections: tuple[int, int, int], weight: Tensor, eps: float) -> Tensor:
    """As in Norm."""
    parts = zip(x.split(sections, dim=1), weight.split(sections), strict=True)
    return torch.cat([rms_norm(part, own, eps) for part, own in parts], dim=1)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    multiplier: float,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    into: Reader | None = None,
) -> tuple[Inputs, Tensor]:
    """As in Norm."""
    # In float32: on a CPU a sum of bfloat16 would round the multiplier to bfloat16 first.
    total = torch.add(residual.float(), x.float(), alpha=multiplier).to(residual.dtype)
    return rounded(rms_norm(total, weight, eps, dtype), into), total


def l2_clip(x: Tensor, scale: Tensor | None, most: float) -> Tensor:
    """As in Norm."""
    y = x.float() if scale is None else x.float() * scale
    length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return (y * (most / (length + 1e-6)).clamp(max=1)).to(x.dtype)


# add_rms_norm of the sum over ranks, where a kernel can do both; see triton.py.
add_rms_norm_over_ranks = None


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    norm_first: bool = False,
    into: Reader | None = None,
    activation: str = "silu",
) -> Inputs:
    """As in Norm."""
    gates = ACTIVATIONS[activation](gate.float())
    values = x.float() if norm_first else gates.mul_(x)
    by_group = values.reshape(values.shape[0], -1, group_size)
    normed = (by_group * inverse_rms(by_group, group_size, eps)).view(values.shape)
    normed = normed.to(weight.dtype).mul_(weight)
    y = gates.mul_(normed).to(weight.dtype) if norm_first else normed
    return rounded(y, into)
