"""Steps of paged attention with random lengths and blocks, and what attention makes of them in
float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedHost, PagedSequences

Lengths = list[tuple[int, int]]  # (queries, keys) of each sequence, decodes first


def attention_shape(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    first_position: int = 0,
) -> AttentionShape:
    scale = 0.9 * head_dim**-0.5  # not the usual one, which kernels take by themselves
    return AttentionShape(heads, kv_heads, head_dim, scale, block_size, dtype, first_position)


@dataclass
class AttentionStep:
    """A step over a cache that holds every sequence's past; places of no token are NaN."""

    paged: PagedSequences
    query: Tensor  # views of one projection [tokens, heads + 2 * kv_heads, head_dim]
    key: Tensor
    value: Tensor
    cache: KVCache
    expected: Tensor  # [tokens, heads, head_dim] float64


def attention_step(
    lengths: Lengths,
    shape: AttentionShape,
    *,
    decodes: int | None = None,
    scattered: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionStep:
    """`decodes`: how many of the first sequences count as decodes; all of one query if None."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    size = shape.block_size
    blocks_of = [-(-keys // size) for _, keys in lengths]
    total = sum(blocks_of)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)) + 1
    if not scattered:
        order = torch.arange(1, total + 1)
    tokens = sum(n for n, _ in lengths)
    poison = torch.full(
        (total + 1, size, shape.kv_heads, shape.head_dim),
        float("nan"),
        dtype=shape.dtype,
        device=device,
    )
    cache = KVCache(poison, poison.clone())
    qkv = normal(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    query, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    table = np.zeros((len(lengths), max(blocks_of) + 1), dtype=np.int64)
    slots, expected = [], []
    first_block = first_token = 0
    for row, (n, keys) in enumerate(lengths):
        own = order[first_block : first_block + blocks_of[row]]
        first_block += blocks_of[row]
        table[row, : len(own)] = own.numpy()
        at = own.repeat_interleave(size)[:keys] * size + torch.arange(keys) % size
        past, new = keys - n, slice(first_token, first_token + n)
        first_token += n
        old_key, old_value = (normal(past, shape.kv_heads, shape.head_dim) for _ in range(2))
        cache.key.flatten(0, 1)[at[:past].to(device)] = old_key
        cache.value.flatten(0, 1)[at[:past].to(device)] = old_value
        slots.append(at[past:])
        if n:
            whole = torch.cat((old_key, key[new])), torch.cat((old_value, value[new]))
            expected.append(naive(query[new], *whole, past, shape))
    host = PagedHost.of(
        np.array([n for n, _ in lengths]), np.array([keys for _, keys in lengths]), table, size
    )
    if decodes is None:
        decodes = sum(n == 1 for n, _ in lengths)
    paged = paged_sequences(host, torch.cat(slots), decodes, device)
    return AttentionStep(paged, query, key, value, cache, torch.cat(expected))


def paged_sequences(
    host: PagedHost, kv_slot: Tensor, num_decodes: int, device: str
) -> PagedSequences:
    kind = torch.int64 if device == "cpu" else torch.int32
    arrays = (
        torch.from_numpy(array).to(device, kind)
        for array in (
            host.cu_seqlens,
            host.kv_length,
            host.kv_indptr,
            host.kv_indices,
            host.last_block_length,
        )
    )
    return PagedSequences(*arrays, kv_slot.to(device, kind), num_decodes, host)


def naive(query: Tensor, key: Tensor, value: Tensor, start: int, shape: AttentionShape) -> Tensor:
    """In float64: query [n, heads, dim] from position `start`, key [kv, kv_heads, dim]."""
    n, heads, _ = query.shape
    repeat = heads // key.shape[1]
    k = key.double().repeat_interleave(repeat, 1)
    v = value.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,khd->hnk", query.double(), k) * shape.scale
    position = torch.arange(start, start + n, device=query.device)
    at = torch.arange(len(key), device=query.device)
    hidden = (at > position[:, None]) | (at < shape.first_position)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnk,khd->nhd", weights, v)


def check(
    attention: Any,
    lengths: Lengths,
    shape: AttentionShape | None = None,
    *,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> None:
    """`attention` (a module or an object with the calls of reference.py) against float64."""
    shape = shape or attention_shape()
    step = attention_step(lengths, shape, **kwargs)
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    out = attention.attend(step.query, step.cache, plan)
    assert out.is_contiguous() and out.dtype == shape.dtype
    torch.testing.assert_close(out.double(), step.expected, atol=tolerance, rtol=tolerance)


def check_first_position(attention: Any, lengths: Lengths, **kwargs: Any) -> None:
    """What is not seen may be anything but NaN."""
    for first in (1, 3):
        shape = attention_shape(first_position=first)
        check(attention, [(n, keys + first) for n, keys in lengths], shape, **kwargs)


def check_masked_writes(attention: Any, device: str = "cpu") -> None:
    """Tokens of matched blocks are computed again; their writes go to the dummy block 0."""
    shape = attention_shape()
    step = attention_step([(3, 9)], shape, device=device)
    slots = step.paged.kv_slot.clone()
    slots[:2] = 0
    before = step.cache.key.clone()
    plan = attention.plan(replace(step.paged, kv_slot=slots), shape)
    attention.append(step.key, step.value, step.cache, plan)
    last = slots[2].long()
    rows, old = step.cache.key.flatten(0, 1), before.flatten(0, 1)
    assert torch.equal(rows[last], step.key[2])
    rows[last] = old[last]
    assert torch.equal(step.cache.key[1:].nan_to_num(7.0), before[1:].nan_to_num(7.0))


def check_copied_tokens(attention: Any, device: str = "cpu") -> None:
    """Two readers of one source; what a source holds past the copied tokens may be anything."""
    size = 4
    generator = torch.Generator(device).manual_seed(0)
    dims = (5, size, 2, 8)
    cache = KVCache(
        torch.randn(dims, generator=generator, device=device),
        torch.full(dims, float("nan"), device=device),
    )
    cache.value[1, :3] = torch.randn(3, 2, 8, generator=generator, device=device)
    before = KVCache(cache.key.clone(), cache.value.clone())
    kind = torch.int64 if device == "cpu" else torch.int32
    # tokens 0 to 2 of block 1 to block 4, its token 0 to block 2
    source = torch.tensor([4, 5, 6, 4], dtype=kind, device=device)
    destination = torch.tensor([16, 17, 18, 8], dtype=kind, device=device)
    attention.copy_tokens(cache, source, destination)
    for new, old in ((cache.key, before.key), (cache.value, before.value)):
        expected = old.clone()
        expected[4, :3], expected[2, 0] = old[1, :3], old[1, 0]
        assert torch.equal(new.nan_to_num(7.0), expected.nan_to_num(7.0))
