"""Rotary position embedding (Su et al., "RoFormer", 2021) in plain torch, on the first dimensions
of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import KVCache
from megatron_hybrid.kernels.norm.reference import rms_norm
from megatron_hybrid.kernels.paged_attention.reference import append
from megatron_hybrid.kernels.protocols import HeadNorms, Plan


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
    """x [tokens, heads, head_dim], heads may be strided -> the same, its first rotary_dim
    dimensions rotated."""
    cosines, sines = plan
    rotary_dim = cosines.shape[-1]
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:rotary_dim], x[..., :half]), dim=-1)
    rotated = torch.addcmul(x[..., :rotary_dim] * cosines, swapped, sines)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def prepare(
    qkv: Tensor,
    norms: HeadNorms | None,
    plan: tuple[Tensor, Tensor] | None,
    cache: KVCache,
    attention: Plan,
) -> Tensor:
    """As in Rope."""
    query, key, value = _turned(qkv, norms, plan, cache.key.shape[2])
    append(key, value, cache, attention)
    return query


def turn(
    qkv: Tensor, norms: HeadNorms | None, plan: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As in Rope."""
    return _turned(qkv, norms, plan, qkv.shape[1] // 3)


def _turned(
    qkv: Tensor, norms: HeadNorms | None, plan: tuple[Tensor, Tensor] | None, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    qk, value = qkv.tensor_split([qkv.shape[1] - kv_heads], dim=1)
    if norms is not None:
        query, key = qk.tensor_split([qk.shape[1] - kv_heads], dim=1)
        query = rms_norm(query, norms.query, norms.eps, qkv.dtype)
        qk = torch.cat((query, rms_norm(key, norms.key, norms.eps, qkv.dtype)), dim=1)
    if plan is not None:
        qk = rotate(qk, plan)
    query, key = qk.tensor_split([qk.shape[1] - kv_heads], dim=1)
    return query, key, value
