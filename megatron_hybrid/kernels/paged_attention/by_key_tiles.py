"""Paged attention in plain torch of which a query's bits do not depend on the others: what a CPU
runs in batch-invariant mode. The plan and the cache are reference.py's.

Every query goes through its keys by itself, tile by tile from position 0 on, with a running maximum
(Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867). So all
products are of one shape: the heads of a KV head times a tile's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8, AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.paged_attention import reference
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.paged_attention.reference import copy_tokens, most_captured

__all__ = ["append", "attend", "copy_tokens", "most_captured", "plan"]

KEYS = 64  # of a tile
# Queries that go through their keys at the same time: bounds what is gathered for them.
_QUERIES = 64


@dataclass(frozen=True, slots=True)
class Queries:
    """N of the step's."""

    first: int
    last_key: Tensor  # [N] the last position that each sees, counted from first_position
    # By tile: the position of its first key, the n queries that see some of its keys, the rows of
    # these keys [n * KEYS] in the flattened cache, and which of them are not seen [n, KEYS].
    tiles: list[tuple[int, Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Of a step, the same for every layer."""

    groups: Sequence[Queries]
    kv_slot: Tensor  # [tokens]
    scale: float


def plan(paged: PagedSequences, shape: AttentionShape) -> AttentionPlan:
    """As in Attention."""
    host, device = paged.host, paged.kv_slot.device
    bounds, lengths = torch.from_numpy(host.cu_seqlens).long(), torch.from_numpy(host.kv_length)
    counts = bounds.diff()
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    behind = bounds[sequence + 1] - 1 - torch.arange(len(sequence))  # queries of the same sequence
    last_key = lengths.long()[sequence] - 1 - behind - shape.first_position
    indptr, blocks = torch.from_numpy(host.kv_indptr).long(), torch.from_numpy(host.kv_indices)
    groups = []
    for first in range(0, len(sequence), _QUERIES):
        last, of = last_key[first : first + _QUERIES], sequence[first : first + _QUERIES]
        tiles = []
        seen_from = (last - shape.window + 1).clamp(min=0) if shape.window else last * 0
        for begin in range(int(seen_from.min()) // KEYS * KEYS, int(last.max()) + 1, KEYS):
            active = ((last >= begin) & (seen_from < begin + KEYS)).nonzero().squeeze(1)
            position = begin + torch.arange(KEYS)
            starts, ends = seen_from[active][:, None], last[active][:, None]
            hidden = (position > ends) | (position < starts)
            # What is not seen repeats a key that is: memory there may hold anything.
            position = position.clamp(starts, ends) + shape.first_position
            block = blocks[indptr[of[active]][:, None] + position // shape.block_size].long()
            rows = block * shape.block_size + position % shape.block_size
            tiles.append((begin, active.to(device), rows.flatten().to(device), hidden.to(device)))
        groups.append(Queries(first, last.to(device), tiles))
    return AttentionPlan(groups, paged.kv_slot.long(), shape.scale)


def append(key: Tensor, value: Tensor, cache: KVCache, plan: AttentionPlan) -> None:
    """As in Attention."""
    reference.store(key, value, cache, plan.kv_slot)


def attend(
    query: Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    bias: RelativeBias | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As in Attention."""
    keys, values = cache.key.flatten(0, 1), cache.value.flatten(0, 1)
    kv_heads = keys.shape[1]
    output = query.new_zeros((*query.shape[:2], values.shape[2]))
    if bias is not None:  # what is farther away has none
        bias = RelativeBias(bias.weights, F.pad(bias.bank, (0, 1)))
    for group in plan.groups:
        count = len(group.last_key)
        here = slice(group.first, group.first + count)
        q = query[here].float() * (plan.scale * cache.k_scale)
        q = q.unflatten(1, (kv_heads, -1))  # [N, kv_heads, heads of each, head_dim]
        shape = q.shape[:3]
        most = q.new_full(shape, -torch.inf)
        total = q.new_zeros(shape)
        if sinks is not None:  # they come before all keys
            most.copy_(sinks[here].unflatten(1, (kv_heads, -1)))
            total.add_(1)
        out = q.new_zeros((*shape, values.shape[2]))
        for begin, active, rows, hidden in group.tiles:
            k, v = (_gathered(stored, rows, len(active)) for stored in (keys, values))
            own = q.index_select(0, active)
            scores = _products(own, k.transpose(2, 3))
            if bias is not None:
                distance = group.last_key.index_select(0, active)[:, None] - begin
                distance = distance - torch.arange(KEYS, device=distance.device)
                weights = bias.weights[here].index_select(0, active)
                scores = scores + _biases(weights, bias.bank, distance).view_as(scores)
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            before = most.index_select(0, active)
            now = torch.maximum(before, scores.amax(-1))
            factor = torch.exp(before - now)
            weights = torch.exp(scores - now[..., None])
            most.index_copy_(0, active, now)
            sums = total.index_select(0, active) * factor + weights.sum(-1)
            total.index_copy_(0, active, sums)
            part = out.index_select(0, active) * factor[..., None] + _products(weights, v)
            out.index_copy_(0, active, part)
        out = out / torch.where(total > 0, total, 1)[..., None]
        output[here] = out.flatten(1, 2).to(query.dtype)
    return output if cache.v_scale == 1.0 else output.mul_(cache.v_scale)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [n, kv_heads, ...]. Several products the library computes by one thread each, but
    one alone by all threads, and sums it otherwise: it is computed as two, then."""
    if a.shape[:2] != (1, 1):
        return torch.matmul(a, b)
    return torch.matmul(a.expand(2, -1, -1, -1), b.expand(2, -1, -1, -1))[:1]


def _biases(weights: Tensor, bank: Tensor, distance: Tensor) -> Tensor:
    """weights [n, heads, profiles], bank [profiles, extent + 1], distance [n, KEYS] -> [n, heads,
    KEYS] float32, added up profile by profile: of products as small as these the library may sum
    one or several otherwise."""
    place = distance.clamp(0, bank.shape[1] - 1)
    total = torch.zeros((), device=weights.device)
    for own, profile in zip(weights.float().unbind(-1), bank.float(), strict=True):
        total = total + own[..., None] * profile[place][:, None]
    return total


def _gathered(stored: Tensor, rows: Tensor, count: int) -> Tensor:
    """Rows [count * KEYS] of stored [tokens, kv_heads, head_dim] -> [count, kv_heads, KEYS,
    head_dim] float32."""
    if stored.dtype == FP8:  # torch moves FP8 on some devices only
        taken = stored.view(torch.uint8).index_select(0, rows).view(FP8)
    else:
        taken = stored.index_select(0, rows)
    return taken.float().view(count, KEYS, *stored.shape[1:]).transpose(1, 2).contiguous()
