"""Attention with an index in plain torch of which a query's bits do not depend on the others: what
a CPU runs in batch-invariant mode. What the cache holds is reference.py's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape, KVCache, PagedSequences
from megatron_hybrid.kernels.indexed_attention.reference import (
    chosen_groups,
    ends_of_groups,
    sees,
    store,
    turn,
)
from megatron_hybrid.kernels.latent_attention import by_key_tiles as latent_attention
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from megatron_hybrid.kernels.paged_attention import by_key_tiles as attention
from megatron_hybrid.kernels.paged_attention.by_key_tiles import KEYS, AttentionPlan, Queries

__all__ = ["attend", "attend_latents", "plan", "select", "store", "turn"]

# Groups whose keys are multiplied with a query at a time.
_GROUPS = 16


@dataclass(slots=True)
class IndexedPlan:
    """Of a step, the same for every layer."""

    every: AttentionPlan
    index: IndexShape
    paged: PagedSequences
    block_size: int
    ends: Tensor  # as in reference.py
    chosen: Tensor | None = None


def plan(paged: PagedSequences, shape: AttentionShape, every: AttentionPlan) -> IndexedPlan:
    """As in IndexedAttention."""
    index = shape.index
    assert index is not None and not shape.window and not shape.first_position
    ends = ends_of_groups(paged, index.group)
    return IndexedPlan(every, index, paged, shape.block_size, ends)


def select(query: Tensor, weights: Tensor | None, cache: KVCache, plan: IndexedPlan) -> None:
    """As in IndexedAttention."""
    assert cache.index is not None
    index, rows = plan.index, cache.index.flatten(0, 1)
    plan.chosen = torch.full((len(query), index.chosen), -1, device=query.device)
    for group in plan.every.groups:
        own = slice(group.first, group.first + len(group.last_key))
        whole = (group.last_key + 1) // index.group
        if int(whole.max()) == 0:
            continue
        parts = [
            _scores(query[own], None if weights is None else weights[own], keys)
            for keys in _keys(rows, group, whole, plan)
        ]
        plan.chosen[own] = chosen_groups(torch.cat(parts, 1), whole, index.chosen)


def _keys(rows: Tensor, queries: Queries, whole: Tensor, plan: IndexedPlan) -> Iterator[Tensor]:
    """[N, _GROUPS, dim] at a time: what a query does not have repeats one that it has, or is its
    first token's entry."""
    index, paged, size = plan.index, plan.paged, plan.block_size
    tokens = torch.arange(queries.first, queries.first + len(whole), device=whole.device)
    begin = paged.kv_indptr[torch.searchsorted(paged.cu_seqlens, tokens, right=True) - 1]
    for first in range(0, int(whole.max()), _GROUPS):
        groups = first + torch.arange(_GROUPS, device=whole.device)
        number = torch.minimum(groups, (whole - 1).clamp(min=0)[:, None])
        position = torch.where(whole[:, None] > 0, number * index.group + index.group - 1, 0)
        block = paged.kv_indices[begin[:, None] + position // size]
        places = block.long() * size + position % size
        found = rows.index_select(0, places.flatten())[:, : index.dim]
        yield found.float().view(len(whole), _GROUPS, index.dim)


def _scores(query: Tensor, weights: Tensor | None, keys: Tensor) -> Tensor:
    """query [N, heads, dim], keys [N, groups, dim] -> [N, groups]. No product of matrices: how
    libraries compute one depends on its shape."""
    total = keys.new_zeros(keys.shape[:2])
    for head, own in enumerate(query.float().unbind(1)):
        part = (own[:, None] * keys).sum(-1).relu_()
        total += part if weights is None else part * weights[:, head, None]
    return total


def attend(query: Tensor, cache: KVCache, plan: IndexedPlan) -> Tensor:
    """As in IndexedAttention."""
    return attention.attend(query, cache, _selected(plan))


def attend_latents(
    query: Tensor, weights: LatentWeights, cache: KVCache, plan: IndexedPlan
) -> Tensor:
    """As in IndexedAttention."""
    return latent_attention.attend(query, weights, cache, _selected(plan))


def _selected(plan: IndexedPlan) -> AttentionPlan:
    assert plan.chosen is not None
    return replace(plan.every, groups=_Masked(plan.every.groups, plan.chosen, plan.index.group))


@dataclass(frozen=True, slots=True)
class _Masked(Sequence[Queries]):
    """The same queries, from whom what was not chosen is hidden; made when they are asked for."""

    groups: Sequence[Queries]
    chosen: Tensor
    group_size: int

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> Queries:  # type: ignore[override]
        queries = self.groups[number]
        own = self.chosen[queries.first : queries.first + len(queries.last_key)]
        most = int(queries.last_key.max()) // KEYS * KEYS + KEYS
        positions = torch.arange(most, device=own.device)
        seen = sees(own, queries.last_key + 1, positions, self.group_size)
        tiles = []
        for part, (begin, active, rows, _) in zip(seen.split(KEYS, 1), queries.tiles, strict=True):
            seen_of = part.index_select(0, active)
            some = seen_of.any(1).nonzero().squeeze(1)  # who sees nothing there, goes past it
            places = rows.view(-1, KEYS).index_select(0, some)
            hidden = ~seen_of.index_select(0, some)
            tiles.append((begin, active[some], places.flatten(), hidden))
        return replace(queries, tiles=tiles)
