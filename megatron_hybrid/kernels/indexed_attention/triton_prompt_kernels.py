"""Attention with an index of prompts in Triton, by tiles of neighbouring tokens: see triton.py.

A tile has QUERIES tokens, one behind another. What any of them has chosen is listed once, with a
bit for each one that has:

    entries    groups                                   | keys behind the last whole group
    row        r0      r1      r2      ...              | r0    r1   ...    places in the cache
    seen by    0b0011  0b1111  0b0100  ...              | 0b1000 ...        tokens of the tile

So keys and values are read once a tile, and products have as many rows as its tokens have heads.
Tokens of several sequences may be in a tile: none sees what another sequence's have chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.dependent_launch import let_next_start, wait_for_inputs
from megatron_hybrid.kernels.indexed_attention.triton_index_kernels import seen_by
from megatron_hybrid.kernels.launching import launched
from megatron_hybrid.kernels.paged_attention.triton_sequences import sequence_of
from megatron_hybrid.kernels.paged_attention.triton_split_kernels import (
    _LEAST,
    _TABLES,
    _as_numbers,
)


@launched(
    do_not_specialize=["first_token", "rows", "sequences", "room"],
    do_not_specialize_on_alignment=_TABLES,
)
def score_tiles_kernel(
    query, weights, index, scores, cu_seqlens, kv_length, kv_indptr, kv_indices,
    first_token, rows, sequences, room, weight_stride, stride,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr,
    GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores [rows, room] of TOKENS of the `rows` tokens from `first_token` on, by GROUPS groups,
    one head of the index after the other."""
    wait_for_inputs()
    let_next_start()
    begin = first_token + tl.program_id(0).to(tl.int64) * TOKENS
    end = tl.minimum(begin + TOKENS, first_token + rows)
    end = tl.minimum(end, tl.load(cu_seqlens + sequences))
    if begin >= end:
        return
    own, dim = tl.arange(0, TOKENS), tl.arange(0, DIMS)
    query += begin * stride
    scores += (begin - first_token) * room
    if weights is not None:
        weights += begin * weight_stride
    first_group = tl.program_id(1) * GROUPS
    group = first_group + tl.arange(0, GROUPS)
    for sequence in range(
        sequence_of(begin, cu_seqlens, sequences), sequence_of(end - 1, cu_seqlens, sequences) + 1
    ):
        # of the tile's tokens those that are the sequence's, counted from its first one
        low = (tl.maximum(tl.load(cu_seqlens + sequence), begin) - begin).to(tl.int32)
        high = (tl.minimum(tl.load(cu_seqlens + sequence + 1), end) - begin).to(tl.int32)
        before = seen_by(begin - 1, sequence, cu_seqlens, kv_length)
        most = (before + high) // GROUP
        if (low < high) & (most > CHOSEN) & (most > first_group):
            blocks = kv_indices + tl.load(kv_indptr + sequence)
            there, last = group < most, group * GROUP + (GROUP - 1)
            block = tl.load(blocks + last // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            place = index + ((block * BLOCK_SIZE + last % BLOCK_SIZE) * WIDTH)[:, None]
            readable = there[:, None] & (dim < DIM)[None, :]
            k = tl.load(place + dim[None, :], mask=readable, other=0.0)
            k = tl.trans(k.to(query.dtype.element_ty))
            is_own = (low <= own) & (own < high)
            total = tl.zeros((TOKENS, GROUPS), tl.float32)
            place = own[:, None] * stride + dim[None, :]
            readable = is_own[:, None] & (dim < DIM)[None, :]
            for head in tl.range(0, HEADS, num_stages=STAGES):
                q = tl.load(query + head * DIM + place, mask=readable, other=0.0)
                part = tl.maximum(tl.dot(q, k, input_precision="ieee"), 0.0)
                if weights is not None:
                    factor = tl.load(weights + own * weight_stride + head, mask=is_own, other=0.0)
                    part = part * factor[:, None]
                total += part
            whole = tl.where(is_own, (before + 1 + own) // GROUP, 0)
            whole = tl.where(whole > CHOSEN, whole, 0)  # of others nothing is looked at
            place = own[:, None] * room + group[None, :]
            tl.store(scores + place, total, mask=group[None, :] < whole[:, None])


@launched(
    do_not_specialize=["first_token", "rows", "sequences", "words", "first_tile"],
    do_not_specialize_on_alignment=_TABLES,
)
def share_kernel(
    bits, entries, counts, cu_seqlens, kv_length, kv_indptr, kv_indices,
    first_token, rows, sequences, words, first_tile,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's list, of the bits [rows, words] that choose_kernel leaves of tokens from
    `first_token` on: QUERIES * CHOSEN groups at most, and then as many keys as are behind. counts
    [tiles, 2]: how many there are of both."""
    wait_for_inputs()
    let_next_start()
    GROUPS: tl.constexpr = QUERIES * CHOSEN
    ENTRIES: tl.constexpr = QUERIES * (CHOSEN + GROUP)
    begin = first_token + tl.program_id(0).to(tl.int64) * QUERIES
    end = tl.minimum(begin + QUERIES, first_token + rows)
    end = tl.minimum(end, tl.load(cu_seqlens + sequences))
    tile = first_tile + tl.program_id(0).to(tl.int64)
    entries += tile * (2 * ENTRIES)
    bits += (begin - first_token) * words
    groups, keys = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if begin < end:
        for sequence in range(
            sequence_of(begin, cu_seqlens, sequences),
            sequence_of(end - 1, cu_seqlens, sequences) + 1,
        ):
            # of the tile's tokens those that are the sequence's, counted from its first one
            low = (tl.maximum(tl.load(cu_seqlens + sequence), begin) - begin).to(tl.int32)
            high = (tl.minimum(tl.load(cu_seqlens + sequence + 1), end) - begin).to(tl.int32)
            before = seen_by(begin - 1, sequence, cu_seqlens, kv_length)
            blocks = kv_indices + tl.load(kv_indptr + sequence)
            most = (before + high) // GROUP
            if low >= high:
                most = 0
            for first in range(0, most, BLOCK):
                group = first + tl.arange(0, BLOCK)
                by = tl.zeros((BLOCK,), tl.int32)
                for i in tl.static_range(QUERIES):
                    whole = tl.where((low <= i) & (i < high), (before + i + 1) // GROUP, 0)
                    there = group < whole
                    word = tl.load(
                        bits + i * words + group // 32, mask=there & (whole > CHOSEN), other=-1
                    )
                    by |= tl.where(there, (word >> (group % 32)) & 1, 0) << i
                taken = by != 0
                position = group * GROUP
                block = tl.load(blocks + position // BLOCK_SIZE, mask=taken, other=0)
                place = groups + tl.cumsum(taken.to(tl.int32), 0) - 1
                row = block.to(tl.int32) * BLOCK_SIZE + position % BLOCK_SIZE
                tl.store(entries + place, row, mask=taken)
                tl.store(entries + ENTRIES + place, by, mask=taken)
                groups += tl.sum(taken.to(tl.int32), 0)
            member = tl.arange(0, MEMBERS)
            for i in tl.static_range(QUERIES):
                behind = (before + i + 1) % GROUP  # keys, of token i
                is_last = (i + 1 >= high) | (behind == GROUP - 1)  # that has this group there
                count = tl.where((low <= i) & (i < high) & is_last, behind, 0)
                there = member < count
                position = before + i + 1 - behind + member
                block = tl.load(blocks + position // BLOCK_SIZE, mask=there, other=0)
                row = block.to(tl.int32) * BLOCK_SIZE + position % BLOCK_SIZE
                since = tl.maximum(i + 1 - behind + member, low)  # the first token that sees it
                by = (-1 << since) & ((2 << i) - 1)
                tl.store(entries + GROUPS + keys + member, row, mask=there)
                tl.store(entries + ENTRIES + GROUPS + keys + member, by, mask=there)
                keys += count
    tl.store(counts + 2 * tile, groups)
    tl.store(counts + 2 * tile + 1, keys)


@triton.jit
def _entries(
    entries, at, in_groups, end, MASKED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Of these keys the rows in the cache, and who sees them: nobody from `end` on."""
    here = at < end
    if MASKED:
        grouped = at < in_groups
        place = entries + tl.where(grouped, at // GROUP, GROUPS + at - in_groups)
        row = tl.load(place, mask=here, other=0) + tl.where(grouped, at % GROUP, 0)
    else:
        place = entries + at // GROUP
        row = tl.load(place, mask=here, other=0) + at % GROUP
    return row, tl.load(place + ENTRIES, mask=here, other=0)


@triton.jit
def _attended(
    state, q, bit, key_cache, value_cache, entries, kv_head, kv_heads, in_groups, begin, end, scale,
    MASKED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ENTRIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest score [ROWS], the sum of weights, weighted values [ROWS, DIMS] after a tile's
    keys from `begin` to `end`, of which the first `in_groups` are groups'. Unless MASKED they are
    whole tiles of those. bit [ROWS]: of each row's token."""
    most, total, result = state
    tile, dim = tl.arange(0, KEYS), tl.arange(0, DIMS)
    row, by = _entries(entries, begin + tile, in_groups, end, MASKED, GROUP, GROUPS, ENTRIES)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        where = ((row.to(tl.int64) * kv_heads + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
        if MASKED or DIMS > HEAD_DIM:
            readable = (first + tile < end)[:, None] & (dim < HEAD_DIM)[None, :]
            k = _as_numbers(tl.load(key_cache + where, mask=readable, other=0.0), q.dtype)
            v = k
            if value_cache is not None:
                v = _as_numbers(tl.load(value_cache + where, mask=readable, other=0.0), q.dtype)
        else:
            k = _as_numbers(tl.load(key_cache + where), q.dtype)
            v = k
            if value_cache is not None:
                v = _as_numbers(tl.load(value_cache + where), q.dtype)
        # full float32 products for float32; other types have no effect from input_precision
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((by[None, :] & bit[:, None]) != 0, scores, float("-inf"))
        # the next tile's, so that its keys need not wait for them
        row, by = _entries(
            entries, first + KEYS + tile, in_groups, end, MASKED, GROUP, GROUPS, ENTRIES
        )
        larger = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None], input_precision="ieee")
        most = larger
    return most, total, result


@launched(do_not_specialize=["first_token", "tokens"])
def attend_tiles_kernel(
    query, key_cache, value_cache, output, entries, counts, scale, v_scale,
    query_stride, query_head_stride, first_token, tokens, kv_heads,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """QUERIES tokens of those from `first_token` to `tokens`, and the HEADS query heads of a KV
    head of each. Values that are keys have no cache of their own."""
    wait_for_inputs()
    let_next_start()
    GROUPS: tl.constexpr = QUERIES * CHOSEN
    ENTRIES: tl.constexpr = QUERIES * (CHOSEN + GROUP)
    kv_head = tl.program_id(0) % kv_heads
    # The last tiles see most keys: they come first, so that little is left for the end.
    tile = tl.cdiv(tokens - first_token, QUERIES) - 1 - tl.program_id(0) // kv_heads
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    own = row // HEADS
    token = first_token + (tile * QUERIES + own).to(tl.int64)
    inside = (own < QUERIES) & (token < tokens)
    head = kv_head * HEADS + row % HEADS
    written = inside[:, None] & (dim < HEAD_DIM)[None, :]
    place = query + (token * query_stride + head * query_head_stride)[:, None] + dim[None, :]
    q = tl.load(place, mask=written, other=0.0)
    bit = tl.where(inside, 1 << (own % 32), 0)
    entries += tile.to(tl.int64) * (2 * ENTRIES)  # two planes
    in_groups = tl.load(counts + 2 * tile) * GROUP
    keys = in_groups + tl.load(counts + 2 * tile + 1)
    in_tiles = in_groups // KEYS * KEYS
    most = tl.full((ROWS,), _LEAST, tl.float32)
    state = most, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIMS), tl.float32)
    state = _attended(
        state, q, bit, key_cache, value_cache, entries, kv_head, kv_heads, in_groups, 0, in_tiles,
        scale, False, GROUP, GROUPS, ENTRIES, HEAD_DIM, DIMS, KEYS, STAGES,
    )  # fmt: skip
    most, total, result = _attended(
        state, q, bit, key_cache, value_cache, entries, kv_head, kv_heads, in_groups, in_tiles,
        keys, scale, True, GROUP, GROUPS, ENTRIES, HEAD_DIM, DIMS, KEYS, STAGES,
    )  # fmt: skip
    factor = v_scale / tl.where(total != 0.0, total, 1.0)  # padding sees nothing
    place = (token * kv_heads * HEADS + head) * HEAD_DIM
    result = (result * factor[:, None]).to(output.dtype.element_ty)
    tl.store(output + place[:, None] + dim[None, :], result, mask=written)
