"""The kernels of triton.py: see there for what is computed, and in which order. Which work is a
program's is found as in those of paged_attention.

A latent is read once for all heads of a tile of rows, and is key and value at the same time:

    row          [ absorbed query, DIMS | rotated, TURNED_DIMS ]     of one head of one token
    tile         [ latent,         DIMS | rotated, TURNED_DIMS ]     KEYS of them, from the cache
    scores       both products; values: the latents once more
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.dependent_launch import let_next_start, wait_for_inputs
from megatron_hybrid.kernels.latent_attention.triton_decode import (
    attended,
    join_splits,
    latents_at,
)
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import block_of
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import (
    _AT_ONCE,
    _LEAST,
    _ONES,
    _TABLES,
    _as_numbers,
    _finished,
    _folded,
    _item_of,
    _part,
    _sequence_at,
)

_SIZES = ["sequences", "first_sequence", "room", "places", "split", "wanted"]


@triton.jit
def _rows_of(
    query, turned, token, head, inside, turned_stride, turned_head_stride, HEADS: tl.constexpr,
    LATENT: tl.constexpr, DIMS: tl.constexpr, TURNED: tl.constexpr, TURNED_DIMS: tl.constexpr,
):  # fmt: skip
    """Both parts of queries: [ROWS, DIMS], [ROWS, TURNED_DIMS]."""
    dim, behind = tl.arange(0, DIMS), tl.arange(0, TURNED_DIMS)
    place = query + ((token * HEADS + head) * LATENT)[:, None] + dim[None, :]
    q = tl.load(place, mask=inside[:, None] & (dim < LATENT)[None, :], other=0.0)
    place = turned + (token * turned_stride + head * turned_head_stride)[:, None] + behind[None, :]
    t = tl.load(place, mask=inside[:, None] & (behind < TURNED)[None, :], other=0.0)
    return q, t


@triton.jit
def _attended(
    state, q, t, latents, blocks, position, begin, end, scale, MASKED: tl.constexpr,
    KEYS: tl.constexpr, LATENT: tl.constexpr, DIMS: tl.constexpr, TURNED: tl.constexpr,
    TURNED_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`state` (the largest score, sums of weights, weighted latents) after the keys from `begin`,
    where a tile begins, to `end`, counted from FIRST; all rows see them all unless MASKED, and then
    they are whole tiles. position [ROWS]: the last key that each sees."""
    most, sums, part = state
    WIDTH: tl.constexpr = LATENT + TURNED
    tile, dim, behind = tl.arange(0, KEYS), tl.arange(0, DIMS), tl.arange(0, TURNED_DIMS)
    ones = tl.full((KEYS, _ONES), 1.0, q.dtype)
    block = block_of(blocks, begin, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        at = first + tile
        where = latents_at(latents, block, first, tile, WIDTH, BLOCK_SIZE, FIRST, WHOLE)
        # what lies past the end was never written: it is not read
        if MASKED or DIMS > LATENT:
            readable = (at < end)[:, None] & (dim < LATENT)[None, :]
            k = tl.load(where + dim[None, :], mask=readable, other=0.0)
        else:
            k = tl.load(where + dim[None, :])
        if MASKED or TURNED_DIMS > TURNED:
            readable = (at < end)[:, None] & (behind < TURNED)[None, :]
            r = tl.load(where + LATENT + behind[None, :], mask=readable, other=0.0)
        else:
            r = tl.load(where + LATENT + behind[None, :])
        # the next tile's, so that its keys need not wait for it
        block = block_of(blocks, first + KEYS, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
        k, r = _as_numbers(k, q.dtype), _as_numbers(r, q.dtype)
        # full float32 products for float32; other types have no effect from input_precision
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(t, tl.trans(r), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * scale)
        factor = tl.zeros_like(scores) + scale
        minus = tl.broadcast_to(-larger[:, None], scores.shape)
        weights = tl.exp2(tl.fma(scores, factor, minus)).to(q.dtype)
        shrink = tl.exp2(most - larger)[:, None]
        sums = tl.dot(weights, ones, sums * shrink, input_precision="ieee")
        part = tl.dot(weights, k, part * shrink, input_precision="ieee")
        most = larger
    return most, sums, part


@triton.jit
def _nothing(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The state before the first key."""
    most, sums = tl.full((ROWS,), _LEAST, tl.float32), tl.zeros((ROWS, _ONES), tl.float32)
    return most, sums, tl.zeros((ROWS, DIMS), tl.float32)


@triton.jit
def _all_keys(
    q, t, latents, blocks, position, begin, seen, end, split, scale, FOLDS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr, DIMS: tl.constexpr,
    TURNED: tl.constexpr, TURNED_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of the keys from `begin`, where a split begins, to `end`: the largest score, the sum of
    weights, weighted latents. Keys before `seen`, where a tile ends, are seen by all rows. FOLDS:
    splits are computed by themselves, and put together."""
    if FOLDS:
        most, total = tl.full((ROWS,), _LEAST, tl.float32), tl.zeros((ROWS,), tl.float32)
        result = tl.zeros((ROWS, DIMS), tl.float32)
        for number in tl.range(begin // split, tl.cdiv(end, split), num_stages=1):
            own_end = tl.minimum(end, (number + 1) * split)
            middle = tl.maximum(tl.minimum(seen, own_end), number * split)
            state = _attended(
                _nothing(ROWS, DIMS), q, t, latents, blocks, position, number * split, middle,
                scale, False, KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST, WHOLE,
                STAGES,
            )  # fmt: skip
            state = _attended(
                state, q, t, latents, blocks, position, middle, own_end,
                scale, True, KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST, WHOLE,
                STAGES,
            )  # fmt: skip
            own, sums, part = state
            most, total, result = _folded(most, total, result, own, tl.max(sums, 1), part)
    else:
        middle = tl.maximum(tl.minimum(seen, end), begin)
        state = _attended(
            _nothing(ROWS, DIMS), q, t, latents, blocks, position, begin, middle, scale, False,
            KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST, WHOLE, STAGES,
        )  # fmt: skip
        most, sums, result = _attended(
            state, q, t, latents, blocks, position, middle, end, scale, True,
            KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST, WHOLE, STAGES,
        )  # fmt: skip
        total = tl.max(sums, 1)
    return most, total, result


@triton.jit
def _split_of(
    split, wanted, blocks_before, FOLDS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Keys of a split, a multiple of KEYS: where nothing hangs on it as many as make about `wanted`
    items of all sequences, `split` at least."""
    if FOLDS:
        return split
    keys = tl.cdiv(blocks_before * BLOCK_SIZE, wanted)
    return tl.maximum(split, (tl.cdiv(keys, KEYS) * KEYS).to(tl.int32))


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def decode_kernel(
    query, turned, latents, output, parts, sums, cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, turned_stride, turned_head_stride, sequences, room, places, split, wanted,
    HEADS: tl.constexpr, FOLDS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr,
    DIMS: tl.constexpr, TURNED: tl.constexpr, TURNED_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ONE_LOOP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """As that of paged_attention, of one KV head. Unless FOLDS, a sequence's splits are as long as
    each other: there are as many as there would be of `split` keys. ONE_LOOP, PAIRS: see
    triton_decode."""
    tiles = tl.cdiv(places, ROWS)
    blocks_before = tl.load(kv_indptr + sequences).to(tl.int64)
    split = _split_of(split, wanted, blocks_before, FOLDS, KEYS, BLOCK_SIZE)
    work = _item_of(blocks_before * BLOCK_SIZE, split, sequences) * tiles
    now = tl.program_id(0)
    sequence = _sequence_at(now // tiles, kv_indptr, 0, sequences, BLOCK_SIZE, split)
    wait_for_inputs()
    let_next_start()
    for now in range(tl.program_id(0), work, tl.num_programs(0)):
        item, tile = now // tiles, now % tiles
        first_block = tl.load(kv_indptr + sequence)
        next_block = tl.load(kv_indptr + sequence + 1).to(tl.int64)
        first_item = _item_of(first_block.to(tl.int64) * BLOCK_SIZE, split, sequence)
        end_item = _item_of(next_block * BLOCK_SIZE, split, sequence + 1)
        first_token = tl.load(cu_seqlens + sequence).to(tl.int64)
        queries = (tl.load(cu_seqlens + sequence + 1) - first_token).to(tl.int32)
        length = tl.load(kv_length + sequence).to(tl.int32) - FIRST
        splits = tl.cdiv(length, split)
        alone = (splits <= 1) | (end_item > room)
        own: tl.int32 = split
        if not FOLDS:  # as long as each other
            own = tl.cdiv(tl.cdiv(length, tl.maximum(splits, 1)), KEYS) * KEYS
        begin = (item - first_item) * own
        end = tl.minimum(length, begin + own)
        if alone:
            end = length
            if item > first_item:
                begin = end
        # where nothing is seen, zeros are written
        is_mine = (begin < end) | (alone & (item == first_item))
        if is_mine & (tile * ROWS < queries * HEADS):
            row = tile * ROWS + tl.arange(0, ROWS)  # query * HEADS + head
            inside = row < queries * HEADS
            token, head = first_token + row // HEADS, row % HEADS
            q, t = _rows_of(
                query, turned, token, head, inside, turned_stride, turned_head_stride, HEADS,
                LATENT, DIMS, TURNED, TURNED_DIMS,
            )  # fmt: skip
            position = length - queries + row // HEADS
            if not ONE_LOOP:
                # Keys that the first row sees, and so all others.
                seen = tl.maximum(length - queries + tile * ROWS // HEADS + 1, 0) // KEYS * KEYS
                most, total, result = _all_keys(
                    q, t, latents, kv_indices + first_block, position, begin, seen, end, split,
                    scale, FOLDS, ROWS, KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST,
                    WHOLE, STAGES,
                )  # fmt: skip
            else:
                most, total, result = attended(
                    q, t, latents, kv_indices + first_block, position, begin, end, scale, PAIRS,
                    ROWS, KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST, WHOLE, STAGES,
                )  # fmt: skip
            dim = tl.arange(0, DIMS)
            written = inside[:, None] & (dim < LATENT)[None, :]
            if alone:
                there = (token * HEADS + head) * LATENT
                average = _finished(total, result, v_scale, output.dtype.element_ty)
                tl.store(output + there[:, None] + dim[None, :], average, mask=written)
            else:
                at = item.to(tl.int64) * places + row
                tl.store(sums + 2 * at, most, mask=inside)
                tl.store(sums + 2 * at + 1, total, mask=inside)
                tl.store(parts + (at * LATENT)[:, None] + dim[None, :], result, mask=written)
        if now + tl.num_programs(0) < work:
            following = (now + tl.num_programs(0)) // tiles
            sequence = _sequence_at(following, kv_indptr, 0, sequences, BLOCK_SIZE, split)


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def join_kernel(
    output, parts, sums, cu_seqlens, kv_length, kv_indptr, v_scale, sequences, room, places, split,
    wanted, HEADS: tl.constexpr, FOLDS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The splits that decode_kernel left in `parts` and `sums`, of ROWS rows of a sequence and PART
    of their numbers. SPLITS: of one row so many at a time; 0: one after the other."""
    blocks_before = tl.load(kv_indptr + sequences).to(tl.int64)
    split = _split_of(split, wanted, blocks_before, FOLDS, KEYS, BLOCK_SIZE)
    sequence = tl.program_id(0)
    first_block = tl.load(kv_indptr + sequence).to(tl.int64)
    next_block = tl.load(kv_indptr + sequence + 1).to(tl.int64)
    item = _item_of(first_block * BLOCK_SIZE, split, sequence)
    end_item = _item_of(next_block * BLOCK_SIZE, split, sequence + 1)
    first_token = tl.load(cu_seqlens + sequence).to(tl.int64)
    queries = (tl.load(cu_seqlens + sequence + 1) - first_token).to(tl.int32)
    splits = tl.cdiv(tl.load(kv_length + sequence).to(tl.int32) - FIRST, split)
    wait_for_inputs()
    let_next_start()
    if (splits <= 1) | (end_item > room):
        return
    if SPLITS:
        row = tl.program_id(1)
        place = ((first_token + row // HEADS) * HEADS + row % HEADS) * LATENT
        join_splits(
            output, parts, sums, item, splits, places, row, place, row < queries * HEADS, v_scale,
            LATENT, SPLITS, PART,
        )  # fmt: skip
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < queries * HEADS
    dim = tl.program_id(2) * PART + tl.arange(0, PART)
    written = inside[:, None] & (dim < LATENT)[None, :]
    most, total = tl.full((ROWS,), _LEAST, tl.float32), tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, PART), tl.float32)
    together = splits // _AT_ONCE * _AT_ONCE
    for first in range(0, together, _AT_ONCE):
        several = ()
        for i in tl.static_range(_AT_ONCE):
            at = (item + first + i).to(tl.int64) * places + row
            several += (_part(parts, sums, at, dim, inside, written, LATENT),)
        for i in tl.static_range(_AT_ONCE):
            most, total, result = _folded(
                most, total, result, several[i][0], several[i][1], several[i][2]
            )
    for number in range(together, splits):
        at = (item + number).to(tl.int64) * places + row
        part = _part(parts, sums, at, dim, inside, written, LATENT)
        most, total, result = _folded(most, total, result, part[0], part[1], part[2])
    place = ((first_token + row // HEADS) * HEADS + row % HEADS) * LATENT
    result = _finished(total, result, v_scale, output.dtype.element_ty)
    tl.store(output + place[:, None] + dim[None, :], result, mask=written)


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def prompt_kernel(
    query, turned, latents, output, cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, turned_stride, turned_head_stride, first_sequence, sequences, split,
    HEADS: tl.constexpr, FOLDS: tl.constexpr, KEYS: tl.constexpr, LATENT: tl.constexpr,
    DIMS: tl.constexpr, TURNED: tl.constexpr, TURNED_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one of the sequences from `first_sequence` on."""
    table = cu_seqlens + first_sequence
    base = tl.load(table)
    tokens = (tl.load(table + sequences) - base).to(tl.int64)
    # The last tiles see most keys: they come first, so that little is left for the end.
    item = _item_of(tokens * HEADS, ROWS, sequences) - 1 - tl.program_id(0)
    if item < 0:
        return
    sequence = _sequence_at(item, table, base, sequences, HEADS, ROWS)
    first_token = tl.load(table + sequence).to(tl.int64)
    queries = (tl.load(table + sequence + 1) - first_token).to(tl.int32)
    first_row = (item - _item_of((first_token - base) * HEADS, ROWS, sequence)) * ROWS
    if first_row >= queries * HEADS:
        return
    length = tl.load(kv_length + first_sequence + sequence).to(tl.int32) - FIRST
    blocks = kv_indices + tl.load(kv_indptr + first_sequence + sequence)

    row = first_row + tl.arange(0, ROWS)  # query * HEADS + head
    inside = row < queries * HEADS
    token, head = first_token + row // HEADS, row % HEADS
    q, t = _rows_of(
        query, turned, token, head, inside, turned_stride, turned_head_stride, HEADS,
        LATENT, DIMS, TURNED, TURNED_DIMS,
    )  # fmt: skip
    last_row = tl.minimum(first_row + ROWS, queries * HEADS) - 1
    end = length - queries + last_row // HEADS + 1
    # Keys that the first row sees, and so all others.
    seen = tl.maximum(length - queries + first_row // HEADS + 1, 0) // KEYS * KEYS
    _, total, result = _all_keys(
        q, t, latents, blocks, length - queries + row // HEADS, 0, seen, end, split, scale, FOLDS,
        ROWS, KEYS, LATENT, DIMS, TURNED, TURNED_DIMS, BLOCK_SIZE, FIRST, WHOLE, STAGES,
    )  # fmt: skip
    dim = tl.arange(0, DIMS)
    place = (token * HEADS + head) * LATENT
    result = _finished(total, result, v_scale, output.dtype.element_ty)
    written = inside[:, None] & (dim < LATENT)[None, :]
    tl.store(output + place[:, None] + dim[None, :], result, mask=written)
