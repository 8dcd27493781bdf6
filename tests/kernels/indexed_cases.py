"""Sequences that grow step by step in a paged cache with an index, and what attention makes of each
token in float64: from all raw entries, group by group, as the papers' formulas are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, IndexShape, KVCache, PagedHost
from megatron_hybrid.kernels.indexed_attention import reference
from megatron_hybrid.kernels.indexed_attention.protocol import (
    GatedPool,
    IndexNorm,
    MeanPool,
    Pool,
)
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from tests.kernels.attention_cases import paged_sequences

EPS = 1e-5
INDEX = IndexShape(heads=8, dim=8, group=4, chosen=3)


class Kernels(NamedTuple):
    """Of one implementation: attention, or latent attention; and with an index."""

    attention: Any
    indexed: Any


def indexed_shape(
    index: IndexShape = INDEX,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    value_dim: int | None = None,
) -> AttentionShape:
    return AttentionShape(
        heads, kv_heads, head_dim, 0.9 * head_dim**-0.5, block_size, dtype, dtype,
        value_dim=value_dim, index=index,
    )  # fmt: skip


class Last(NamedTuple):
    """A step's plan, its index queries as they choose, their heads' weights, and where it began in
    each sequence."""

    plan: Any
    chooses: Tensor
    weights: Tensor | None
    begins: list[int]


class Prepared(NamedTuple):
    """A step's plan, and its tokens."""

    plan: Any
    positions: Tensor
    places: Tensor
    begins: list[int]
    query: Tensor
    key: Tensor
    value: Tensor
    entries: Tensor
    index_query: Tensor
    weights: Tensor


@dataclass
class Sequences:
    """All tokens of some sequences of these lengths, and a cache that has none of them: all NaN."""

    shape: AttentionShape
    lengths: Sequence[int]
    pool: Pool
    gated: bool
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        shape, index = self.shape, self.index
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> list[Tensor]:
            made = [torch.randn((n, *size), generator=generator) for n in self.lengths]
            return [one.to(self.device, shape.dtype) for one in made]

        self.query = normal(shape.heads, shape.head_dim)
        self.key = normal(shape.kv_heads, shape.head_dim)
        self.value = normal(shape.kv_heads, shape.head_dim)
        self.index_query = normal(index.heads, index.dim)
        self.weights = [one.float() for one in normal(index.heads)]
        self.entries = normal(index.dim * (1 + self.gated))
        blocks = [-(-n // shape.block_size) for n in self.lengths]
        order = torch.randperm(sum(blocks), generator=generator).numpy() + 1
        self.table = np.zeros((len(blocks), max(blocks) + 1), dtype=np.int64)
        for row, own in enumerate(np.split(order, np.cumsum(blocks)[:-1])):
            self.table[row, : len(own)] = own
        rows = sum(blocks) + 1, shape.block_size
        key, value, entries = (
            torch.full((*rows, *size), torch.nan, device=self.device, dtype=shape.dtype)
            for size in (
                (shape.kv_heads, shape.head_dim),
                (shape.kv_heads, shape.head_dim),
                (self.entries[0].shape[1],),
            )
        )
        if shape.value_dim is not None:  # values are among the keys
            value = key[..., : shape.value_dim]
            self.value = [one[..., : shape.value_dim] for one in self.key]
        self.cache = KVCache(key, value, index=entries)
        self.done = [0] * len(self.lengths)
        self.most_blocks = 0  # not 0: steps are static

    @property
    def index(self) -> IndexShape:
        assert self.shape.index is not None
        return self.shape.index

    def step(self, counts: Sequence[int], kernels: Kernels, weights: Any = None) -> Tensor:
        """The next tokens of each sequence, so many -> what attention gives. `weights`: of latent
        attention."""
        return self.run(self.prepare(counts, kernels), kernels, weights)

    def prepare(self, counts: Sequence[int], kernels: Kernels) -> Prepared:
        """The same, on the host: all that follows can be captured."""
        begins = list(self.done)
        self.done = [a + n for a, n in zip(begins, counts, strict=True)]
        size = self.shape.block_size
        host = PagedHost.of(np.array(counts), np.maximum(self.done, 1), self.table, size)
        places = [
            self.table[row, np.arange(a, b) // size] * size + np.arange(a, b) % size
            for row, (a, b) in enumerate(zip(begins, self.done, strict=True))
        ]
        decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
        kv_slot = torch.from_numpy(np.concatenate(places))
        paged = paged_sequences(host, kv_slot, decodes, self.device)
        if self.most_blocks:
            paged = replace(paged, static=True, most_blocks=self.most_blocks)
        positions = torch.cat([torch.arange(a, b) for a, b in zip(begins, self.done, strict=True)])

        def of(parts: list[Tensor]) -> Tensor:
            return torch.cat([one[a:b] for one, a, b in zip(parts, begins, self.done, strict=True)])

        every = kernels.attention.plan(paged, self.shape)
        self.stepped = of(self.query)
        return Prepared(
            kernels.indexed.plan(paged, self.shape, every),
            positions.to(paged.kv_slot),
            kv_slot.to(self.device),
            begins,
            *map(of, (self.query, self.key, self.value, self.entries, self.index_query)),
            of(self.weights),
        )

    def run(self, step: Prepared, kernels: Kernels, weights: Any = None) -> Tensor:
        """What attention gives."""
        indexed, plan = kernels.indexed, step.plan
        self._append(step.key, step.value, step.places)
        # rows are strided
        wide = torch.cat([step.entries, torch.full_like(step.entries, torch.nan)], 1)
        own = wide[:, : step.entries.shape[1]]
        indexed.store(own, self.pool, step.positions, self.cache, plan)
        if self.gated:
            chooses, by = step.index_query, step.weights
        else:
            assert isinstance(self.pool, MeanPool)
            chooses, by = indexed.turn(step.index_query, self.pool.norm, step.positions), None
        indexed.select(chooses, by, self.cache, plan)
        self.last = Last(plan, chooses, by, step.begins)
        if weights is not None:
            return indexed.attend_latents(step.query, weights, self.cache, plan)
        return indexed.attend(step.query, self.cache, plan)

    def _append(self, key: Tensor, value: Tensor, places: Tensor) -> None:
        self.cache.key.flatten(0, 1)[places] = key
        if self.shape.value_dim is None:
            self.cache.value.flatten(0, 1)[places] = value

    def expected(self, sequence: int, position: int) -> Tensor:
        """[heads, value_dim] float64"""
        shape, seen = self.shape, self.visible(sequence, position)
        each = shape.heads // shape.kv_heads
        query = self.query[sequence][position].double().cpu()
        key, value = (
            part[sequence][seen].double().cpu().repeat_interleave(each, 1)
            for part in (self.key, self.value)
        )
        scores = torch.einsum("hd,khd->hk", query, key) * shape.scale
        return torch.einsum("hk,khd->hd", scores.softmax(1), value)

    def visible(self, sequence: int, position: int) -> list[int]:
        """Positions that a token sees."""
        group, whole = self.index.group, (position + 1) // self.index.group
        query = self.index_query[sequence][position].double().cpu()
        weights = self.weights[sequence][position].double().cpu()
        if not self.gated:
            assert isinstance(self.pool, MeanPool)
            query, weights = by_hand(query, self.pool.norm, position), torch.ones(len(query))
        scores = [
            (weights * (query @ self.group_key(sequence, i)).relu()).sum() for i in range(whole)
        ]
        best = sorted(range(whole), key=lambda i: -float(scores[i]))[: self.index.chosen]
        tail = range(whole * group, position + 1)
        return [p for i in sorted(best) for p in range(i * group, (i + 1) * group)] + [*tail]

    def group_key(self, sequence: int, number: int) -> Tensor:
        """[dim] float64"""
        group = self.index.group
        own = self.entries[sequence][number * group : (number + 1) * group].double().cpu()
        if isinstance(self.pool, GatedPool):
            keys, gates = own.chunk(2, dim=1)
            return ((gates + self.pool.bias.double().cpu()).softmax(0) * keys).sum(0)
        return by_hand(own.mean(0)[None], self.pool.norm, number * group)[0]


def check_choices(own: Sequences, found: Tensor, tolerance: float) -> None:
    """Of the last step, in any type and of any length: each group's key against the reference's,
    that none which was left out has a higher score by what the cache holds, and the result of
    attention to what was chosen, in float64."""
    shape, index, last = own.shape, own.index, own.last
    done, cache = 0, own.cache
    assert cache.index is not None
    each = shape.heads // shape.kv_heads
    for row, (begin, end) in enumerate(zip(last.begins, own.done, strict=True)):
        count, whole = end - begin, end // index.group
        tokens = slice(done, done + count)
        done += count
        if not count:
            continue
        at = torch.arange(end)
        table = torch.from_numpy(own.table[row])
        places = (table[at // shape.block_size] * shape.block_size + at % shape.block_size).to(
            found.device
        )
        stored = cache.index.flatten(0, 1)[places]
        groups = stored[index.group - 1 :: index.group][:whole, : index.dim]
        first = torch.arange(whole, device=found.device) * index.group
        entries = own.entries[row][: whole * index.group].unflatten(0, (whole, index.group))
        limit = 1e-4 if shape.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            groups.float(),
            reference.pooled(entries, own.pool, first).float(),
            atol=limit,
            rtol=limit,
        )
        position = torch.arange(begin, end, device=found.device)
        seen = position + 1
        scores = torch.einsum("thd,gd->thg", last.chooses[tokens].double(), groups.double()).relu()
        if last.weights is not None:
            scores *= last.weights[tokens].double()[:, :, None]
        scores = scores.sum(1)
        chosen = last.plan.chosen[tokens].long()
        there = first[None] < (seen // index.group * index.group)[:, None]
        taken = torch.zeros((count, whole + 1), dtype=torch.bool, device=found.device)
        taken.scatter_(1, torch.where(chosen < 0, whole, chosen), True)
        taken = taken[:, :whole]
        assert torch.equal(taken.sum(1), (seen // index.group).clamp(max=index.chosen))
        assert not (taken & ~there).any()
        least = scores.masked_fill(~taken, torch.inf).amin(1)
        most = scores.masked_fill(taken | ~there, -torch.inf).amax(1)
        assert (least >= most - 1e-4 * scores.abs().amax()).all()
        sees = reference.sees(chosen, seen, torch.arange(end, device=found.device), index.group)
        key, value = (
            part[row][:end].double().repeat_interleave(each, 1) for part in (own.key, own.value)
        )
        logits = torch.einsum("qhd,khd->hqk", own.query[row][begin:end].double(), key) * shape.scale
        weights = logits.masked_fill(~sees, -torch.inf).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", weights, value)
        torch.testing.assert_close(found[tokens].double(), wanted, atol=tolerance, rtol=tolerance)


def by_hand(x: Tensor, norm: IndexNorm, position: int) -> Tensor:
    """x [rows, dim] float64, normed and rotated."""
    x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double().cpu()
    half = len(norm.frequencies)
    pairs = torch.complex(x[:, :half], x[:, half : 2 * half])
    angles = (position * norm.frequencies.cpu()).double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag, x[:, 2 * half :]], 1)


def sequences(
    lengths: Sequence[int],
    gated: bool,
    shape: AttentionShape | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Sequences:
    shape = shape or indexed_shape()
    index = shape.index
    assert index is not None
    generator = torch.Generator().manual_seed(seed + 1)
    if gated:
        bias = torch.randn((index.group, index.dim), generator=generator)
        pool: Pool = GatedPool(bias.to(device, shape.dtype))
    else:
        weight = 1 + 0.3 * torch.randn(index.dim, generator=generator)
        rotated = index.dim // 2
        frequencies = 1e3 ** -(torch.arange(0, rotated, 2) / rotated)
        norm = IndexNorm(weight.to(device, shape.dtype), EPS, frequencies.to(device))
        pool = MeanPool(norm)
    return Sequences(shape, lengths, pool, gated, device, seed)


def check(
    kernels: Kernels,
    steps: Sequence[Sequence[int]],
    gated: bool,
    shape: AttentionShape | None = None,
    device: str = "cpu",
    tolerance: float = 1e-5,
) -> None:
    """Of sequences that grow by so many tokens in each step, every token's result."""
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    own = sequences(lengths, gated, shape, device)
    for counts in steps:
        begins = list(own.done)
        found = own.step(counts, kernels).double().cpu().split(list(counts))
        for row, (begin, part) in enumerate(zip(begins, found, strict=True)):
            for i, one in enumerate(part):
                wanted = own.expected(row, begin + i)
                torch.testing.assert_close(one, wanted, atol=tolerance, rtol=tolerance)


def latent_weights(
    shape: AttentionShape, v_dim: int = 6, device: str = "cpu"
) -> tuple[LatentWeights, Tensor]:
    """Heads' queries are as wide as a latent: their keys' weights are the identity. And the values'
    weights."""
    size = shape.value_dim
    assert size is not None
    value = torch.randn((shape.heads, v_dim, size), generator=torch.Generator().manual_seed(3))
    key = torch.eye(size).expand(shape.heads, -1, -1)
    both = torch.cat((key, value), dim=1).to(device, shape.dtype)
    return LatentWeights(both, size), value.double()
