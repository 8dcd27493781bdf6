"""Attention to what an index has chosen, in Triton: see triton.py."""

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


@triton.jit
def _rows(
    chosen, blocks, at, end, in_groups, whole, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Where these of the keys that a token sees are in the cache: those of what it has chosen, and
    behind them those of its tail."""
    here, grouped = at < end, at < in_groups
    group = tl.load(chosen + at // GROUP, mask=here & grouped, other=0)
    position = tl.where(grouped, group * GROUP + at % GROUP, whole * GROUP + at - in_groups)
    block = tl.load(blocks + position // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@launched(
    do_not_specialize=["sequences", "tokens", "splits"], do_not_specialize_on_alignment=_TABLES
)
def attend_kernel(
    query, key_cache, value_cache, output, parts, sums, chosen,
    cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, query_stride, query_head_stride, sequences, tokens, splits, kv_heads,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, IS_SPLIT: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A part of the keys that a token sees, of ROWS of the HEADS query heads of a KV head. Values
    that are keys have no cache of their own. AHEAD: where a tile's keys are is asked for a tile
    before, so that they need not wait for it; that takes registers."""
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs()
    let_next_start()
    if token >= tl.load(cu_seqlens + sequences):
        return
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(1) // kv_heads % splits
    first_row = tl.program_id(1) // kv_heads // splits * ROWS
    sequence = sequence_of(token, cu_seqlens, sequences)
    seen = seen_by(token, sequence, cu_seqlens, kv_length)
    blocks = kv_indices + tl.load(kv_indptr + sequence)
    whole = seen // GROUP
    in_groups = tl.minimum(whole, CHOSEN) * GROUP
    keys = in_groups + seen % GROUP
    share = tl.cdiv(tl.cdiv(keys, splits), KEYS) * KEYS
    begin = split * share
    end = tl.minimum(keys, begin + share)

    row, dim = first_row + tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside = row < HEADS
    head = kv_head * HEADS + row
    written = inside[:, None] & (dim < HEAD_DIM)[None, :]
    place = query + (token * query_stride + head * query_head_stride)[:, None] + dim[None, :]
    q = tl.load(place, mask=written, other=0.0)
    most = tl.full((ROWS,), _LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIMS), tl.float32)
    chosen += token * CHOSEN
    tile = tl.arange(0, KEYS)
    if AHEAD:
        cached = _rows(chosen, blocks, begin + tile, end, in_groups, whole, GROUP, BLOCK_SIZE)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        here = first + tile < end
        if not AHEAD:
            cached = _rows(chosen, blocks, first + tile, end, in_groups, whole, GROUP, BLOCK_SIZE)
        where = ((cached * kv_heads + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
        readable = here[:, None] & (dim < HEAD_DIM)[None, :]
        k = _as_numbers(tl.load(key_cache + where, mask=readable, other=0.0), q.dtype)
        v = k
        if value_cache is not None:
            v = _as_numbers(tl.load(value_cache + where, mask=readable, other=0.0), q.dtype)
        # full float32 products for float32; other types have no effect from input_precision
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if AHEAD:
            following = first + KEYS + tile
            cached = _rows(chosen, blocks, following, end, in_groups, whole, GROUP, BLOCK_SIZE)
        scores = tl.where(here[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None], input_precision="ieee")
        most = larger
    if IS_SPLIT:
        at = (split * tl.cast(tokens, tl.int64) + token) * (kv_heads * HEADS) + head
        there = parts + (at * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(there, result, mask=written)
        tl.store(sums + 2 * at, most, mask=inside)
        tl.store(sums + 2 * at + 1, total, mask=inside)
    else:
        at = (token * kv_heads * HEADS + head) * HEAD_DIM
        there = output + at[:, None] + dim[None, :]
        average = result / total[:, None] * v_scale
        tl.store(there, average.to(output.dtype.element_ty), mask=written)
