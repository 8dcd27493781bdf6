"""Paged attention in plain torch: gather a group of sequences' keys and values, then SDPA.

Sequences of similar lengths form a group [sequences, queries, keys]; a place past a sequence's end
repeats the sequence's own last token and is masked. So memory that no token was written to (the
tail of a last block, padded entries of the block table) is never read: it may hold NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.contract import (
    FP8,
    FP8_MAX,
    AttentionShape,
    KVCache,
    PagedHost,
    PagedSequences,
)
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias

# A segment with more queries than this forms a group of its own.
_SHORT_QUERIES = 128
# Queries of one sequence that share a mask: bounds the mask and skips most of the future.
_QUERY_TILE = 512
# Of a bias by distance: bounds how many queries' are made at a time.
_BIASES = 1 << 24


@dataclass(frozen=True, slots=True)
class Group:
    """N sequences of up to Q queries and K keys."""

    queries: slice | Tensor  # tokens of the step: a slice, or [N * Q] with repeats
    keys: slice | Tensor  # rows of the flattened cache: a slice, or [N * K] with repeats
    mask: Tensor | None  # [N, 1, Q, K] additive or of bool (what is seen), or None
    causal: bool  # without a mask: query i sees keys 0..i
    valid: Tensor | None  # places of [N * Q] that are no repeats; None when all are valid
    tokens: slice | Tensor  # tokens that those belong to
    shape: tuple[int, int, int]  # N, Q, K
    before: list[int]  # [N] keys before a sequence's first query, of those that it has here


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The groups of a step, the same for every layer."""

    groups: Sequence[Group]
    kv_slot: Tensor  # [tokens]
    scale: float
    window: int


def plan(paged: PagedSequences, shape: AttentionShape) -> AttentionPlan:
    """As in Attention."""
    host, device = paged.host, paged.kv_slot.device
    bounds: list[int] = host.cu_seqlens.tolist()
    starts = np.full_like(host.kv_length, shape.first_position)  # of what is seen
    if shape.window:
        first_query = host.kv_length - np.diff(host.cu_seqlens)
        starts = np.maximum(starts, first_query - shape.window + 1)
    first: list[int] = starts.tolist()
    kv_length: list[int] = (host.kv_length - starts).tolist()
    alike: dict[tuple[int, int], list[int]] = {}
    groups: list[Group] = []
    for sequence, keys in enumerate(kv_length):
        queries = bounds[sequence + 1] - bounds[sequence]
        if queries > _SHORT_QUERIES:
            groups += _long(host, sequence, bounds, keys, first[sequence], shape, device)
        elif queries > 0:
            # Powers of two: padding at most doubles the work.
            kind = ((queries - 1).bit_length(), (max(keys, 64) - 1).bit_length())
            alike.setdefault(kind, []).append(sequence)
    for members in alike.values():
        groups.append(_short(host, members, bounds, kv_length, first, shape, device))
    return AttentionPlan(groups, paged.kv_slot.long(), shape.scale, shape.window)


def _short(
    host: PagedHost,
    members: list[int],
    bounds: list[int],
    kv_length: list[int],
    first: list[int],
    shape: AttentionShape,
    device: torch.device,
) -> Group:
    queries = [bounds[s + 1] - bounds[s] for s in members]
    keys = [max(kv_length[s], 1) for s in members]
    number, most_queries, most_keys = len(members), max(queries), max(keys)
    columns = torch.arange(most_keys, device=device)
    lengths = torch.tensor(keys, device=device)
    mask = None
    within = not shape.window or most_keys <= shape.window  # of every query's window
    causal = number == 1 and queries[0] == keys[0] and within
    if not causal and (most_queries > 1 or min(keys) < most_keys):
        # Query i of a sequence sees the keys up to its own position.
        first_query = lengths - torch.tensor(queries, device=device)
        last_key = first_query[:, None] + torch.arange(most_queries, device=device)
        last_key = torch.minimum(last_key, lengths[:, None] - 1)
        hidden = columns > last_key[:, :, None]
        if not within:
            hidden |= columns <= last_key[:, :, None] - shape.window
        mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None]

    contiguous = members == list(range(members[0], members[0] + number))
    valid = None
    tokens: slice | Tensor = slice(bounds[members[0]], bounds[members[-1] + 1])
    query_rows: slice | Tensor = tokens
    if min(queries) < most_queries or not contiguous:
        offsets = torch.arange(most_queries, device=device)
        count = torch.tensor(queries, device=device)[:, None]
        first_token = torch.tensor([bounds[s] for s in members], device=device)[:, None]
        query_rows = (first_token + torch.minimum(offsets, count - 1)).flatten()
        if min(queries) < most_queries:
            valid = (offsets < count).flatten().nonzero().squeeze(1)
        tokens = query_rows if valid is None else query_rows.index_select(0, valid)
    if number == 1:
        key_rows = _rows(host, members[0], first[members[0]], keys[0], shape, device)
    else:
        start = torch.tensor([first[s] for s in members], device=device)
        positions = start[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        first_block = torch.from_numpy(host.kv_indptr[members]).to(device)
        every_block = torch.from_numpy(host.kv_indices).to(device)
        blocks = every_block[first_block[:, None] + positions // shape.block_size]
        key_rows = (blocks * shape.block_size + positions % shape.block_size).flatten()
    return Group(
        query_rows, key_rows, mask, causal, valid, tokens, (number, most_queries, most_keys),
        [k - q for k, q in zip(keys, queries, strict=True)],
    )  # fmt: skip


def _long(
    host: PagedHost,
    sequence: int,
    bounds: list[int],
    keys: int,
    first_key: int,
    shape: AttentionShape,
    device: torch.device,
) -> list[Group]:
    """A long segment: all at once when nothing precedes it, else in tiles of queries."""
    begin, end = bounds[sequence], bounds[sequence + 1]
    rows = _rows(host, sequence, first_key, keys, shape, device)
    if end - begin == keys and (not shape.window or keys <= shape.window):
        tokens = slice(begin, end)
        return [Group(tokens, rows, None, True, None, tokens, (1, keys, keys), [0])]
    # One mask serves all tiles: the last columns are triangular, the others are zeros (but for what
    # is before a window), and a tile of q queries that sees k keys takes the last q rows and the
    # last k columns.
    rows_of_mask = min(end - begin, _QUERY_TILE)
    columns = min(keys, rows_of_mask + shape.window - 1) if shape.window else keys
    hidden = torch.ones((rows_of_mask, columns), dtype=torch.bool, device=device)
    hidden = hidden.triu_(columns - rows_of_mask + 1)
    if shape.window:
        before = torch.ones_like(hidden).tril_(columns - rows_of_mask - shape.window)
        hidden |= before
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=device).masked_fill_(
        hidden, -torch.inf
    )
    groups = []
    for first in range(begin, end, _QUERY_TILE):
        tokens = slice(first, min(first + _QUERY_TILE, end))
        queries, stop = tokens.stop - tokens.start, keys - (end - tokens.stop)
        start = max(0, stop - queries - shape.window + 1) if shape.window else 0
        seen = stop - start
        if isinstance(rows, slice):
            part: slice | Tensor = slice(rows.start + start, rows.start + stop)
        else:
            part = rows[start:stop]
        own = mask[rows_of_mask - queries :, columns - seen :][None, None]
        groups.append(
            Group(tokens, part, own, False, None, tokens, (1, queries, seen), [seen - queries])
        )
    return groups


def _rows(
    host: PagedHost,
    sequence: int,
    first: int,
    keys: int,
    shape: AttentionShape,
    device: torch.device,
) -> slice | Tensor:
    """A sequence's rows of the flattened cache, from position `first` on: a slice, read without a
    copy, when its blocks follow one another."""
    block_size = shape.block_size
    blocks = host.kv_indices[host.kv_indptr[sequence] : host.kv_indptr[sequence + 1]]
    if (np.diff(blocks) == 1).all():
        start = int(blocks[0]) * block_size + first
        return slice(start, start + keys)
    positions = first + np.arange(keys)
    rows = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return torch.from_numpy(rows).to(device)


def append(key: Tensor, value: Tensor, cache: KVCache, plan: AttentionPlan) -> None:
    """As in Attention."""
    store(key, value, cache, plan.kv_slot)


def store(key: Tensor, value: Tensor, cache: KVCache, kv_slot: Tensor) -> None:
    """Keys and values [tokens, kv_heads, head_dim] to these places of the cache [tokens]."""
    if cache.is_fp8:
        key, value = to_fp8(key, cache.k_scale), to_fp8(value, cache.v_scale)
    for stored, new in ((cache.key, key), (cache.value, value)):
        _rows_of(stored).index_copy_(0, kv_slot, _as_bytes(new))


def to_fp8(values: Tensor, scale: float) -> Tensor:
    """values / scale, rounded to the nearest number of e4m3; beyond the largest one to that one. A
    NaN stays one."""
    # By a tensor: GPUs multiply by the inverse of a number on the host, which rounds twice.
    divisor = torch.full((), scale, device=values.device)
    return (values.float() / divisor).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def most_captured(shape: AttentionShape, prompts: int) -> int:
    """None: it can't be captured at all."""
    return 0


def copy_tokens(cache: KVCache, source: Tensor, destination: Tensor) -> None:
    """As in Attention."""
    for rows in map(_rows_of, cache.tensors):
        rows.index_copy_(0, destination.long(), rows.index_select(0, source))


def gather_kv(
    cache: KVCache,
    key: Tensor,
    value: Tensor,
    sequence: Tensor,
    position: Tensor,
    paged: PagedSequences,
) -> None:
    """As in triton.py."""
    tiles, block_size = len(sequence), cache.key.shape[1]
    at = position[:, None] + torch.arange(len(key) // max(tiles, 1), device=key.device)
    inside = at < paged.kv_length[sequence][:, None]
    at = torch.where(inside, at, 0)
    block = paged.kv_indices[paged.kv_indptr[sequence][:, None] + at // block_size]
    rows = (block.long() * block_size + at % block_size).flatten()
    outside = ~inside.flatten()[:, None, None]
    for gathered, stored in ((key, cache.key), (value, cache.value)):
        gathered.copy_(stored.flatten(0, 1).index_select(0, rows).masked_fill_(outside, 0))


def _rows_of(stored: Tensor) -> Tensor:
    """[blocks, block_size, ...] -> [tokens, ...], to be moved."""
    return _as_bytes(stored.flatten(0, 1))


def _as_bytes(values: Tensor) -> Tensor:
    # torch moves FP8 on some devices only
    return values.view(torch.uint8) if values.dtype == FP8 else values


def attend(
    query: Tensor,
    cache: KVCache,
    plan: AttentionPlan,
    bias: RelativeBias | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As in Attention."""
    heads, head_dim = query.shape[1:]
    all_keys, all_values = _rows_of(cache.key), _rows_of(cache.value)
    value_dim = all_values.shape[2]
    kv_heads = all_keys.shape[1]
    # Scales of FP8 are factors of all scores, and of the result: nothing is rounded for them.
    scale = plan.scale * cache.k_scale
    output = query.new_empty((len(query), heads, value_dim))
    for group in plan.groups:
        number, queries, keys = group.shape
        q = take(query, group.queries).view(number, queries, heads, head_dim)
        k, v = take(all_keys, group.keys), take(all_values, group.keys)
        if cache.is_fp8:
            k, v = k.view(FP8).to(query.dtype), v.view(FP8).to(query.dtype)
        k = k.view(number, keys, kv_heads, head_dim).transpose(1, 2)
        v = v.view(number, keys, kv_heads, value_dim).transpose(1, 2)
        if bias is not None or sinks is not None:
            own = None
            if bias is not None:
                weights = take(bias.weights, group.queries).unflatten(0, (number, queries))
                own = RelativeBias(weights, bias.bank)
            own_sinks = None
            if sinks is not None:
                own_sinks = take(sinks, group.queries).unflatten(0, (number, queries))
            out = _attend_with_more(q, k, v, own, own_sinks, group, scale, plan.window)
        elif queries == 1:
            # The query heads of one KV head become its queries: no repeated keys.
            q = q.view(number, kv_heads, heads // kv_heads, head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        else:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.causal,
                scale=scale,
                enable_gqa=heads != kv_heads,
            ).transpose(1, 2)
        out = out.reshape(-1, heads, value_dim)
        if group.valid is not None:
            out = out.index_select(0, group.valid)
        if isinstance(group.tokens, slice):
            output[group.tokens] = out
        else:
            output.index_copy_(0, group.tokens, out)
    return output if cache.v_scale == 1.0 else output.mul_(cache.v_scale)


def _attend_with_more(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: RelativeBias | None,
    sinks: Tensor | None,
    group: Group,
    scale: float,
    window: int,
) -> Tensor:
    """q [N, Q, heads, head_dim], k and v [N, kv_heads, K, head_dim], weights of the bias [N, Q,
    heads, profiles], sinks [N, Q, heads] -> [N, Q, heads, head_dim]. What a query sees follows from
    distances; a sink is one more key, of zeros."""
    number, queries, keys = group.shape
    heads, device = q.shape[2], q.device
    if bias is None:
        bias = RelativeBias(q.new_zeros((number, queries, heads, 1)), q.new_zeros((1, 0)))
    bank = F.pad(bias.bank, (0, 1))  # what is farther away has no bias
    if sinks is not None:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    before = torch.tensor(group.before, device=device)[:, None, None]
    column = torch.arange(keys, device=device)
    step = max(1, _BIASES // (number * heads * max(keys, bank.shape[1])))
    parts = []
    for first in range(0, queries, step):
        row = torch.arange(first, min(first + step, queries), device=device)
        distance = before + row[:, None] - column  # [N, rows, K]
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        profiles = bias.weights[:, first : first + step] @ bank  # [N, rows, heads, extent + 1]
        place = distance.clamp(0, bias.extent)[:, :, None].expand(-1, -1, heads, -1)
        scores = profiles.gather(3, place).masked_fill_(hidden[:, :, None], -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, first : first + step, :, None]), dim=3)
        out = F.scaled_dot_product_attention(
            q[:, first : first + step].transpose(1, 2),
            k,
            v,
            attn_mask=scores.transpose(1, 2),
            scale=scale,
            enable_gqa=heads != k.shape[1],
        )
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, dim=1)


def take(rows: Tensor, which: slice | Tensor) -> Tensor:
    """Of Group.queries or Group.keys."""
    return rows[which] if isinstance(which, slice) else rows.index_select(0, which)
