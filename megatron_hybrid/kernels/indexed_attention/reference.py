"""Attention with an index in plain torch: paged attention's groups of sequences, with a mask of
what was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape, KVCache, PagedSequences
from megatron_hybrid.kernels.indexed_attention.protocol import (
    GatedPool,
    IndexNorm,
    MeanPool,
    Pool,
)
from megatron_hybrid.kernels.latent_attention import reference as latent_attention
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from megatron_hybrid.kernels.norm.reference import rms_norm
from megatron_hybrid.kernels.paged_attention import reference as attention
from megatron_hybrid.kernels.paged_attention.reference import AttentionPlan, Group
from megatron_hybrid.kernels.rope import reference as rope

# Numbers of a tile of queries: of its mask, and of the scores of one head of the index.
_NUMBERS = 1 << 24


@dataclass(slots=True)
class IndexedPlan:
    """Of a step, the same for every layer."""

    every: AttentionPlan
    index: IndexShape
    tiles: list[Tile]
    ends: Tensor  # [n] tokens of the step that are the last ones of their groups
    chosen: Tensor | None = None  # [tokens, <= index.chosen] groups; past the last one: -1


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of a Group, or all."""

    group: Group
    seen: Tensor | None  # [N, Q] tokens up to each query's own; None: the index has no choice


def plan(paged: PagedSequences, shape: AttentionShape, every: AttentionPlan) -> IndexedPlan:
    """As in IndexedAttention."""
    index = shape.index
    assert index is not None and not shape.window and not shape.first_position
    device = paged.kv_slot.device
    tiles = [tile for group in every.groups for tile in _tiles(group, index, device)]
    return IndexedPlan(every, index, tiles, ends_of_groups(paged, index.group))


def ends_of_groups(paged: PagedSequences, group: int) -> Tensor:
    """[n] tokens of the step that are the last ones of their groups."""
    host = paged.host
    counts = np.diff(host.cu_seqlens)
    first = host.kv_length - counts - host.cu_seqlens[:-1]  # position of a token - its number
    positions = np.arange(host.cu_seqlens[-1]) + np.repeat(first, counts)
    ends = (positions % group == group - 1).nonzero()[0]
    return torch.from_numpy(ends).to(paged.kv_slot.device)


def _tiles(group: Group, index: IndexShape, device: torch.device) -> Iterator[Tile]:
    number, queries, keys = group.shape
    if keys < index.budget + index.group:  # even the last query has no more whole groups
        yield Tile(group, None)
        return
    if group.mask is not None:
        seen = (group.mask == 0).sum(-1)[:, 0].expand(number, queries)
    else:
        behind = torch.arange(queries - 1, -1, -1, device=device)
        seen = (keys - behind if group.causal else torch.full_like(behind, keys)).expand(number, -1)
    size = max(1, _NUMBERS // keys)
    if number > 1 or queries <= size:
        yield Tile(group, seen)
        return
    assert isinstance(group.queries, slice) and group.valid is None
    for start in range(0, queries, size):
        own = seen[:, start : start + size]
        begin = group.queries.start + start
        tokens = slice(begin, begin + own.shape[1])
        most = keys - queries + start + own.shape[1]
        part = group.keys[:most] if isinstance(group.keys, Tensor) else _first(group.keys, most)
        shape, before = (1, own.shape[1], most), [most - own.shape[1]]
        yield Tile(Group(tokens, part, None, False, None, tokens, shape, before), own)


def _first(rows: slice, count: int) -> slice:
    return slice(rows.start, rows.start + count)


def turn(query: Tensor, norm: IndexNorm, positions: Tensor) -> Tensor:
    """As in IndexedAttention."""
    normed = rms_norm(query, norm.weight, norm.eps, query.dtype)
    return rope.rotate(normed, rope.plan(positions, norm.frequencies, query.dtype))


def store(
    entries: Tensor, pool: Pool, positions: Tensor, cache: KVCache, plan: IndexedPlan
) -> None:
    """As in IndexedAttention."""
    assert cache.index is not None
    rows, slots = cache.index.flatten(0, 1), plan.every.kv_slot
    rows.index_copy_(0, slots, entries)
    if not len(plan.ends):
        return
    group, dim = plan.index.group, plan.index.dim
    last = slots[plan.ends]
    # Of a masked write some are before the first place: nobody reads what becomes of it.
    members = (last[:, None] + torch.arange(1 - group, 1, device=last.device)).clamp(min=0)
    own = rows.index_select(0, members.flatten()).view(len(last), group, -1)
    keys = pooled(own, pool, positions[plan.ends] - (group - 1))
    rows[:, :dim].index_copy_(0, last, keys)


def pooled(entries: Tensor, pool: Pool, first: Tensor) -> Tensor:
    """entries [groups, group, index_dim], first [groups]: positions of their first tokens ->
    [groups, dim]. Added up token by token: a group's bits do not depend on the others."""
    if isinstance(pool, MeanPool):
        total = entries[:, 0].float()
        for one in entries[:, 1:].unbind(1):
            total = total + one.float()
        mean = (total / entries.shape[1]).to(entries.dtype)
        return turn(mean[:, None], pool.norm, first)[:, 0]
    assert isinstance(pool, GatedPool)
    keys, gates = entries.chunk(2, dim=2)
    weights = (gates.float() + pool.bias.float()).softmax(1).to(keys.dtype)
    parts = (weights * keys).unbind(1)
    total = parts[0].float()
    for one in parts[1:]:
        total = total + one.float()
    return total.to(keys.dtype)


def select(query: Tensor, weights: Tensor | None, cache: KVCache, plan: IndexedPlan) -> None:
    """As in IndexedAttention."""
    assert cache.index is not None
    index, rows = plan.index, cache.index.flatten(0, 1)
    plan.chosen = None
    if all(tile.seen is None for tile in plan.tiles):
        return
    plan.chosen = torch.full((len(query), index.chosen), -1, device=query.device)
    for group, seen in ((tile.group, tile.seen) for tile in plan.tiles):
        if seen is None:
            continue
        number, queries, _ = group.shape
        keys = _keys(rows, group, index).float()
        own = attention.take(query, group.queries).view(number, queries, index.heads, -1).float()
        scores = own.new_zeros((number, queries, keys.shape[1]))
        for head in range(index.heads):
            part = torch.matmul(own[:, :, head], keys.transpose(1, 2)).relu_()
            if weights is None:
                scores += part
            else:
                each = attention.take(weights[:, head], group.queries).view(number, queries, 1)
                scores += part.mul_(each)
        best = chosen_groups(scores.flatten(0, 1), (seen // index.group).flatten(), index.chosen)
        if group.valid is not None:
            best = best.index_select(0, group.valid)
        plan.chosen[group.tokens] = best


def _keys(rows: Tensor, group: Group, index: IndexShape) -> Tensor:
    """[N, groups of keys, dim]"""
    number, _, keys = group.shape
    last = slice(index.group - 1, keys // index.group * index.group, index.group)
    if isinstance(group.keys, slice):
        own = rows[group.keys][last][None]
    else:
        places = group.keys.view(number, keys)[:, last]
        own = rows.index_select(0, places.flatten()).view(number, places.shape[1], -1)
    return own[..., : index.dim]


def chosen_groups(scores: Tensor, whole: Tensor, most: int) -> Tensor:
    """scores [rows, groups] float32, of which each row has the first whole [rows] -> [rows, most]
    the groups with the highest, of equal ones the earliest; what is missing is -1."""
    number = torch.arange(scores.shape[1], device=scores.device)
    bits = (scores + 0.0).view(torch.int32).long()  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the floats' order
    ordered = (ordered << 32) - number
    hidden = number >= whole[:, None]
    least = torch.iinfo(torch.int64).min
    best, found = ordered.masked_fill_(hidden, least).topk(min(most, scores.shape[1]))
    return torch.nn.functional.pad(
        found.masked_fill_(best == least, -1), (0, most - found.shape[1]), value=-1
    )


def attend(query: Tensor, cache: KVCache, plan: IndexedPlan) -> Tensor:
    """As in IndexedAttention."""
    return attention.attend(query, cache, _selected(plan))


def attend_latents(
    query: Tensor, weights: LatentWeights, cache: KVCache, plan: IndexedPlan
) -> Tensor:
    """As in IndexedAttention."""
    return latent_attention.attend(query, weights, cache, _selected(plan))


def _selected(plan: IndexedPlan) -> AttentionPlan:
    """Of attention to what was chosen."""
    if plan.chosen is None:
        return plan.every
    return replace(plan.every, groups=_Masked(plan.tiles, plan.chosen, plan.index.group))


@dataclass(frozen=True, slots=True)
class _Masked(Sequence[Group]):
    """The tiles' groups. Each one's mask is made when it is asked for: those of all would take much
    memory."""

    tiles: Sequence[Tile]
    chosen: Tensor
    group_size: int

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, number: int) -> Group:  # type: ignore[override]
        group, seen = self.tiles[number].group, self.tiles[number].seen
        if seen is None:
            return group
        mask = sees(
            attention.take(self.chosen, group.queries),
            seen.flatten(),
            torch.arange(group.shape[2], device=seen.device),
            self.group_size,
        )
        return replace(group, mask=mask.view(group.shape)[:, None], causal=False)


def sees(chosen: Tensor, seen: Tensor, positions: Tensor, group: int) -> Tensor:
    """Whether each query sees the keys at these positions: chosen [queries, most], seen [queries],
    positions [keys] -> [queries, keys]."""
    most = int(positions[-1]) // group + 1
    some = torch.zeros((len(chosen), most + 1), dtype=torch.bool, device=chosen.device)
    # what is not chosen, and groups behind these keys, go to a column that is read by nobody
    some.scatter_(1, torch.where((chosen < 0) | (chosen > most), most, chosen), True)
    in_groups = some.index_select(1, positions // group)
    tail = positions >= (seen // group * group)[:, None]
    return (in_groups | tail) & (positions < seen[:, None])
