"""The kernels of triton_by_split.py: see there for what is computed, and in which order.

Where programs are more than there is work for (launches depend on sizes alone), each finds its work
on the device. Of a sequence s that has n(s) units, the first u(s) before it, and of which `step`
make up one item, the items begin at u(s) // step + s: that are enough, at most one too many, and
nothing has to be added up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.dependent_launch import ENABLED, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.paged_attention.triton_bias import biases, load_weights
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import block_of, load_kv, sees
from megatron_hybrid.kernels.paged_attention.triton_sinks import with_sinks

# Sequences that are searched at the same time.
_SEQUENCES = tl.constexpr(128)
# The largest score of a row that sees nothing. Not -inf, whose difference to itself is no number.
_LEAST = tl.constexpr(-1e30)
# Columns of ones: the least of a matrix product.
_ONES = tl.constexpr(16)
# Parts that are loaded at the same time when they are joined.
_AT_ONCE = tl.constexpr(8)
# Where a step's tables begin, and how much there is in it, is no reason to compile once more.
_TABLES = ["cu_seqlens", "kv_length", "kv_indptr", "kv_indices"]
_SIZES = ["sequences", "first_sequence", "room", "places"]


@triton.jit
def _item_of(units, step, sequence):
    """The first item of a sequence before which there are so many units."""
    return (units // step).to(tl.int32) + sequence


@triton.jit
def _sequence_at(item, table, base, count, factor, step):
    """Of `count` sequences the one that an item belongs to; (table[s] - base) * factor units are
    before sequence s."""
    found = -1
    for begin in range(0, count, _SEQUENCES):
        sequence = begin + tl.arange(0, _SEQUENCES)
        inside = sequence < count
        units = (tl.load(table + sequence, mask=inside, other=0) - base).to(tl.int64) * factor
        first = _item_of(units, step, sequence)
        found += tl.sum((inside & (first <= item)).to(tl.int32), 0)
    return found


@triton.jit
def _folded(most, total, result, part_most, part_total, part):
    """What comes of all keys so far and of one more part of them: the largest score [ROWS], the sum
    of weights [ROWS], the weighted values [ROWS, DIMS]. A part without keys changes nothing, and
    before there were any the part itself is what comes of it, to the bit."""
    larger = tl.maximum(most, part_most)
    shrink, part_shrink = tl.exp2(most - larger), tl.exp2(part_most - larger)
    total = tl.fma(total, shrink, part_total * part_shrink)
    part = part * part_shrink[:, None]
    result = tl.fma(result, tl.broadcast_to(shrink[:, None], part.shape), part)
    return larger, total, result


@triton.jit
def _finished(total, result, v_scale, dtype: tl.constexpr):
    """The average. No zero is negative: one could be or not by parts that change nothing else."""
    factor = tl.div_rn(tl.zeros_like(total) + v_scale, tl.where(total != 0.0, total, 1.0))
    result = result * factor[:, None]
    return tl.where(result != 0.0, result, 0.0).to(dtype)


@triton.jit
def _as_numbers(stored, dtype: tl.constexpr):
    """Keys or values in the type of the products. Of 8 bits, the compiler would have tensor cores
    of one kind take columns in an order that suits how they were loaded: assembly, of which it
    knows nothing, hides that from it, and they are taken as they lie. To bfloat16 it would go by
    float16, a number at a time: the bits of an E4M3 number where a bfloat16's are, are 2^-120 of
    it, so this is a shift and a product, two numbers at a time, and exact. (No NaN is stored.)"""
    if ENABLED and stored.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high, sign, factor, zero;
                mov.b32 factor, 0x7B807B80;
                mov.b32 zero, 0x80008000;
                prmt.b32 low, $2, 0, 0x1404;
                prmt.b32 high, $2, 0, 0x3424;
                and.b32 sign, low, 0x80008000;
                shr.b32 low, low, 4;
                and.b32 low, low, 0x07F007F0;
                or.b32 low, low, sign;
                and.b32 sign, high, 0x80008000;
                shr.b32 high, high, 4;
                and.b32 high, high, 0x07F007F0;
                or.b32 high, high, sign;
                fma.rn.bf16x2 $0, low, factor, zero;
                fma.rn.bf16x2 $1, high, factor, zero;
            }
            """,
            "=r,=r,r", [stored.to(tl.int8, bitcast=True)], dtype=tl.bfloat16, is_pure=False,
            pack=4,
        )  # fmt: skip
    else:
        numbers = stored.to(dtype)
        if ENABLED and stored.dtype.primitive_bitwidth == 8 and dtype.primitive_bitwidth == 16:
            numbers = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [numbers], dtype=numbers.dtype, is_pure=False, pack=2
            )
    return numbers


@triton.jit
def _attended(
    state, q, key_cache, value_cache, key_tiles, value_tiles, blocks, kv_head, kv_heads, position,
    begin, end, scale, MASKED: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, relative,
    EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """`state` after the keys from `begin`, where a tile begins, to `end`, counted from FIRST.

    state: of all splits that are done, as of _folded, and of the one that is not. q [ROWS, DIMS];
    position [ROWS]: the last key that each row sees. Unless MASKED all rows see all keys, which
    are whole tiles. key_tiles, value_tiles: descriptors of the cache, or None. relative: the rows'
    weights, the bank, each row's query of those in the tile [ROWS], and where the first of these
    stands; or None."""
    most, total, result, m, sums, part = state
    tile = tl.arange(0, KEYS)
    ones = tl.full((KEYS, _ONES), 1.0, q.dtype)
    block = block_of(blocks, begin, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
    # Two loops, since a condition in one would make the products wait for each other.
    for split in tl.range(begin // SPLIT, tl.cdiv(end, SPLIT), num_stages=1):
        own_begin = tl.maximum(begin, split * SPLIT)
        own_end = tl.minimum(end, (split + 1) * SPLIT)
        for first in tl.range(own_begin, own_end, KEYS, num_stages=STAGES):
            at = first + tile
            k, v = load_kv(
                key_cache, value_cache, key_tiles, value_tiles, block, kv_head, kv_heads, first,
                end, MASKED, KEYS, HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WHOLE,
            )  # fmt: skip
            # the next tile's, so that its keys need not wait for it
            block = block_of(blocks, first + KEYS, end, FIRST, BLOCK_SIZE, KEYS, WHOLE)
            # full float32 products for float32; other types have no effect from input_precision
            k, v = _as_numbers(k, q.dtype), _as_numbers(v, q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if relative is not None:
                own, bank, query, first_position = relative
                nearest = first_position - (first + KEYS - 1)
                more = tl.zeros_like(scores)
                if nearest < EXTENT:  # else no key is near enough; the bits are those of zeros
                    more = biases(own, bank, query, nearest, KEYS, EXTENT, PROFILES, BLOCK_P, SPAN)
                scores = tl.fma(scores, tl.zeros_like(scores) + scale, more)
            if MASKED:
                scores = tl.where(sees(position, at, 0, WINDOW), scores, float("-inf"))
            if relative is not None:
                larger = tl.maximum(m, tl.max(scores, 1))
                weights = tl.exp2(scores - larger[:, None]).to(q.dtype)
            else:
                larger = tl.maximum(m, tl.max(scores, 1) * scale)
                factor = tl.zeros_like(scores) + scale
                minus = tl.broadcast_to(-larger[:, None], scores.shape)
                weights = tl.exp2(tl.fma(scores, factor, minus)).to(q.dtype)
            shrink = tl.exp2(m - larger)[:, None]
            sums = tl.dot(weights, ones, sums * shrink, input_precision="ieee")
            part = tl.dot(weights, v, part * shrink, input_precision="ieee")
            m = larger
        if own_end % SPLIT == 0:
            most, total, result = _folded(most, total, result, m, tl.max(sums, 1), part)
            m = tl.full(m.shape, _LEAST, tl.float32)
            sums = tl.zeros_like(sums)
            part = tl.zeros_like(part)
    return most, total, result, m, sums, part


@triton.jit
def _relative(
    bias_weights, bank, stride, head_stride, token, head, inside, first_query, first_row,
    GROUP: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As of `_attended`, of ROWS rows from `first_row` on; first_query: where the sequence's first
    one stands."""
    own = load_weights(bias_weights, token, head, inside, stride, head_stride, PROFILES, BLOCK_P)
    before = first_row // GROUP
    query = (first_row + tl.arange(0, ROWS)) // GROUP - before
    return own, bank, query, first_query + before


@triton.jit
def _nothing(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The state before the first key."""
    most, total = tl.full((ROWS,), _LEAST, tl.float32), tl.zeros((ROWS,), tl.float32)
    result, sums = tl.zeros((ROWS, DIMS), tl.float32), tl.zeros((ROWS, _ONES), tl.float32)
    return most, total, result, most, sums, result


@triton.jit
def _all_of(state):
    """With the split that is not done."""
    most, total, result, m, sums, part = state
    return _folded(most, total, result, m, tl.max(sums, 1), part)


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def decode_kernel(
    query, key_cache, value_cache, output, parts, sums,
    cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, query_stride, query_head_stride, bias_weights, bank, bias_stride,
    bias_head_stride, sinks, sink_stride, sequences, room, places, kv_heads,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, EXTENT: tl.constexpr,
    PROFILES: tl.constexpr, BLOCK_P: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Splits, one after the other, of up to ROWS rows of a KV head of a sequence; of the `places`
    rows of the longest run there are as many tiles. An item is a split, which has `room` items;
    where a sequence's are not all in there, the first of them does all that there is to do."""
    tiles = tl.cdiv(places, ROWS)
    kinds = kv_heads * tiles
    blocks_before = tl.load(kv_indptr + sequences).to(tl.int64)
    work = _item_of(blocks_before * BLOCK_SIZE, SPLIT, sequences) * kinds
    now = tl.program_id(0)
    sequence = _sequence_at(now // kinds, kv_indptr, 0, sequences, BLOCK_SIZE, SPLIT)
    wait_for_inputs()
    let_next_start()
    for now in range(tl.program_id(0), work, tl.num_programs(0)):
        item, kind = now // kinds, now % kinds
        # the heads of one block lie side by side: who reads them runs side by side
        kv_head, tile = kind % kv_heads, kind // kv_heads
        first_block = tl.load(kv_indptr + sequence)
        next_block = tl.load(kv_indptr + sequence + 1).to(tl.int64)
        first_item = _item_of(first_block.to(tl.int64) * BLOCK_SIZE, SPLIT, sequence)
        end_item = _item_of(next_block * BLOCK_SIZE, SPLIT, sequence + 1)
        first_token = tl.load(cu_seqlens + sequence).to(tl.int64)
        queries = (tl.load(cu_seqlens + sequence + 1) - first_token).to(tl.int32)
        length = tl.load(kv_length + sequence).to(tl.int32) - FIRST
        splits = tl.cdiv(length, SPLIT)
        alone = (splits <= 1) | (end_item > room)
        begin = (item - first_item) * SPLIT
        end = tl.minimum(length, begin + SPLIT)
        if alone:
            end = length
            if item > first_item:
                begin = end
            elif WINDOW > 0:  # of the first query
                begin = tl.maximum(length - queries - WINDOW + 1, 0) // KEYS * KEYS
        # where nothing is seen, zeros are written
        is_mine = (begin < end) | (alone & (item == first_item))
        if is_mine & (tile * ROWS < queries * GROUP):
            # row = query * GROUP + head of the group
            row = tile * ROWS + tl.arange(0, ROWS)
            inside = row < queries * GROUP
            token = first_token + row // GROUP
            head = kv_head * GROUP + row % GROUP
            dim = tl.arange(0, DIMS)
            written = inside[:, None] & (dim < HEAD_DIM)[None, :]
            q_place = token * query_stride + head * query_head_stride
            q = tl.load(query + q_place[:, None] + dim[None, :], mask=written, other=0.0)
            relative = None
            if EXTENT > 0:
                relative = _relative(
                    bias_weights, bank, bias_stride, bias_head_stride, token, head, inside,
                    length - queries, tile * ROWS, GROUP, PROFILES, BLOCK_P, ROWS,
                )  # fmt: skip
            state = _attended(
                _nothing(ROWS, DIMS), q, key_cache, value_cache, None, None,
                kv_indices + first_block, kv_head, kv_heads, length - queries + row // GROUP,
                begin, end, scale, True, SPLIT, KEYS, HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WINDOW,
                WHOLE, STAGES, relative, EXTENT, PROFILES, BLOCK_P, SPAN,
            )  # fmt: skip
            most, total, result = _all_of(state)
            if alone:
                there = (token * kv_heads * GROUP + head) * HEAD_DIM
                total, result = with_sinks(
                    most, total, result, sinks, token, head, inside, sink_stride
                )
                average = _finished(total, result, v_scale, output.dtype.element_ty)
                tl.store(output + there[:, None] + dim[None, :], average, mask=written)
            else:
                at = (item.to(tl.int64) * kv_heads + kv_head) * places + row
                tl.store(sums + 2 * at, most, mask=inside)
                tl.store(sums + 2 * at + 1, total, mask=inside)
                place = parts + (at * HEAD_DIM)[:, None] + dim[None, :]
                tl.store(place, result, mask=written)
        if now + tl.num_programs(0) < work:
            following = (now + tl.num_programs(0)) // kinds
            sequence = _sequence_at(following, kv_indptr, 0, sequences, BLOCK_SIZE, SPLIT)


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def join_kernel(
    output, parts, sums, cu_seqlens, kv_length, kv_indptr, v_scale, sinks, sink_stride, room,
    places, kv_heads,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The splits of ROWS rows of a sequence that decode_kernel left in `parts` and `sums`."""
    sequence = tl.program_id(0)
    first_block = tl.load(kv_indptr + sequence).to(tl.int64)
    next_block = tl.load(kv_indptr + sequence + 1).to(tl.int64)
    item = _item_of(first_block * BLOCK_SIZE, SPLIT, sequence)
    end_item = _item_of(next_block * BLOCK_SIZE, SPLIT, sequence + 1)
    first_token = tl.load(cu_seqlens + sequence).to(tl.int64)
    queries = (tl.load(cu_seqlens + sequence + 1) - first_token).to(tl.int32)
    splits = tl.cdiv(tl.load(kv_length + sequence).to(tl.int32) - FIRST, SPLIT)
    wait_for_inputs()
    let_next_start()
    if (splits <= 1) | (end_item > room):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    kv_head, own = row // places, row % places
    inside = (kv_head < kv_heads) & (own < queries * GROUP)
    dim = tl.arange(0, DIMS)
    written = inside[:, None] & (dim < HEAD_DIM)[None, :]
    most, total, result, _, _, _ = _nothing(ROWS, DIMS)
    together = splits // _AT_ONCE * _AT_ONCE
    for first in range(0, together, _AT_ONCE):
        several = ()
        for i in tl.static_range(_AT_ONCE):
            at = (item + first + i).to(tl.int64) * (kv_heads * places) + row
            several += (_part(parts, sums, at, dim, inside, written, HEAD_DIM),)
        for i in tl.static_range(_AT_ONCE):
            most, total, result = _folded(
                most, total, result, several[i][0], several[i][1], several[i][2]
            )
    for number in range(together, splits):
        at = (item + number).to(tl.int64) * (kv_heads * places) + row
        part = _part(parts, sums, at, dim, inside, written, HEAD_DIM)
        most, total, result = _folded(most, total, result, part[0], part[1], part[2])
    token, head = first_token + own // GROUP, kv_head * GROUP + own % GROUP
    place = (token * kv_heads * GROUP + head) * HEAD_DIM
    total, result = with_sinks(most, total, result, sinks, token, head, inside, sink_stride)
    result = _finished(total, result, v_scale, output.dtype.element_ty)
    tl.store(output + place[:, None] + dim[None, :], result, mask=written)


@triton.jit
def _part(parts, sums, at, dim, inside, written, HEAD_DIM: tl.constexpr):
    """What decode_kernel left of rows [ROWS] of a split: maxima, sums, and results [ROWS, DIMS]."""
    most = tl.load(sums + 2 * at, mask=inside, other=_LEAST)
    total = tl.load(sums + 2 * at + 1, mask=inside, other=0.0)
    place = parts + (at * HEAD_DIM)[:, None] + dim[None, :]
    return most, total, tl.load(place, mask=written, other=0.0)


@launched(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def prompt_kernel(
    query, key_cache, value_cache, key_tiles, value_tiles, output,
    cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, query_stride, query_head_stride, bias_weights, bank, bias_stride,
    bias_head_stride, sinks, sink_stride, first_sequence, sequences, kv_heads,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
    EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a KV head of one of the sequences from `first_sequence` on."""
    kv_head = tl.program_id(0) % kv_heads
    table = cu_seqlens + first_sequence
    base = tl.load(table)
    tokens = (tl.load(table + sequences) - base).to(tl.int64)
    # The last tiles see most keys: they come first, so that little is left for the end.
    item = _item_of(tokens * GROUP, ROWS, sequences) - 1 - tl.program_id(0) // kv_heads
    if item < 0:
        return
    sequence = _sequence_at(item, table, base, sequences, GROUP, ROWS)
    first_token = tl.load(table + sequence).to(tl.int64)
    queries = (tl.load(table + sequence + 1) - first_token).to(tl.int32)
    first_item = _item_of((first_token - base) * GROUP, ROWS, sequence)
    first_row = (item - first_item) * ROWS
    if first_row >= queries * GROUP:
        return
    length = tl.load(kv_length + first_sequence + sequence).to(tl.int32) - FIRST
    blocks = kv_indices + tl.load(kv_indptr + first_sequence + sequence)

    # row = query * GROUP + head of the group
    row = first_row + tl.arange(0, ROWS)
    inside = row < queries * GROUP
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIMS)
    written = inside[:, None] & (dim < HEAD_DIM)[None, :]
    place = token * query_stride + head * query_head_stride
    q = tl.load(query + place[:, None] + dim[None, :], mask=written, other=0.0)
    position = length - queries + row // GROUP
    last_row = tl.minimum(first_row + ROWS, queries * GROUP) - 1
    end = length - queries + last_row // GROUP + 1
    # Keys that the first row sees, and so all others.
    seen = tl.maximum(length - queries + first_row // GROUP + 1, 0) // KEYS * KEYS
    relative = None
    if EXTENT > 0:
        relative = _relative(
            bias_weights, bank, bias_stride, bias_head_stride, token, head, inside,
            length - queries, first_row, GROUP, PROFILES, BLOCK_P, ROWS,
        )  # fmt: skip
    state = _nothing(ROWS, DIMS)
    if WINDOW > 0:  # the first key that the first row sees; others see it or not
        first_seen = length - queries + first_row // GROUP - WINDOW + 1
        seen = tl.maximum(first_seen, 0) // KEYS * KEYS
    else:
        state = _attended(
            state, q, key_cache, value_cache, key_tiles, value_tiles,
            blocks, kv_head, kv_heads, position, 0, seen, scale, False,
            SPLIT, KEYS, HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WINDOW, WHOLE, STAGES,
            relative, EXTENT, PROFILES, BLOCK_P, SPAN,
        )  # fmt: skip
    state = _attended(
        state, q, key_cache, value_cache, None, None,
        blocks, kv_head, kv_heads, position, seen, end, scale, True,
        SPLIT, KEYS, HEAD_DIM, DIMS, BLOCK_SIZE, FIRST, WINDOW, WHOLE, MASKED_STAGES,
        relative, EXTENT, PROFILES, BLOCK_P, SPAN,
    )  # fmt: skip
    most, total, result = _all_of(state)
    total, result = with_sinks(most, total, result, sinks, token, head, inside, sink_stride)
    place = (token * kv_heads * GROUP + head) * HEAD_DIM
    result = _finished(total, result, v_scale, output.dtype.element_ty)
    tl.store(output + place[:, None] + dim[None, :], result, mask=written)
