"""What attention takes of a projection, by hand in float64, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape
from megatron_hybrid.kernels.protocols import HeadNorms
from tests.kernels.attention_cases import Lengths, assert_same, attention_step, bytes_of, kept
from tests.kernels.norm_cases import EPS, normed

LENGTHS: Lengths = [(1, 9), (1, 1), (3, 70), (5, 5)]


def rotated(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """In float64: dimensions i and i + rotary_dim / 2 are the parts of a complex number."""
    half = len(frequencies)
    x = x.double()
    # angles in float32, as every implementation takes them
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def check_prepare(
    rope: Any,
    attention: Any,
    shape: AttentionShape,
    rotary_dim: int,
    norm_dtype: torch.dtype | None,
    *,
    queries: bool = True,
    tolerance: float = 1e-5,
    lengths: Lengths = LENGTHS,
    device: str = "cpu",
) -> None:
    """`rotary_dim`: 0 for none; `norm_dtype`: of the norms' weights, None for no norms; without
    `queries`: keys and values alone."""
    torch.manual_seed(rotary_dim)
    step = attention_step(lengths, shape, device=device)
    plan = attention.plan(step.paged, shape)
    heads = [shape.heads if queries else 0, shape.kv_heads, shape.kv_heads]
    qkv = projected(len(step.query), sum(heads), shape.head_dim, shape.dtype, device)
    query, key, value = qkv.clone().split(heads, dim=1)
    norms, rotation = norms_of(shape, norm_dtype, device), None
    query, key = query.double(), key.double()
    if norms is not None:
        query, key = normed(query, norms.query), normed(key, norms.key)
    if rotary_dim:
        positions = torch.randint(0, 30000, (len(qkv),), device=device)
        # no base reproduces these: they are scaled as a model's may be
        frequencies = 5e5 ** -(torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
        frequencies[rotary_dim // 4 :] /= 8
        rotation = rope.plan(positions, frequencies, shape.dtype)
        query, key = (rotated(x, positions, frequencies) for x in (query, key))

    cache, places = step.cache, step.paged.kv_slot.long()
    rows = [bytes_of(stored).flatten(0, 1) for stored in (cache.key, cache.value)]
    before = [stored.clone() for stored in rows]
    found = rope.prepare(qkv, norms, rotation, cache, plan)
    assert found.dtype == shape.dtype and found.shape == query.shape
    torch.testing.assert_close(found.double(), query, atol=tolerance, rtol=tolerance)
    stored = rows[0][places].view(cache.key.dtype).double() * cache.k_scale
    limit = {"atol": tolerance, "rtol": tolerance}
    if cache.is_fp8:  # rounded once more, and the largest to the largest there is
        key = key.clamp(-448 * cache.k_scale, 448 * cache.k_scale)
        limit = {"atol": tolerance + 2**-10 * cache.k_scale, "rtol": tolerance + 2**-4}
    torch.testing.assert_close(stored, key, **limit)
    expected = kept(value, shape.kv_dtype, cache.v_scale)
    assert torch.equal(rows[1][places], bytes_of(expected))
    for now, old in zip(rows, before, strict=True):  # nothing else is written
        now[places] = old[places]
        assert_same(now, old)


def check_turn(
    rope: Any,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    norm_dtype: torch.dtype | None,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    tokens: int = 9,
    device: str = "cpu",
) -> None:
    """Of a layer without a KV cache; arguments as of check_prepare. A token's bits are the same
    alone."""
    torch.manual_seed(rotary_dim)
    shape = AttentionShape(heads, heads, head_dim, 1.0, 1, dtype, dtype)
    qkv = projected(tokens, 3 * heads, head_dim, dtype, device)
    norms, rotation = norms_of(shape, norm_dtype, device), None
    query, key, value = (each.double() for each in qkv.split(heads, dim=1))
    if norms is not None:
        query, key = normed(query, norms.query), normed(key, norms.key)
    positions = torch.randint(0, 30000, (tokens,), device=device)
    frequencies = 5e5 ** -(torch.arange(0, rotary_dim, 2, device=device) / max(rotary_dim, 1))
    if rotary_dim:
        rotation = rope.plan(positions, frequencies, dtype)
        query, key = (rotated(x, positions, frequencies) for x in (query, key))
    found = rope.turn(qkv, norms, rotation)
    for ours, expected in zip(found, (query, key, value), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[2], qkv[:, 2 * heads :])
    alone = rope.plan(positions[4:5], frequencies, dtype) if rotary_dim else None
    for ours, one in zip(found, rope.turn(qkv[4:5], norms, alone), strict=True):
        assert torch.equal(ours[4:5], one)


def check_batches(
    rope: Any, attention: Any, shape: AttentionShape, rotary_dim: int, device: str = "cpu"
) -> None:
    """A token's bits are the same in every batch."""
    step = attention_step(LENGTHS, shape, device=device)
    tokens, heads = len(step.query), shape.heads + 2 * shape.kv_heads
    qkv = projected(tokens, heads, shape.head_dim, shape.dtype, device)
    positions = torch.arange(tokens, device=device)
    frequencies = torch.rand(rotary_dim // 2, device=device)
    norms = norms_of(shape, shape.dtype, device)

    def prepare(rows: slice) -> tuple[Tensor, Tensor]:
        rotation = rope.plan(positions[rows], frequencies, shape.dtype)
        slots = step.paged.kv_slot[rows]
        plan = attention.plan(replace(step.paged, kv_slot=slots), shape)
        query = rope.prepare(qkv[rows].clone(), norms, rotation, step.cache, plan)
        return query, bytes_of(step.cache.key).flatten(0, 1)[slots.long()]

    query, key = prepare(slice(None))
    for token in range(tokens):
        alone = slice(token, token + 1)
        assert all(map(torch.equal, prepare(alone), (query[alone], key[alone])))


def projected(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """[tokens, heads, dim] random, columns of a wider projection whose others are NaN."""
    wide = torch.full((tokens, (heads + 1) * dim), torch.nan, dtype=dtype, device=device)
    qkv = wide[:, : heads * dim].unflatten(1, (heads, dim))
    return qkv.copy_(torch.randn(qkv.shape, device=device))


def norms_of(shape: AttentionShape, dtype: torch.dtype | None, device: str) -> HeadNorms | None:
    """With random weights."""
    if dtype is None:
        return None
    weights = torch.randn(2, shape.head_dim, device=device).to(dtype)
    return HeadNorms(weights[0], weights[1], EPS)
