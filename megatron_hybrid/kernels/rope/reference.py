"""Rotary position embedding (Su et al., "RoFormer", 2021) in plain torch, on the first dimensions
of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def plan(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [tokens] -> cosines and signed sines [tokens, 1, rotary_dim], once a step.

    The sines of the first half are negative: x * cos + swap_halves(x) * sin rotates.
    """
    angles = positions[:, None].float() * frequencies
    cosine, sine = angles.cos(), angles.sin()
    cosines = torch.cat((cosine, cosine), dim=1).to(dtype)
    sines = torch.cat((-sine, sine), dim=1).to(dtype)
    return cosines[:, None], sines[:, None]


def rotate(x: Tensor, plan: tuple[Tensor, Tensor]) -> Tensor:
    """As in Rope."""
    cosines, sines = plan
    rotary_dim = cosines.shape[-1]
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:rotary_dim], x[..., :half]), dim=-1)
    rotated = torch.addcmul(x[..., :rotary_dim] * cosines, swapped, sines)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
