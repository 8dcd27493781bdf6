"""Latent attention of long prompts, by keys and values that each head makes of the latents: a pair
of a query and a key takes nope + turned + v_dim products then, instead of twice the latent's size
and more. For that every key is made, once a step.

    rows         the latents of all blocks that the prompts have, one behind another, in the type of
                 the products; zeros where there is no token
    made         rows @ each head's weights: [rows, heads, nope + v_dim], of some heads at a time
    attention    tiles of queries of one head, with tiles of `made`; what is turned of a key is read
                 from `rows`

Where an index chooses what a query sees, attention to all keys hides the others: bits say which.

Bits are not those of triton.py, and whether this is used depends on the whole step: batch-invariant
mode does without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.devices import stages_that_fit
from megatron_hybrid.kernels.latent_attention.protocol import LatentWeights
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E
from megatron_hybrid.kernels.paged_attention.triton_sequences import sequence_of
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import (
    _LEAST,
    _TABLES,
    _as_numbers,
    _finished,
    _item_of,
    _sequence_at,
)

# Queries that see a key, on average, from which on it pays to make it.
PAYS_FROM = 64
MADE_BYTES = 256 << 20  # of keys and values at a time; of one head at least
_ROWS, _KEYS = 128, 64  # of tiles
_GATHERED = 16  # tokens at a time
_SIZES = ["first_sequence", "sequences", "heads", "words"]


@dataclass(frozen=True, slots=True)
class Prompts:
    """A step's prompts, which are long enough: see `long_prompts`."""

    blocks: int  # of all of them
    tokens: int


class Chosen(NamedTuple):
    """What an index lets each token of the prompts see, besides the keys behind its last whole
    group."""

    bits: Tensor  # [tokens, words] int32: a bit for each group of tokens that are before it
    group: int  # tokens; a power of two, from 2 to _KEYS

    @classmethod
    def takes(cls, group: int) -> bool:
        """Whether groups may be of so many tokens."""
        return group in (2, 4, 8, 16, 32, _KEYS)


def long_prompts(paged: PagedSequences, shape: AttentionShape) -> Prompts | None:
    """The step's, if it pays to make their keys; None also where only the device knows them."""
    decodes, host = paged.num_decodes, paged.host
    if paged.static or shape.dtype == torch.float32 or len(host.kv_length) == decodes:
        return None
    queries = np.diff(host.cu_seqlens[decodes:]).astype(np.int64)
    pairs = queries * (host.kv_length[decodes:] - shape.first_position - queries // 2)
    blocks = int(host.kv_indptr[-1] - host.kv_indptr[decodes])
    if int(pairs.sum()) < PAYS_FROM * blocks * shape.block_size:
        return None
    return Prompts(blocks, int(queries.sum()))


def fits(weights: LatentWeights, shape: AttentionShape) -> bool:
    """Whether the kernels take heads of these sizes: tiles of powers of two, on whole vectors."""
    nope, v_dim, turned = weights.nope, weights.value.shape[1], _turned(shape)
    sizes = [nope, v_dim, *([turned] if turned else [])]
    return all(16 <= size <= 256 and size == next_power_of_2(size) for size in sizes)


def attend(
    query: Tensor,
    weights: LatentWeights,
    cache: KVCache,
    paged: PagedSequences,
    shape: AttentionShape,
    prompts: Prompts,
    output: Tensor,
    chosen: Chosen | None = None,
) -> None:
    """query [tokens, heads, nope + turned] -> output [tokens, heads, v_dim], of the prompts.
    `chosen`: None: all is seen."""
    heads, nope, latent = weights.key.shape
    v_dim, turned, device = weights.value.shape[1], _turned(shape), query.device
    rows = _gathered(cache, paged, shape, prompts.blocks, query.dtype)
    at_once = MADE_BYTES // (len(rows) * (nope + v_dim) * rows.itemsize)
    at_once = min(max(at_once, 1), heads)
    tile_bytes = _KEYS * (nope + v_dim + turned) * rows.itemsize
    stages = stages_that_fit(3, tile_bytes + _ROWS * (nope + turned) * rows.itemsize // 3, device)
    turned_tiles = _tiles(rows, turned) if turned else None
    first_sequence, sequences = paged.num_decodes, len(paged.kv_length) - paged.num_decodes
    for first in range(0, heads, at_once):
        own = slice(first, min(first + at_once, heads))
        count = own.stop - own.start
        made = torch.mm(rows[:, :latent], weights.both[own].flatten(0, 1).t())
        tiles = prompts.tokens // _ROWS + sequences
        _attention_kernel[(tiles * count,)](
            query[:, own], _tiles(made, nope), _tiles(made, v_dim), turned_tiles, output[:, own],
            None if chosen is None else chosen.bits,
            paged.cu_seqlens, paged.kv_length, paged.kv_indptr, shape.scale * LOG2_E,
            *query.stride()[:2], *output.stride()[:2], first_sequence, sequences, count,
            0 if chosen is None else chosen.bits.shape[1],
            GROUP=_KEYS if chosen is None else chosen.group, NOPE=nope, V_DIM=v_dim, TURNED=turned,
            LATENT=latent, BLOCK_SIZE=shape.block_size, FIRST=shape.first_position, ROWS=_ROWS,
            KEYS=_KEYS, STAGES=stages, num_warps=8,
        )  # fmt: skip


def _turned(shape: AttentionShape) -> int:
    assert shape.value_dim is not None
    return shape.head_dim - shape.value_dim


def _tiles(rows: Tensor, columns: int) -> TensorDescriptor:
    """Tiles of so many columns of some keys' rows."""
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [_KEYS, columns])


def _gathered(
    cache: KVCache, paged: PagedSequences, shape: AttentionShape, blocks: int, dtype: torch.dtype
) -> Tensor:
    """[blocks * block size, head_dim]: what is cached of the prompts' tokens."""
    size, width = shape.block_size, shape.head_dim
    rows = torch.empty((blocks * size, width), dtype=dtype, device=cache.key.device)
    first_sequence, sequences = paged.num_decodes, len(paged.kv_length) - paged.num_decodes
    _gather_kernel[(blocks, cdiv(size, _GATHERED))](
        cache.key, rows, paged.kv_length, paged.kv_indptr, paged.kv_indices, cache.k_scale,
        first_sequence, sequences, width, BLOCK_SIZE=size, FIRST=shape.first_position,
        SCALED=cache.is_fp8, ROWS=_GATHERED, DIMS=next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return rows


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def _gather_kernel(
    cache, rows, kv_length, kv_indptr, kv_indices, scale, first_sequence, sequences,
    width: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of a block; zeros for those that its sequence does not see."""
    table = kv_indptr + first_sequence
    number = tl.load(table) + tl.program_id(0)
    sequence = sequence_of(number, table, sequences)
    before = (number - tl.load(table + sequence)).to(tl.int32) * BLOCK_SIZE
    left = tl.load(kv_length + first_sequence + sequence).to(tl.int32) - before
    block = tl.load(kv_indices + number).to(tl.int64)

    token, dim = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside = (token < BLOCK_SIZE)[:, None] & (dim < width)[None, :]
    there = inside & ((token < left) & (before + token >= FIRST))[:, None]
    place = (block * BLOCK_SIZE + token)[:, None] * width + dim[None, :]
    stored = tl.load(cache + place, mask=there, other=0.0)
    numbers = _as_numbers(stored, rows.dtype.element_ty)
    if SCALED:
        numbers = (numbers.to(tl.float32) * scale).to(numbers.dtype)
    place = (tl.program_id(0).to(tl.int64) * BLOCK_SIZE + token)[:, None] * width + dim[None, :]
    tl.store(rows + place, numbers, mask=inside)


@triton.jit
def _attended(
    most, total, part, q, t, key_tiles, value_tiles, turned_tiles, bits, base, head, position,
    begin, end, scale, MASKED: tl.constexpr, GROUP: tl.constexpr, NOPE: tl.constexpr,
    V_DIM: tl.constexpr, LATENT: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest score [ROWS], the sum of weights, weighted values [ROWS, V_DIM] after the keys
    from `begin`, where a tile begins, to `end`; all rows see them all unless MASKED. `base`: the
    row of key 0. position [ROWS]: the last key that each sees. bits [ROWS]: where those of each are
    that say which groups it sees, or None."""
    tile = tl.arange(0, KEYS)
    column = head * (NOPE + V_DIM)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        k = key_tiles.load([base + first, column])
        scores = tl.dot(q, k.T)
        if turned_tiles is not None:
            scores = tl.dot(t, turned_tiles.load([base + first, LATENT]).T, scores)
        v = value_tiles.load([base + first, column + NOPE])
        if bits is not None:
            word = tl.load(bits + first // (32 * GROUP))
            seen = (word[:, None] & (1 << ((first + tile) // GROUP % 32))[None, :]) != 0
            if MASKED:  # and what is behind the last whole group, which begins in this loop
                seen |= (first + tile)[None, :] >= ((position + 1) // GROUP * GROUP)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if MASKED:
            seen = (first + tile)[None, :] <= position[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        part = tl.dot(weights.to(q.dtype), v, part * shrink[:, None])
        most = larger
    return most, total, part


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def _attention_kernel(
    query, key_tiles, value_tiles, turned_tiles, output, bits, cu_seqlens, kv_length, kv_indptr,
    scale, query_stride, query_head_stride, output_stride, output_head_stride, first_sequence,
    sequences, heads, words, GROUP: tl.constexpr, NOPE: tl.constexpr, V_DIM: tl.constexpr,
    TURNED: tl.constexpr, LATENT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a head of one of the sequences from `first_sequence` on."""
    head = tl.program_id(0) % heads
    table = cu_seqlens + first_sequence
    before = tl.load(table)
    tokens = (tl.load(table + sequences) - before).to(tl.int64)
    # The last tiles see most keys: they come first, so that little is left for the end.
    item = _item_of(tokens, ROWS, sequences) - 1 - tl.program_id(0) // heads
    if item < 0:
        return
    sequence = _sequence_at(item, table, before, sequences, 1, ROWS)
    first_token = tl.load(table + sequence).to(tl.int64)
    queries = (tl.load(table + sequence + 1) - first_token).to(tl.int32)
    first_row = (item - _item_of(first_token - before, ROWS, sequence)) * ROWS
    if first_row >= queries:
        return
    length = tl.load(kv_length + first_sequence + sequence).to(tl.int32) - FIRST
    blocks = kv_indptr + first_sequence
    base = (tl.load(blocks + sequence) - tl.load(blocks)).to(tl.int32) * BLOCK_SIZE + FIRST

    row = first_row + tl.arange(0, ROWS)
    inside = (row < queries)[:, None]
    token, dim = first_token + row, tl.arange(0, NOPE)
    place = query + token * query_stride + head * query_head_stride
    q = tl.load(place[:, None] + dim[None, :], mask=inside, other=0.0)
    t = q
    if turned_tiles is not None:
        behind = NOPE + tl.arange(0, TURNED)
        t = tl.load(place[:, None] + behind[None, :], mask=inside, other=0.0)
    if bits is not None:
        bits += (first_token - before + tl.minimum(row, queries - 1)) * words
    position = length - queries + row
    end = length - queries + tl.minimum(first_row + ROWS, queries)
    # Keys that the first row sees, and so all others.
    seen = tl.maximum(length - queries + first_row + 1, 0) // KEYS * KEYS
    most, total = tl.full((ROWS,), _LEAST, tl.float32), tl.zeros((ROWS,), tl.float32)
    part = tl.zeros((ROWS, V_DIM), tl.float32)
    most, total, part = _attended(
        most, total, part, q, t, key_tiles, value_tiles, turned_tiles, bits, base, head,
        position, 0, seen, scale, False, GROUP, NOPE, V_DIM, LATENT, KEYS, STAGES,
    )  # fmt: skip
    most, total, part = _attended(
        most, total, part, q, t, key_tiles, value_tiles, turned_tiles, bits, base, head,
        position, seen, end, scale, True, GROUP, NOPE, V_DIM, LATENT, KEYS, STAGES,
    )  # fmt: skip
    dim = tl.arange(0, V_DIM)
    result = _finished(total, part, 1.0, output.dtype.element_ty)
    place = output + token * output_stride + head * output_head_stride
    tl.store(place[:, None] + dim[None, :], result, mask=inside)
