"""RMS norms in plain torch. Statistics are in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse_rms(x: Tensor, size: int, eps: float) -> Tensor:
    """1 / sqrt(sum of squares over the last dimension / size + eps), [..., 1] float32.

    On a CPU this is much faster than F.rms_norm: 0.1 ms against 2 ms for [3000, 256].
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(size).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: [..., size] -> the same in weight's dtype."""
    dtype = weight.dtype
    scaled = x.to(dtype) * inverse_rms(x, x.shape[-1], eps)
    return scaled.to(dtype).mul_(weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, multiplier: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of residual + multiplier * x, and that sum, which may take `residual`'s place.

    x [tokens, size], residual [tokens, size] (float32, or x's dtype) -> norm in weight's dtype,
    sum in residual's.
    """
    total = torch.add(residual, x, alpha=multiplier)
    return rms_norm(total, weight, eps), total


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    """weight * norm(x * silu(gate)), each group of channels normalised by itself.

    x, gate [tokens, channels] (rows may be strided) -> the same in weight's dtype.
    """
    gated = F.silu(gate.float()).mul_(x)
    by_group = gated.view(gated.shape[0], -1, group_size)
    by_group.mul_(inverse_rms(by_group, group_size, eps))
    return gated.to(weight.dtype).mul_(weight)
