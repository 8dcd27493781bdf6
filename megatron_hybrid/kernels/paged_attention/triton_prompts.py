"""Attention of prompts in Triton, also with a bias by distance, sinks or positions that are hidden,
which flashinfer has no kernels for.

A program takes tiles of queries one after the other, with their heads of a KV head as rows:

    keys        0 ............. far ............ | ........ near ........ | masked
                no bias, nothing to hide         | biases                 | biases; some are hidden

So a key that is too far away for a bias costs as much as without one. What rows have for near keys
is made before these are read: a product of the rows' weights and the bank's columns, for some
distances at a time, is written to memory of the program's own, each query's row moved by as much as
the query is farther on. There a tile of it lies like a tile of keys, and is loaded like one:

    distances      3  2  1  0              keys    k0 k1 k2 k3 k4
    query 5        d  c  b  a                       .  d  c  b  a
    query 6        h  g  f  e                       .  .  h  g  f  e

That memory, programs * rows * (extent + about 320) numbers of 16 bits, is 45 MB on an H200 for
1,024 distances, however long prompts are: programs are as many as run at once.

Bits are not those of the kernels of batch-invariant mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.devices import processors, stages_that_fit
from megatron_hybrid.kernels.launching import (
    are_compiled_ahead,
    cdiv,
    launched,
    next_power_of_2,
)
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.paged_attention.triton_bias import BiasArguments
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E, sink_stride
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import (
    block_of,
    has_whole_tiles,
    load_kv,
    sees,
    tiles_of,
)
from megatron_hybrid.kernels.paged_attention.triton_sinks import with_sinks
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import (
    _LEAST,
    _SIZES,
    _TABLES,
    _as_numbers,
    _finished,
    _item_of,
    _sequence_at,
)

_SPREAD = 256  # numbers of a program
_SHORT = 512  # tokens of a window
_LARGEST = tl.constexpr(65504.0)  # that float16 has


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program computes."""

    rows: int  # of the queries' heads; a power of 2, 16 or more
    keys: int  # the same
    warps: int
    stages: int  # tiles that are loaded or used at the same time
    programs: int  # that a multiprocessor is given
    described: bool = True  # by tensor descriptors (TMA), where blocks are whole tiles


def pays(shape: AttentionShape, tokens: int, device: torch.device) -> bool:
    """Whether so many tokens of prompts are enough for all multiprocessors. Of fewer the keys are
    better split."""
    return 2 * _items(_small(shape), shape, tokens) >= processors(device)


def tile_for(shape: AttentionShape, tokens: int, device: torch.device) -> Tile:
    """The fastest of those tried on an H200, for so many tokens of prompts."""
    small = _small(shape)
    if shape.dtype == torch.float32 or 0 < shape.window <= _SHORT:
        return small
    large = Tile(128, 64, 8, 3 if shape.head_dim <= 128 else 2, 1)
    return large if 2 * _items(large, shape, tokens) >= processors(device) else small


def attend(
    query: Tensor,
    cache: KVCache,
    paged: PagedSequences,
    shape: AttentionShape,
    tokens: int,
    output: Tensor,
    bias: RelativeBias | None = None,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """The prompts' rows of output [tokens, heads, head_dim], contiguous; else as in Attention.
    tokens: of all prompts, or more. tile: None: the one for so many."""
    if tile is None:
        tile = tile_for(shape, tokens, query.device)
        if are_compiled_ahead():  # another step takes the other one
            other = _small(shape)
            attend(query, cache, paged, shape, tokens, output, bias, sinks, other)
    device, group, kv_heads = query.device, shape.heads // shape.kv_heads, shape.kv_heads
    first_sequence, sequences = paged.num_decodes, len(paged.kv_length) - paged.num_decodes
    items = (tokens * group // tile.rows + sequences) * kv_heads
    programs = min(items, tile.programs * processors(device))
    dims, keys = max(next_power_of_2(shape.head_dim), 16), tile.keys
    relative = BiasArguments.of(bias, tile.rows, group, keys)
    made = spread = None
    width = reach = before = 0
    if bias is not None:
        queries, span = cdiv(tile.rows, group) + 1, relative.span
        width = (shape.window or bias.extent) + keys + queries
        reach = cdiv(width, span) * span
        before = cdiv(span + queries, keys) * keys
        width = before + cdiv(width, keys) * keys
        spread = _spread(bias, reach, relative.constants["BLOCK_P"])
        kind = torch.float32 if shape.dtype == torch.float32 else torch.float16
        made = torch.empty((programs, tile.rows, width), dtype=kind, device=device)
    tile_bytes = 2 * keys * dims * shape.kv_dtype.itemsize
    if made is not None:
        tile_bytes += tile.rows * keys * made.itemsize
    query_bytes = tile.rows * dims * shape.dtype.itemsize
    stages = stages_that_fit(tile.stages, tile_bytes + cdiv(query_bytes, tile.stages), device)
    whole = has_whole_tiles(shape, keys)
    key_tiles = value_tiles = None
    if tile.described and whole and dims == shape.head_dim:
        key_tiles, value_tiles = tiles_of(cache.key, keys), tiles_of(cache.value, keys)
    scale = shape.scale * cache.k_scale
    prompt_kernel[(programs,)](
        query, cache.key, cache.value, key_tiles, value_tiles, output,
        paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
        scale * LOG2_E, 1 / scale, cache.v_scale, *query.stride()[:2],
        relative.weights, spread, relative.stride, relative.head_stride, made,
        sinks, sink_stride(sinks), first_sequence, sequences, kv_heads,
        GROUP=group, HEAD_DIM=shape.head_dim, DIMS=dims, BLOCK_SIZE=shape.block_size,
        FIRST=shape.first_position, WINDOW=shape.window, WHOLE=whole, ROWS=tile.rows, KEYS=keys,
        STAGES=stages, WIDTH=width, BEFORE=before, REACH=reach, SPAN=relative.span,
        **relative.constants, num_warps=tile.warps,
    )  # fmt: skip


def _small(shape: AttentionShape) -> Tile:
    if shape.dtype == torch.float32:  # whose products a thread writes out
        large = shape.head_dim > 128
        rows, warps = (16, 8) if large else (32, 4 if shape.head_dim <= 64 else 8)
        return Tile(rows, 16 if large else 32, warps, 2, 2)
    return Tile(64, 64, 4, 2, 2)


def _items(tile: Tile, shape: AttentionShape, tokens: int) -> int:
    """Tiles of so many tokens."""
    return cdiv(tokens * shape.heads // shape.kv_heads, tile.rows) * shape.kv_heads


def _spread(bias: RelativeBias, reach: int, block_p: int) -> Tensor:
    """[2 * block_p, reach]: the bank from the distance reach - 1 down to 0, and a second time from
    reach - 2 down to -1, each with zeros where it has no number. For loads of whole tiles."""
    profiles, extent = bias.bank.shape
    spread = bias.bank.new_empty((2 * block_p, reach))
    _spread_kernel[(2 * block_p, cdiv(reach, _SPREAD))](
        bias.bank, spread, EXTENT=extent, PROFILES=profiles, BLOCK_P=block_p, REACH=reach,
        BLOCK=_SPREAD, num_warps=4,
    )  # fmt: skip
    return spread


@launched
def _spread_kernel(
    bank, spread, EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr,
    REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    profile, less = tl.program_id(0) % BLOCK_P, tl.program_id(0) // BLOCK_P
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    distance = REACH - 1 - less - column
    known = (profile < PROFILES) & (distance >= 0) & (distance < EXTENT)
    numbers = tl.load(bank + profile * EXTENT + distance, mask=known, other=0.0)
    tl.store(spread + tl.program_id(0) * REACH + column, numbers, mask=column < REACH)


@triton.jit
def _make_biases(
    made, row_place, weights, spread, token, head, inside, position, base, last, stride,
    head_stride, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr, SPAN: tl.constexpr,
    REACH: tl.constexpr,
):  # fmt: skip
    """To made + row_place [ROWS], for keys from `base`, which is even, up to each row's own
    position [ROWS], the largest of which is `last`: the biases of these rows. In front of that,
    where there has to be room for SPAN numbers and one more for each query: anything.

    Two keys are stored at a time, so the first of them has to be even: where rows at odd positions
    have the distances d, d - 1, ..., those at even ones have d - 1, d - 2, ... So there are two
    sets of profiles (see _spread), and rows have weights of zero for one of them."""
    profile, column = tl.arange(0, 2 * BLOCK_P), tl.arange(0, SPAN)
    number, less = profile % BLOCK_P, profile // BLOCK_P
    is_own = (position[:, None] + 1 & 1) == less[None, :]
    place = weights + (token * stride + head * head_stride)[:, None] + number[None, :]
    mask = inside[:, None] & is_own & (number < PROFILES)[None, :]
    own = tl.load(place, mask=mask, other=0.0)
    place = spread + (profile * REACH)[:, None] + (REACH - SPAN + column)[None, :]
    at = (row_place + (position + 2) // 2 * 2 - base - SPAN)[:, None] + column[None, :]
    kind: tl.constexpr = made.dtype.element_ty
    for nearest in tl.range(0, last - base + 2, SPAN, num_stages=3):
        columns = tl.load(place - nearest)
        biases = tl.dot(own, columns, input_precision="ieee")
        if kind == tl.float16:
            biases = tl.clamp(biases, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(made + (at - nearest), biases.to(kind))


@triton.jit
def _attended(
    most, total, part, q, key_cache, value_cache, key_tiles, value_tiles, blocks, kv_head, kv_heads,
    position, begin, end, scale, per_scale, made, base, MASKED: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest score [ROWS], the sum of weights [ROWS], weighted values [ROWS, DIMS] after the
    keys from `begin`, where a tile begins, to `end`, counted from FIRST; all rows see them all
    unless MASKED. position [ROWS]: the last key that each sees. made [ROWS]: where each row's
    biases are, from those for the key `base` on; None: there are none."""
    tile = tl.arange(0, KEYS)
    block = block_of(blocks, begin, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        k, v = load_kv(
            key_cache, value_cache, key_tiles, value_tiles, block, kv_head, kv_heads, first, end,
            MASKED, KEYS, HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WHOLE,
        )  # fmt: skip
        # the next tile's, so that its keys need not wait for it
        block = block_of(blocks, first + KEYS, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
        # full float32 products for float32; other types have no effect from input_precision
        k, v = _as_numbers(k, q.dtype), _as_numbers(v, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if made is not None:
            more = tl.load(made[:, None] + (first - base + tile)[None, :])
            scores += more.to(tl.float32) * per_scale
        if MASKED:
            scores = tl.where(sees(position, first + tile, 0, WINDOW), scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        part = tl.dot(weights.to(q.dtype), v, part * shrink[:, None], input_precision="ieee")
        most = larger
    return most, total, part


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def prompt_kernel(
    query, key_cache, value_cache, key_tiles, value_tiles, output,
    cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, per_scale, v_scale, query_stride, query_head_stride, bias_weights, spread, bias_stride,
    bias_head_stride, made, sinks, sink_stride, first_sequence, sequences, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, WIDTH: tl.constexpr, BEFORE: tl.constexpr,
    REACH: tl.constexpr, EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows of a KV head of the sequences from `first_sequence` on. made [programs,
    ROWS, WIDTH]: for biases, of which the first ones of a row are BEFORE numbers behind its
    begin."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    table = cu_seqlens + first_sequence
    before = tl.load(table)
    tokens = (tl.load(table + sequences) - before).to(tl.int64)
    items = _item_of(tokens * GROUP, ROWS, sequences)
    tile_row = tl.arange(0, ROWS)
    for turn in tl.range(0, tl.cdiv(items * kv_heads, programs), num_stages=1):
        # The last tiles see most keys and come first; who has most to do has least the next time.
        number = tl.where(turn % 2 == 0, program, programs - 1 - program)
        number += turn * programs
        item, kv_head = items - 1 - number // kv_heads, number % kv_heads
        sequence = _sequence_at(item, table, before, sequences, GROUP, ROWS)
        sequence = tl.maximum(sequence, 0)  # where there is no item
        first_token = tl.load(table + sequence).to(tl.int64)
        queries = (tl.load(table + sequence + 1) - first_token).to(tl.int32)
        first_row = (item - _item_of((first_token - before) * GROUP, ROWS, sequence)) * ROWS
        if (item >= 0) & (first_row < queries * GROUP):
            length = tl.load(kv_length + first_sequence + sequence).to(tl.int32) - FIRST
            blocks = kv_indices + tl.load(kv_indptr + first_sequence + sequence)
            # row = query * GROUP + head of the group
            row = first_row + tile_row
            inside = row < queries * GROUP
            token = first_token + row // GROUP
            head = kv_head * GROUP + row % GROUP
            dim = tl.arange(0, DIMS)
            written = inside[:, None] & (dim < HEAD_DIM)[None, :]
            place = token * query_stride + head * query_head_stride
            q = tl.load(query + place[:, None] + dim[None, :], mask=written, other=0.0)
            position = length - queries + row // GROUP
            first_query = length - queries + first_row // GROUP
            last_row = tl.minimum(first_row + ROWS, queries * GROUP) - 1
            end = length - queries + last_row // GROUP + 1
            # Keys that all rows see, and those of them that are far from all.
            seen = tl.maximum(first_query + 1, 0) // KEYS * KEYS
            far = seen
            if WINDOW > 0:  # tiles of which a row may see some keys only
                seen = tl.maximum(first_query - WINDOW + 1, 0) // KEYS * KEYS
                far = seen
            elif EXTENT > 0:
                far = tl.maximum(first_query - EXTENT + 1, 0) // KEYS * KEYS
            most, total = tl.full((ROWS,), _LEAST, tl.float32), tl.zeros((ROWS,), tl.float32)
            part = tl.zeros((ROWS, DIMS), tl.float32)
            biases = None
            if EXTENT > 0:
                own = made + program.to(tl.int64) * (ROWS * WIDTH)
                row_place = tile_row * WIDTH + BEFORE
                biases = own + row_place
                tl.debug_barrier()  # all have read what was there before
                _make_biases(
                    own, row_place, bias_weights, spread, token, head, inside, position, far,
                    end - 1, bias_stride, bias_head_stride, PROFILES, BLOCK_P, SPAN, REACH,
                )  # fmt: skip
                tl.debug_barrier()  # all have written what others are going to read
            most, total, part = _attended(
                most, total, part, q, key_cache, value_cache, None, None, blocks, kv_head, kv_heads,
                position, seen, end, scale, per_scale, biases, far, True, KEYS, HEAD_DIM, DIMS,
                BLOCK_SIZE, FIRST, WINDOW, WHOLE, STAGES,
            )  # fmt: skip
            if EXTENT > 0 and WINDOW == 0:
                most, total, part = _attended(
                    most, total, part, q, key_cache, value_cache, key_tiles, value_tiles, blocks,
                    kv_head, kv_heads, position, far, seen, scale, per_scale, biases, far, False,
                    KEYS, HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WINDOW, WHOLE, STAGES,
                )  # fmt: skip
            if WINDOW == 0:
                most, total, part = _attended(
                    most, total, part, q, key_cache, value_cache, key_tiles, value_tiles, blocks,
                    kv_head, kv_heads, position, 0, far, scale, per_scale, None, far, False, KEYS,
                    HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WINDOW, WHOLE, STAGES,
                )  # fmt: skip
            total, part = with_sinks(most, total, part, sinks, token, head, inside, sink_stride)
            place = (token * kv_heads * GROUP + head) * HEAD_DIM
            result = _finished(total, part, v_scale, output.dtype.element_ty)
            tl.store(output + place[:, None] + dim[None, :], result, mask=written)
