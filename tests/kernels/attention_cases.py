"""Steps of paged attention with random lengths and blocks, and what attention makes of them in
float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedHost, PagedSequences
from megatron_hybrid.kernels.paged_attention.prompts import TILE, GatheredLayout
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from tests.thorough import usually

Lengths = list[tuple[int, int]]  # (queries, keys) of each sequence, decodes first

FP8 = torch.float8_e4m3fn
# A typical one, and one that makes numbers saturate. Not powers of two: they would not be rounded.
K_SCALE, V_SCALE = 0.013, 0.0041


def attention_shape(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    first_position: int = 0,
    kv_dtype: torch.dtype | None = None,
    window: int = 0,
    relative: bool = False,
    sinks: bool = False,
) -> AttentionShape:
    """`kv_dtype`: None: the same as `dtype`."""
    scale = 0.9 * head_dim**-0.5  # not the usual one, which kernels take by themselves
    return AttentionShape(
        heads, kv_heads, head_dim, scale, block_size, dtype, kv_dtype or dtype, first_position,
        window=window, relative=relative, sinks=sinks,
    )  # fmt: skip


@dataclass
class AttentionStep:
    """A step over a cache that holds every sequence's past; places of no token are NaN."""

    paged: PagedSequences
    query: Tensor  # views of one projection [tokens, heads + 2 * kv_heads, head_dim]
    key: Tensor
    value: Tensor
    cache: KVCache
    expected: Tensor  # [tokens, heads, head_dim] float64
    bias: RelativeBias | None = None  # of a relative shape
    sinks: Tensor | None = None  # [tokens, heads] of a shape with sinks


def attention_step(
    lengths: Lengths,
    shape: AttentionShape,
    *,
    decodes: int | None = None,
    scattered: bool = True,
    device: str = "cpu",
    seed: int = 0,
    bank: tuple[int, int] = (5, 20),
) -> AttentionStep:
    """`decodes`: how many of the first sequences count as decodes; all of one query if None.
    `bank`: profiles and extent of a relative shape's biases."""
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
    cache = poisoned_cache(shape, total + 1, device)
    qkv = normal(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    query, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    bias = None
    if shape.relative:
        profiles, extent = bank  # the weights are columns of something wider
        weights = normal(tokens, 3 + shape.heads * profiles)[:, 3:].unflatten(1, (-1, profiles))
        bias = RelativeBias(weights, normal(profiles, extent))
    sinks = None
    if shape.sinks:  # some take nearly nothing, some nearly all; columns of something wider
        sinks = 4 * normal(tokens, 3 + shape.heads)[:, 3:]
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
        wholes = []
        for stored, scale, own in (
            (cache.key, cache.k_scale, key[new]), (cache.value, cache.v_scale, value[new])
        ):  # fmt: skip
            old = kept(normal(past, shape.kv_heads, shape.head_dim), shape.kv_dtype, scale)
            bytes_of(stored).flatten(0, 1)[at[:past].to(device)] = bytes_of(old)
            whole = torch.cat((old.double(), kept(own, shape.kv_dtype, scale).double()))
            wholes.append(whole * scale)
        slots.append(at[past:])
        if n:
            own = None if bias is None else RelativeBias(bias.weights[new], bias.bank)
            sink = None if sinks is None else sinks[new]
            expected.append(naive(query[new], *wholes, past, shape, own, sink))
    host = PagedHost.of(
        np.array([n for n, _ in lengths]), np.array([keys for _, keys in lengths]), table, size
    )
    if decodes is None:
        decodes = sum(n == 1 for n, _ in lengths)
    paged = paged_sequences(host, torch.cat(slots), decodes, device)
    return AttentionStep(paged, query, key, value, cache, torch.cat(expected), bias, sinks)


def poisoned_cache(shape: AttentionShape, blocks: int, device: str) -> KVCache:
    """All NaN."""
    size = (blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    poison = torch.full(size, torch.nan, device=device).to(shape.kv_dtype)
    scales = (K_SCALE, V_SCALE) if shape.kv_dtype == FP8 else (1.0, 1.0)
    return KVCache(poison, poison.clone(), *scales)


def kept(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What a cache of this type keeps of them: in FP8 the nearest of its numbers, by a table."""
    if dtype != FP8:
        return values.to(dtype)
    table = torch.arange(127, dtype=torch.uint8)  # of the positive ones: 127 is NaN
    numbers = table.view(FP8).double().to(values.device)
    # as the kernels have it, where both neighbours are as near
    wanted = (values.float() / torch.full((), scale, device=values.device)).double()
    above = torch.searchsorted(numbers, wanted.abs().contiguous()).clamp(1, 126)
    low, high = numbers[above - 1], numbers[above]
    down, up = wanted.abs() - low, high - wanted.abs()
    nearer = (up < down) | ((up == down) & (above % 2 == 0))  # of two the even one
    code = torch.where(nearer, above, above - 1) + 128 * wanted.signbit()
    code = torch.where(wanted.isnan(), 127, code)
    return code.to(torch.uint8).view(FP8)


def bytes_of(stored: Tensor) -> Tensor:
    """FP8 as bytes, which can be compared and moved."""
    return stored.view(torch.uint8) if stored.dtype == FP8 else stored


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


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    shape: AttentionShape,
    bias: RelativeBias | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """In float64: query [n, heads, dim] from position `start`, key [kv, kv_heads, dim]."""
    n, heads, _ = query.shape
    repeat = heads // key.shape[1]
    k = key.double().repeat_interleave(repeat, 1)
    v = value.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,khd->hnk", query.double(), k) * shape.scale
    position = torch.arange(start, start + n, device=query.device)
    at = torch.arange(len(key), device=query.device)
    if bias is not None:
        profiles = bias.weights.double() @ bias.bank.double()  # [n, heads, extent]
        for i, own in enumerate(profiles):
            for distance in range(min(start + i + 1, bias.extent)):
                scores[:, i, start + i - distance] += own[:, distance]
    hidden = (at > position[:, None]) | (at < shape.first_position)
    if shape.window:
        hidden |= at <= position[:, None] - shape.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().T[:, :, None]), dim=2)
    weights = scores.softmax(-1)[:, :, : len(key)]
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
    out = attention.attend(step.query, step.cache, plan, step.bias, step.sinks)
    assert out.is_contiguous() and out.dtype == shape.dtype
    torch.testing.assert_close(out.double(), step.expected, atol=tolerance, rtol=tolerance)


def check_first_position(attention: Any, lengths: Lengths, **kwargs: Any) -> None:
    """What is not seen may be anything but NaN."""
    for first in (1, 3):
        shape = attention_shape(first_position=first)
        check(attention, [(n, keys + first) for n, keys in lengths], shape, **kwargs)


# Decodes and prompts that end before, at and behind the edges of windows, blocks and tiles; long
# ones of which whole tiles see nothing of each other.
WINDOW_LENGTHS = [
    (1, 1), (1, 7), (1, 8), (1, 9), (1, 70), (1, 200), (1, 321), (3, 3), (3, 70), (7, 7), (8, 8),
    (9, 9), (5, 40), (60, 64), (2, 65), (130, 131), (140, 140), (150, 290),
]  # fmt: skip
WINDOWS = (1, 2, 8, 9, 64, 100)


def check_windows(
    attention: Any,
    lengths: Lengths = WINDOW_LENGTHS,
    windows: Iterable[int] = WINDOWS,
    *,
    tolerance: float = 1e-5,
    decodes: int | None = None,
    device: str = "cpu",
    **shape: Any,
) -> None:
    """A token sees so many tokens, itself included. What is in blocks before all windows of a
    sequence may be NaN, if whole tiles of keys are: its sequence may begin behind them."""
    for window in windows:
        of = attention_shape(window=window, **shape)
        where = {"decodes": decodes, "device": device}
        check(attention, lengths, of, tolerance=tolerance, **where)
        check_begins_behind(attention, lengths, of, tolerance=tolerance, **where)


def check_biases(
    attention: Any,
    lengths: Lengths,
    banks: Iterable[tuple[int, int]] = ((5, 20), (16, 1), (3, 64), (1, 400)),
    *,
    tolerance: float = 1e-5,
    windows: Iterable[int] = (0, 9),
    device: str = "cpu",
    decodes: int | None = None,
    **shape: Any,
) -> None:
    """Scores have a bias by distance, nearer than the bank's extent, which ends inside of tiles, at
    their ends, before and behind a window's and a sequence's."""
    for bank in banks:
        for window in windows:
            of = attention_shape(window=window, relative=True, **shape)
            where = {"device": device, "decodes": decodes, "bank": bank}
            check(attention, lengths, of, tolerance=tolerance, **where)
            if window:
                check_begins_behind(attention, lengths, of, tolerance=tolerance, **where)


def check_sinks(
    attention: Any,
    lengths: Lengths,
    *,
    tolerance: float = 1e-5,
    device: str = "cpu",
    decodes: int | None = None,
    **shape: Any,
) -> None:
    """Queries have sinks, with a bias by distance and without one, with a window and without, and
    also before the first position that is seen."""
    where: Any = {"device": device, "decodes": decodes, "tolerance": tolerance}
    every = ((False, 0), (False, 9), (True, 0), (True, 9))
    for relative, window in usually(every[1:3], every):
        of = attention_shape(relative=relative, window=window, sinks=True, **shape)
        check(attention, lengths, of, **where)
        if window:
            check_begins_behind(attention, lengths, of, **where)
    of = attention_shape(first_position=3, sinks=True, **shape)
    check(attention, [(n, keys + 3) for n, keys in lengths], of, **where)


def check_begins_behind(
    attention: Any,
    lengths: Lengths,
    shape: AttentionShape,
    *,
    tolerance: float,
    keys: int = 1,
    **kwargs: Any,
) -> Tensor:
    """The same is computed of sequences of which the first blocks are gone, at multiples of `keys`
    tokens; returns it."""
    step = attention_step(lengths, shape, **kwargs)
    paged, host, size = step.paged, step.paged.host, shape.block_size
    queries, unit = np.diff(host.cu_seqlens), np.lcm(size, keys)
    first = np.maximum(0, host.kv_length - queries - shape.window + 1) // unit * unit // size
    blocks = np.diff(host.kv_indptr)
    table = np.zeros((len(queries), int(blocks.max()) + 1), dtype=np.int64)
    for row, skipped in enumerate(first.tolist()):
        own = host.kv_indices[host.kv_indptr[row] : host.kv_indptr[row + 1]]
        gone = torch.from_numpy(own[:skipped].astype(np.int64))
        for stored in (step.cache.key, step.cache.value):
            bytes_of(stored)[gone] = bytes_of(stored.new_full((), torch.nan))
        table[row, : len(own) - skipped] = own[skipped:]
    later = PagedHost.of(queries, host.kv_length - first * size, table, size)
    view = paged_sequences(later, paged.kv_slot, paged.num_decodes, str(paged.kv_slot.device))
    plan = attention.plan(view, shape)
    attention.append(step.key, step.value, step.cache, plan)
    out: Tensor = attention.attend(step.query, step.cache, plan, step.bias, step.sinks)
    torch.testing.assert_close(out.double(), step.expected, atol=tolerance, rtol=tolerance)
    return out


def check_bits_of_windows(
    attention: Any, keys: int, windows: Iterable[int] = WINDOWS, **shape: Any
) -> None:
    """Where a sequence begins, at multiples of `keys` tokens, changes no bit; nor do others."""
    lengths = [(1, 70), (1, 110), (3, 90), (40, 80), (1, 9)]
    for window in windows:
        of = attention_shape(window=window, **shape)
        step = attention_step(lengths, of, decodes=2)
        plan = attention.plan(step.paged, of)
        attention.append(step.key, step.value, step.cache, plan)
        whole = attention.attend(step.query, step.cache, plan, step.bias, step.sinks)
        behind = check_begins_behind(attention, lengths, of, tolerance=1e-5, keys=keys, decodes=2)
        assert torch.equal(whole, behind)
        for places in ([0], [3, 4], [6, 7, 8], list(range(25, 45))):
            owner = np.searchsorted(step.paged.host.cu_seqlens, places[0], side="right") - 1
            end = int(step.paged.host.cu_seqlens[owner + 1])
            host = step.paged.host
            blocks = host.kv_indices[host.kv_indptr[owner] : host.kv_indptr[owner + 1]]
            kv_length = int(host.kv_length[owner]) - (end - 1 - places[-1])
            alone = PagedHost.of(
                np.array([len(places)]), np.array([kv_length]), blocks[None], of.block_size
            )
            one = paged_sequences(alone, step.paged.kv_slot[places], 0, "cpu")
            plan = attention.plan(one, of)
            bias = step.bias
            if bias is not None:
                bias = RelativeBias(bias.weights[places], bias.bank)
            sinks = None if step.sinks is None else step.sinks[places]
            out = attention.attend(step.query[places], step.cache, plan, bias, sinks)
            assert torch.equal(out, whole[places])


def check_gathered(
    gather_kv: Any, lengths: Lengths, shape: AttentionShape, decodes: int, device: str = "cpu"
) -> None:
    """Into NaN, from a cache that is NaN where no token is: each sequence's rows, then zeros up to
    the next one's; and nothing behind the last."""
    step = attention_step(lengths, shape, decodes=decodes, device=device)
    paged, host = step.paged, step.paged.host
    append(step)
    layout = GatheredLayout.of(host, decodes)
    size = (layout.rows + 3, shape.kv_heads, shape.head_dim)
    key = torch.full(size, torch.nan, dtype=shape.kv_dtype, device=device)
    value = key.clone()
    tiles = (torch.from_numpy(part).to(device) for part in (layout.sequence, layout.position))
    gather_kv(step.cache, key[:-3], value[:-3], *tiles, paged)
    for gathered, stored in ((key, step.cache.key), (value, step.cache.value)):
        assert gathered[-3:].isnan().all()
        first = 0
        for row in range(decodes, len(lengths)):
            queries, keys = lengths[row]
            if not queries:
                continue
            blocks = host.kv_indices[host.kv_indptr[row] : host.kv_indptr[row + 1]]
            expected = stored[torch.from_numpy(blocks).long().to(device)].flatten(0, 1)[:keys]
            assert torch.equal(gathered[first : first + keys], expected)
            end = first + -(-keys // TILE) * TILE
            assert not gathered[first + keys : end].any()
            first = end
        assert first == layout.rows


def append(step: AttentionStep) -> None:
    """The step's keys and values, into its cache."""
    places = step.paged.kv_slot.long()
    step.cache.key.flatten(0, 1)[places] = step.key
    step.cache.value.flatten(0, 1)[places] = step.value


def check_masked_writes(
    attention: Any, device: str = "cpu", kv_dtype: torch.dtype | None = None
) -> None:
    """Tokens of matched blocks are computed again; their writes go to the dummy block 0."""
    shape = attention_shape(kv_dtype=kv_dtype)
    step = attention_step([(3, 9)], shape, device=device)
    slots = step.paged.kv_slot.clone()
    slots[:2] = 0
    stored = bytes_of(step.cache.key)
    before = stored.clone()
    plan = attention.plan(replace(step.paged, kv_slot=slots), shape)
    attention.append(step.key, step.value, step.cache, plan)
    last = slots[2].long()
    rows, old = stored.flatten(0, 1), before.flatten(0, 1)
    expected = kept(step.key[2], shape.kv_dtype, step.cache.k_scale)
    assert torch.equal(rows[last], bytes_of(expected))
    rows[last] = old[last]
    assert_same(stored[1:], before[1:])


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal, and NaN where the other one is."""
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def check_stored_fp8(attention: Any, device: str = "cpu") -> None:
    """What is too large saturates, and a NaN stays visible: in what is stored, and in what all
    queries get that see it."""
    shape = attention_shape(kv_dtype=FP8)
    step = attention_step([(3, 9), (1, 40)], shape, device=device)
    numbers = [0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf, 5.9, 2e-5]
    step.key[0, 0] = torch.tensor(numbers, device=device)
    step.value[1, 1, 3] = torch.nan
    plan = attention.plan(step.paged, shape)
    attention.append(step.key, step.value, step.cache, plan)
    places = step.paged.kv_slot.long()
    for new, stored, scale in (
        (step.key, step.cache.key, K_SCALE), (step.value, step.cache.value, V_SCALE)
    ):  # fmt: skip
        found = bytes_of(stored).flatten(0, 1)[places]
        assert torch.equal(found & 127, bytes_of(kept(new, FP8, scale)) & 127)  # but for the sign
        assert (found.view(FP8).float() * new >= 0).logical_or(new.isnan()).all()
    stored = step.cache.key.flatten(0, 1)[places[0]][0].float()
    assert stored[:6].tolist() == [0.0, 0.0, 448.0, -448.0, 448.0, -448.0]
    step.key[0, 0] = 0.0  # which was no more than a look at what is stored
    attention.append(step.key, step.value, step.cache, plan)
    missing = attention.attend(step.query, step.cache, plan).isnan()
    group = shape.heads // shape.kv_heads
    assert missing[1:3, group : 2 * group, 3].all()
    assert not missing[3].any()  # of the other sequence


def check_copied_tokens(
    attention: Any, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Two readers of one source; what a source holds past the copied tokens may be anything."""
    size = 4
    generator = torch.Generator(device).manual_seed(0)
    dims = (5, size, 2, 8)
    cache = KVCache(
        torch.randn(dims, generator=generator, device=device).to(dtype),
        torch.full(dims, float("nan"), device=device).to(dtype),
    )
    copied = torch.randn(3, 2, 8, generator=generator, device=device).to(dtype)
    bytes_of(cache.value)[1, :3] = bytes_of(copied)
    before = KVCache(cache.key.clone(), cache.value.clone())
    kind = torch.int64 if device == "cpu" else torch.int32
    # tokens 0 to 2 of block 1 to block 4, its token 0 to block 2
    source = torch.tensor([4, 5, 6, 4], dtype=kind, device=device)
    destination = torch.tensor([16, 17, 18, 8], dtype=kind, device=device)
    attention.copy_tokens(cache, source, destination)
    for new, before_it in ((cache.key, before.key), (cache.value, before.value)):
        old = bytes_of(before_it)
        expected = old.clone()
        expected[4, :3], expected[2, 0] = old[1, :3], old[1, 0]
        assert_same(bytes_of(new), expected)


class Turns(NamedTuple):
    """Sequences of so many tokens each, of which any part is computed at any time; their blocks lie
    anywhere."""

    table: np.ndarray  # [sequences, blocks]
    size: int  # of a block

    @classmethod
    def of(cls, lengths: list[int], size: int, seed: int = 0) -> Turns:
        counts = [-(-length // size) for length in lengths]
        order = np.random.default_rng(seed).permutation(sum(counts)) + 1
        table = np.zeros((len(counts), max(counts)), dtype=np.int64)
        for row, blocks in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            table[row, : len(blocks)] = blocks
        return cls(table, size)

    @property
    def blocks(self) -> int:
        """That a cache for them has."""
        return int(self.table.max()) + 1

    def paged(
        self, bounds: list[list[int]], decodes: int = 0, longest_run: int = 0, device: str = "cpu"
    ) -> Iterator[tuple[list[tuple[int, int]], PagedSequences]]:
        """The steps that compute tokens bounds[s][i] to bounds[s][i + 1], for each i, and those
        two; the first `decodes` sequences count as such."""
        table, size = self
        for turn in range(len(bounds[0]) - 1):
            spans = [(row[turn], row[turn + 1]) for row in bounds]
            queries = np.array([b - a for a, b in spans])
            ends = np.array([max(b, 1) for _, b in spans])
            slots = [
                table[row, np.arange(a, b) // size] * size + np.arange(a, b) % size
                for row, (a, b) in enumerate(spans)
            ]
            host = PagedHost.of(queries, ends, table, size)
            kv_slot = torch.from_numpy(np.concatenate(slots))
            paged = paged_sequences(host, kv_slot, decodes, device)
            yield spans, replace(paged, longest_run=longest_run)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def in_turns(lengths: list[int], step: int) -> list[list[int]]:
    turns = -(-max(lengths) // step)
    return [[min(turn * step, length) for turn in range(turns + 1)] for length in lengths]


def padded_sequences(
    paged: PagedSequences, decodes: int, prompts: int, tokens: int, blocks: int, longest_run: int
) -> tuple[PagedSequences, Callable[[Tensor, float], Tensor]]:
    """A step as one of a graph: padded decodes have a token of block 0, padded prompts none, and
    padded tokens belong to nobody. And what spreads a row for each token so, with a filler."""
    host, n = paged.host, paged.num_decodes
    fill = decodes - n
    middle = int(host.cu_seqlens[n])

    def filled(values: list[int], decode: int, prompt: int) -> list[int]:
        rest = prompts - (len(values) - n)
        return values[:n] + [decode] * fill + values[n:] + [prompt] * rest

    def spread(x: Tensor, filler: float) -> Tensor:
        out = x.new_full((tokens, *x.shape[1:]), filler)
        out[:middle], out[middle : middle + fill] = x[:middle], 0
        out[middle + fill : len(x) + fill] = x[middle:]
        return out

    own = [host.kv_indices[a:b].tolist() for a, b in pairwise(host.kv_indptr)]
    listed = own[:n] + [[0]] * fill + own[n:] + [[0]] * (prompts - (len(own) - n))
    padded_host = PagedHost(
        np.cumsum([0, *filled(np.diff(host.cu_seqlens).tolist(), 1, 0)]),
        np.array(filled(host.kv_length.tolist(), 1, 1)),
        np.cumsum([0, *map(len, listed)]),
        np.concatenate(listed),
        np.array(filled(host.last_block_length.tolist(), 1, 1)),
    )
    device = paged.kv_slot.device.type
    found = paged_sequences(padded_host, spread(paged.kv_slot, 0), decodes, device)
    indices = found.kv_indices.new_zeros(blocks)
    indices[: len(found.kv_indices)] = found.kv_indices
    return replace(found, kv_indices=indices, static=True, longest_run=longest_run), spread
