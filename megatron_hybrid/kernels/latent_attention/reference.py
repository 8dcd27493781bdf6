"""Multi-head latent attention in plain torch: paged attention of one KV head, whose values are the
first numbers of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import KVCache
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from megatron_hybrid.kernels.norm.reference import rms_norm
from megatron_hybrid.kernels.paged_attention import reference
from megatron_hybrid.kernels.paged_attention.reference import AttentionPlan, most_captured, plan
from megatron_hybrid.kernels.protocols import Plan

__all__ = ["attend", "most_captured", "plan", "prepare"]

# Scores, and copies of keys, of as many heads as are computed at once: bounds what they take.
_NUMBERS = 1 << 26


def prepare(
    query: Tensor,
    latent: Tensor,
    norm: LatentNorm,
    rotation: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    cache: KVCache,
    plan: Plan,
) -> Tensor:
    """As in LatentAttention."""
    size = len(norm.weight)
    normed = rms_norm(latent[:, :size], norm.weight, norm.eps, latent.dtype)
    behind = latent[:, None, size:]
    if rotation is not None:
        behind = rotated(behind, rotation, interleaved)
        own = query[..., query.shape[-1] - behind.shape[-1] :]
        own.copy_(rotated(own, rotation, interleaved))
    key = torch.cat((normed[:, None], behind), dim=-1)
    reference.store(key, key[..., :size], cache, plan.kv_slot)  # values are among the keys
    return query


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """x [tokens, heads, rotated] -> the same; each number stays in its place."""
    cosines, sines = rotation
    half = x.shape[-1] // 2
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    cosine, sine = cosines[..., :half], sines[..., half:]
    turned = first * cosine - second * sine, second * cosine + first * sine
    if interleaved:
        return torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat(turned, dim=-1)


def attend(query: Tensor, weights: LatentWeights, cache: KVCache, plan: AttentionPlan) -> Tensor:
    """As in LatentAttention."""
    nope = weights.nope
    absorbed = torch.einsum("thn,hnl->thl", query[..., :nope], weights.key)
    wide = torch.cat((absorbed, query[..., nope:]), dim=-1)
    numbers = (n * k * (q + wide.shape[2]) for n, q, k in (group.shape for group in plan.groups))
    heads = max(1, _NUMBERS // max(numbers, default=1))
    some = [reference.attend(own, cache, plan) for own in wide.split(heads, dim=1)]
    latents = some[0] if len(some) == 1 else torch.cat(some, dim=1)
    return torch.einsum("thl,hvl->thv", latents, weights.value)
