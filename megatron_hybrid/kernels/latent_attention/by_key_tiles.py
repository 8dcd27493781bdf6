"""Multi-head latent attention in plain torch of which a query's bits do not depend on the others:
what a CPU runs in batch-invariant mode."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import KVCache
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from megatron_hybrid.kernels.latent_attention.reference import prepare
from megatron_hybrid.kernels.linear.whole_tiles import linear
from megatron_hybrid.kernels.paged_attention import by_key_tiles
from megatron_hybrid.kernels.paged_attention.by_key_tiles import (
    AttentionPlan,
    most_captured,
    plan,
)

__all__ = ["attend", "most_captured", "plan", "prepare"]


def attend(query: Tensor, weights: LatentWeights, cache: KVCache, plan: AttentionPlan) -> Tensor:
    """As in LatentAttention."""
    nope = weights.nope
    absorbed = _by_head(query[..., :nope], weights.key.transpose(1, 2))
    wide = torch.cat((absorbed, query[..., nope:]), dim=-1)
    return _by_head(by_key_tiles.attend(wide, cache, plan), weights.value)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, K], weight [heads, N, K] -> [tokens, heads, N]."""
    products = [linear(own, one) for own, one in zip(x.unbind(1), weight.unbind(0), strict=True)]
    return torch.stack(products, dim=1)
