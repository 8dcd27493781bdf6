"""Latent attention under autograd, and what it has in common with attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8, AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from megatron_hybrid.kernels.protocols import Plan
from megatron_hybrid.training import formulas
from megatron_hybrid.training.formulas import Sequences
from megatron_hybrid.training.nodes import Over, recomputed


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Of kernels over a KV cache."""

    inner: Plan
    scale: float
    kv_slot: Tensor
    window: int = 0  # of AttentionShape


def stored_rows(stored: Tensor, places: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What a cache has in these places."""
    rows = stored.flatten(0, 1)
    if stored.dtype == FP8:  # torch moves FP8 on some devices only
        taken = rows.view(torch.uint8).index_select(0, places).view(FP8)
        return (taken.float() * scale).to(dtype)
    return rows.index_select(0, places)


@dataclass(frozen=True)
class LatentAttentionUnderAutograd(Over):
    """Gradients go from queries to the latents that `prepare` put into the cache."""

    sequences: Sequences
    kept: dict[int, Tensor] = field(default_factory=dict)  # by the cache's keys

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> PassPlan:
        """As in LatentAttention."""
        assert not shape.first_position
        return PassPlan(self.inner.plan(paged, shape), shape.scale, paged.kv_slot)

    def prepare(
        self,
        query: Tensor,
        latent: Tensor,
        norm: LatentNorm,
        rotation: Any,
        interleaved: bool,
        cache: KVCache,
        plan: PassPlan,
    ) -> Tensor:
        """As in LatentAttention."""
        turns, angles = (None, None) if rotation is None else rotation

        def kernel(query: Tensor, latent: Tensor, weight: Tensor) -> Any:
            own = LatentNorm(weight, norm.eps)
            query = self.inner.prepare(
                query.clone(), latent, own, turns, interleaved, cache, plan.inner
            )
            # What attention will see of them; rounded to FP8, their gradients pass as they are.
            return query, stored_rows(cache.key, plan.kv_slot, cache.k_scale, latent.dtype)

        def formula(query: Tensor, latent: Tensor, weight: Tensor) -> Any:
            own = LatentNorm(weight, norm.eps)
            return formulas.latents(query, latent, own, angles, interleaved)

        query, key = recomputed(kernel, formula, query, latent, norm.weight)
        self.kept[id(cache.key)] = key
        found: Tensor = query
        return found

    def attend(
        self, query: Tensor, weights: LatentWeights, cache: KVCache, plan: PassPlan
    ) -> Tensor:
        """As in LatentAttention."""

        def kernel(query: Tensor, _: Tensor, both: Tensor) -> Any:
            return self.inner.attend(query, weights._replace(both=both), cache, plan.inner)

        def formula(query: Tensor, key: Tensor, both: Tensor) -> Any:
            own = weights._replace(both=both)
            return formulas.latent_attention(query, key, own, plan.scale, self.sequences)

        key = self.kept.pop(id(cache.key))
        y: Tensor = recomputed(kernel, formula, query, key, weights.both)
        return y
