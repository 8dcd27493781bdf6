"""Steps of multi-head latent attention, and what it makes of them in float64: by keys and values of
every head, which no implementation makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.latent_attention.protocol import LatentNorm, LatentWeights
from tests.kernels.attention_cases import (
    FP8,
    Lengths,
    Turns,
    assert_equal,
    assert_same,
    attention_step,
    bytes_of,
    in_turns,
    kept,
)
from tests.kernels.norm_cases import EPS, normed

MIXED: Lengths = [
    (1, 9), (1, 1), (1, 100), (4, 35), (5, 33), (3, 3), (0, 3), (6, 100), (40, 71), (2, 65),
]  # fmt: skip


def latent_shape(
    heads: int = 4,
    latent: int = 16,
    turned: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    first_position: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionShape:
    """`kv_dtype`: None: the same as `dtype`."""
    width = latent + turned
    return AttentionShape(
        heads, 1, width, 0.9 * width**-0.5, block_size, dtype, kv_dtype or dtype, first_position,
        latent,
    )  # fmt: skip


@dataclass
class LatentStep:
    """A step over a cache that holds every sequence's past; places of no token are NaN."""

    shape: AttentionShape
    paged: PagedSequences
    query: Tensor  # [tokens, heads, nope + turned], a view of one projection
    latent: Tensor  # [tokens, latent + turned], likewise
    norm: LatentNorm
    weights: LatentWeights
    positions: Tensor  # [tokens]
    cache: KVCache

    def rotation(self, rope: Any, turns: bool) -> Any:
        """`rope`'s plan for the step; None where nothing is rotated."""
        return rope.plan(self.positions, self.frequencies, self.shape.dtype) if turns else None

    @property
    def frequencies(self) -> Tensor:
        turned = self.latent.shape[1] - len(self.norm.weight)
        # made where they are read: a CUDA graph can't copy them there
        return 1e3 ** -(torch.arange(0, turned, 2, device=self.latent.device) / 64)


def latent_step(
    lengths: Lengths,
    shape: AttentionShape,
    *,
    nope: int = 12,
    v_dim: int = 10,
    decodes: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> LatentStep:
    """Weights, norms and tokens are random."""
    step = attention_step(lengths, shape, decodes=decodes, device=device, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    size = shape.value_dim
    assert size is not None
    tokens, width = len(step.query), nope + shape.head_dim - size
    wide = torch.full(
        (tokens, shape.heads * width + shape.head_dim + 3), torch.nan, device=device
    ).to(shape.dtype)
    query = wide[:, : shape.heads * width].unflatten(1, (shape.heads, width))
    latent = wide[:, shape.heads * width : -3]
    query.copy_(normal(*query.shape))
    latent.copy_(step.key[:, 0])
    both = normal(shape.heads, nope + v_dim, size) * size**-0.5
    stored, scale = step.cache.key, step.cache.k_scale
    ends = [(keys - n, keys) for n, keys in lengths]
    positions = torch.cat([torch.arange(*span) for span in ends]).to(step.paged.kv_slot)
    return LatentStep(
        shape, step.paged, query, latent, LatentNorm(1 + 0.3 * normal(size), EPS),
        LatentWeights(both, nope), positions,
        KVCache(stored, stored[..., :size], scale, scale),
    )  # fmt: skip


def turned_by_hand(x: Tensor, step: LatentStep, interleaved: bool) -> Tensor:
    """x [tokens, heads, turned] in float64: pairs are complex numbers, and stay where they are."""
    x, half = x.double(), x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    # angles in float32, as every implementation takes them
    angles = (step.positions[:, None].float() * step.frequencies).double()[:, None]
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    real = torch.view_as_real(turned)
    return real.flatten(-2) if interleaved else real.mT.flatten(-2)


def expected(
    step: LatentStep, turns: bool, interleaved: bool, stored: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What is stored of the step's tokens, in the type of the cache (or is given); their queries,
    rotated; what attention gives. The last two in float64."""
    shape, host, size = step.shape, step.paged.host, len(step.norm.weight)
    latent, query = step.latent.double(), step.query.double()
    nope = step.weights.key.shape[1]
    latent[:, :size] = normed(latent[:, :size], step.norm.weight)
    if turns:
        latent[:, None, size:] = turned_by_hand(step.latent[:, None, size:], step, interleaved)
        query[..., nope:] = turned_by_hand(step.query[..., nope:], step, interleaved)
    latent, query = latent.to(shape.dtype), query.to(shape.dtype).double()
    if stored is None:
        stored = kept(latent, shape.kv_dtype, step.cache.k_scale)
    rows = bytes_of(step.cache.key).flatten(0, 2).clone()
    rows[step.paged.kv_slot.long()] = bytes_of(stored)
    rows = rows.view(shape.kv_dtype)
    found = []
    for s in range(len(host.kv_length)):
        own = slice(int(host.cu_seqlens[s]), int(host.cu_seqlens[s + 1]))
        keys, queries = int(host.kv_length[s]), own.stop - own.start
        blocks = torch.from_numpy(host.kv_indices[host.kv_indptr[s] : host.kv_indptr[s + 1]])
        places = blocks.long().repeat_interleave(shape.block_size)[:keys] * shape.block_size
        places = (places + torch.arange(keys) % shape.block_size).to(rows.device)
        whole = bytes_of(rows)[places].view(shape.kv_dtype).double() * step.cache.k_scale
        c, behind = whole[:, :size], whole[:, size:]
        key = torch.einsum("kl,hnl->khn", c, step.weights.key.double())
        key = torch.cat((key, behind[:, None].expand(-1, shape.heads, -1)), dim=-1)
        value = torch.einsum("kl,hvl->khv", c, step.weights.value.double())
        scores = torch.einsum("qhd,khd->hqk", query[own], key) * shape.scale
        at = torch.arange(keys, device=rows.device)
        last = torch.arange(keys - queries, keys, device=rows.device)[:, None]
        hidden = (at > last) | (at < shape.first_position)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("hqk,khv->qhv", weights, value))
    return stored, query, torch.cat(found)


def attended(
    attention: Any, rope: Any, step: LatentStep, turns: bool = True, interleaved: bool = True
) -> Tensor:
    """What `attention` (a module or an object) gives; the step's queries are overwritten."""
    plan = attention.plan(step.paged, step.shape)
    rotation = step.rotation(rope, turns)
    query = attention.prepare(
        step.query, step.latent, step.norm, rotation, interleaved, step.cache, plan
    )
    found: Tensor = attention.attend(query, step.weights, step.cache, plan)
    return found


def check(
    attention: Any,
    rope: Any,
    lengths: Lengths,
    shape: AttentionShape | None = None,
    *,
    turns: bool = True,
    interleaved: bool = True,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> None:
    """What is stored, what becomes of queries, and what attention gives, against float64."""
    shape = shape or latent_shape()
    step = latent_step(lengths, shape, **kwargs)
    original = replace(step, query=step.query.clone())
    stored, query, result = expected(step, turns, interleaved)
    places, latent = step.paged.kv_slot.long(), step.latent.clone()
    rows = bytes_of(step.cache.key).flatten(0, 2)
    before = rows.clone()
    found = attended(attention, rope, step, turns, interleaved)
    limit = {"atol": tolerance, "rtol": tolerance}
    if shape.kv_dtype == FP8:  # who sees few tokens sees which way each number was rounded
        own = rows[places].view(shape.kv_dtype)
        _, _, result = expected(original, turns, interleaved, own)
    assert found.dtype == shape.dtype
    torch.testing.assert_close(found.double(), result, **limit)
    torch.testing.assert_close(step.query.double(), query, **limit)
    assert torch.equal(step.latent, latent)
    kept_rows = rows[places].view(shape.kv_dtype).double() * step.cache.k_scale
    if shape.kv_dtype == FP8:  # rounded twice: to one of its numbers, or to the next one
        limit = {"atol": tolerance + 2**-9 * step.cache.k_scale, "rtol": tolerance + 2**-3}
    torch.testing.assert_close(kept_rows, stored.double() * step.cache.k_scale, **limit)
    rows[places] = before[places]
    assert_same(rows, before)  # nothing else is written


def check_first_position(attention: Any, rope: Any, lengths: Lengths, **kwargs: Any) -> None:
    """What is not seen may be anything but NaN."""
    for first in (1, 3):
        shape = latent_shape(first_position=first)
        check(attention, rope, [(n, keys + first) for n, keys in lengths], shape, **kwargs)


def check_masked_writes(attention: Any, rope: Any, device: str = "cpu") -> None:
    """Tokens of matched blocks are computed again; their writes go to the dummy block 0."""
    step = latent_step([(3, 9)], latent_shape(), device=device)
    slots = step.paged.kv_slot.clone()
    slots[:2] = 0
    before = step.cache.key.clone()
    attended(attention, rope, replace(step, paged=replace(step.paged, kv_slot=slots)))
    rows, old = step.cache.key.flatten(0, 2), before.flatten(0, 2)
    last = slots[2].long()
    assert not rows[last].isnan().any()
    rows[last] = old[last]
    assert_same(step.cache.key[1:], before[1:])


class LatentSequences:
    """Some, with all their tokens, of which any part is computed at any time."""

    def __init__(self, lengths: list[int], shape: AttentionShape, device: str = "cpu") -> None:
        self.shape, self.lengths, self.device = shape, lengths, device
        whole = latent_step([(n, n) for n in lengths], shape, device=device)
        # scores that differ much: running maxima change often
        self.step = replace(whole, query=4 * whole.query, latent=3 * whole.latent)

    def results(
        self,
        attention: Any,
        rope: Any,
        bounds: list[list[int]],
        *,
        only: int | None = None,
        decodes: int = 0,
        block_size: int | None = None,
        seed: int = 0,
        longest_run: int = 0,
    ) -> list[Tensor]:
        """Of the tokens from bounds[s][i] to bounds[s][i + 1] in one call, for each i; the first
        `decodes` sequences count as those. Blocks lie anywhere, and hold NaN besides. `only`: of
        one sequence alone."""
        shape = replace(self.shape, block_size=block_size or self.shape.block_size)
        rows = [self.step.query.split(self.lengths), self.step.latent.split(self.lengths)]
        lengths = self.lengths
        if only is not None:
            rows, lengths = [[each[only]] for each in rows], [lengths[only]]
        turns = Turns.of(lengths, shape.block_size, seed)
        size = (turns.blocks, shape.block_size, 1, shape.head_dim)
        stored = torch.full(size, torch.nan, device=self.device).to(shape.kv_dtype)
        scale = self.step.cache.k_scale
        cache = KVCache(stored, stored[..., : shape.value_dim], scale, scale)
        found: list[list[Tensor]] = [[] for _ in lengths]
        for spans, paged in turns.paged(bounds, decodes, longest_run, self.device):
            query, latent = (
                torch.cat([own[a:b] for own, (a, b) in zip(each, spans, strict=True)])
                for each in rows
            )
            positions = torch.cat([torch.arange(*span) for span in spans]).to(paged.kv_slot)
            step = replace(
                self.step, shape=shape, paged=paged, query=query, latent=latent,
                positions=positions, cache=cache,
            )  # fmt: skip
            out = attended(attention, rope, step)
            for row, part in enumerate(out.split([b - a for a, b in spans])):
                found[row].append(part)
        return [torch.cat(parts) for parts in found]


def check_bits(
    attention: Callable[..., Any], rope: Any, shape: AttentionShape, lengths: list[int],
    device: str = "cpu",
) -> None:  # fmt: skip
    """A sequence's bits are its own, however it is cut and whatever is beside it. attention: makes
    one, with so many bytes for results of splits, or so many rows of a tile, which change none."""
    sequences = LatentSequences(lengths, shape, device)

    def results(attention: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
        return sequences.results(attention, rope, *args, **kwargs)

    whole = [[0, length] for length in lengths]
    expected = results(attention(rows=64), whole)
    for one in range(len(lengths)):  # alone; other tiles of queries, another block size and place
        for block_size in (5, 32):
            found = results(attention(), [whole[one]], only=one, block_size=block_size, seed=1)
            assert_equal(found, [expected[one]])
    chunks = [sorted({0, 1, n // 3, n // 3 + 1, n}) for n in lengths]
    assert_equal(results(attention(), chunks), expected)
    # in runs, whether partial results have room or not, and beside a prompt
    for decodes, workspace_bytes in ((len(lengths), 1 << 24), (len(lengths), 0), (1, 6000)):
        found = results(
            attention(workspace_bytes=workspace_bytes), in_turns(lengths, 16), decodes=decodes,
            longest_run=16,
        )  # fmt: skip
        assert_equal(found, expected)
    begins = max(1, min(lengths) - 9)
    bounds = [[0, *range(begins, begins + 6)]] * len(lengths)  # tokens one by one
    found = results(attention(), bounds, decodes=len(lengths))
    assert_equal(found, [own[: begins + 5] for own in expected])
