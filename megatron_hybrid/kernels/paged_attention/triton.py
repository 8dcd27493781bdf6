"""Paged attention in Triton, for any dtype and head size: machines without flashinfer, float32
models, shapes flashinfer has no kernel for.

A program computes a tile of the queries of one sequence that share a KV head, with the softmax
taken as the keys go by (Dao et al., "FlashAttention", 2022). The query heads of a KV head are rows
of the same tile, so that their keys and values are read once.

Where a step has few queries, each sequence's keys are split over programs, whose results a second
kernel puts together. Lengths are read on the device: the split of a sequence follows from its own.
Where all sequences have few queries, and the shape allows it, triton_decode.py is faster; prompts
that are enough for all multiprocessors have triton_prompts.py, apart from the step's decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8_MAX, AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.paged_attention import reference, triton_decode, triton_prompts
from megatron_hybrid.kernels.paged_attention.prompts import TILE
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.paged_attention.triton_bias import BiasArguments, biases, load_weights
from megatron_hybrid.kernels.paged_attention.triton_decode import LOG2_E, MOST_SPLITS
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import sees
from megatron_hybrid.kernels.paged_attention.triton_sinks import load_sinks

# Where a step's tables begin is no reason to compile once more.
_TABLES = ["sequence", "position", "kv_length", "kv_indptr", "kv_indices"]
# Numbers that a program copies of keys, and as many of values.
_GATHERED_NUMBERS = 4096
_KEYS = 32  # of a tile


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The step as it came: nothing is planned but the size of the grid."""

    paged: PagedSequences
    shape: AttentionShape
    longest: int  # queries of the longest sequence, or more
    prompt_tokens: int = 0  # of all prompts, or more
    decode_tokens: int = 0  # before them
    decodes: TritonPlan | None = None  # where there are prompts, too: of them alone

    @property
    def kv_slot(self) -> Tensor:
        """[tokens]: where each token's key and value go."""
        return self.paged.kv_slot


class TritonAttention:
    """An Attention that keeps nothing between steps and may be captured in a CUDA graph."""

    def plan(self, paged: PagedSequences, shape: AttentionShape) -> TritonPlan:
        """Once a step."""
        host, count = paged.host, paged.num_decodes
        longest = int(np.diff(host.cu_seqlens).max(initial=0))
        has_prompts = len(paged.kv_length) > count
        if paged.static:  # the grid has room for any step that the graph may run
            longest = max(paged.longest_run, 1)
            if has_prompts:
                longest = max(longest, len(paged.kv_slot) - count)
        if not has_prompts:
            return TritonPlan(paged, shape, longest)
        before, end = int(host.cu_seqlens[count]), int(host.cu_seqlens[-1])
        tokens = (len(paged.kv_slot) if paged.static else end) - before
        decodes = self.plan(paged.decodes_alone(), shape) if count else None
        return TritonPlan(paged, shape, longest, tokens, before, decodes)

    def most_captured(self, shape: AttentionShape, prompts: int) -> int:
        """None: a grid has room for each prompt to be as long as all of them together."""
        return 0

    def append(self, key: Tensor, value: Tensor, cache: KVCache, plan: TritonPlan) -> None:
        """As in Attention."""
        store_kv(key, value, cache, plan.kv_slot)

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        plan: TritonPlan,
        bias: RelativeBias | None = None,
        sinks: Tensor | None = None,
        *,
        splits: int | None = None,
    ) -> Tensor:
        """As in Attention; heads may be strided, too.

        splits: into how many parts keys are split at most; None: as many as keep the device busy.
        """
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.longest:
            self._attend(query, cache, plan, output, bias, sinks, splits)
        return output

    def _attend(
        self,
        query: Tensor,
        cache: KVCache,
        plan: TritonPlan,
        output: Tensor,
        bias: RelativeBias | None,
        sinks: Tensor | None,
        splits: int | None,
    ) -> None:
        """On the kernels that are best for the plan."""
        paged, shape, tokens = plan.paged, plan.shape, plan.prompt_tokens
        if triton_decode.serves(shape, plan.longest):
            triton_decode.attend(
                query, cache, paged, shape, plan.longest, output, splits, bias, sinks
            )
        elif splits is None and triton_prompts.pays(shape, tokens, query.device):
            triton_prompts.attend(query, cache, paged, shape, tokens, output, bias, sinks)
            if plan.decodes is not None:
                own = slice(plan.decode_tokens)
                if bias is not None:
                    bias = bias._replace(weights=bias.weights[own])
                sinks = None if sinks is None else sinks[own]
                self._attend(query[own], cache, plan.decodes, output[own], bias, sinks, None)
        else:
            _attend_in_tiles(query, cache, plan, output, bias, sinks, splits)

    copy_tokens = staticmethod(reference.copy_tokens)


def _attend_in_tiles(
    query: Tensor,
    cache: KVCache,
    plan: TritonPlan,
    output: Tensor,
    bias: RelativeBias | None,
    sinks: Tensor | None,
    splits: int | None,
) -> None:
    """Of sequences of all lengths, on one kernel."""
    paged, shape = plan.paged, plan.shape
    tokens, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = cache.key.shape
    sequences, group = len(paged.kv_length), heads // kv_heads
    rows = plan.longest * group
    # 16 rows are the least of a matrix product; a decode has no use for more
    block_rows = min(max(next_power_of_2(rows), 16), 64)
    tiles = cdiv(rows, block_rows)
    if splits is None:
        programs = tiles * kv_heads * sequences
        splits = min(2 * processors(query.device) // max(programs, 1), MOST_SPLITS)
    splits = max(splits, 1)
    parts, sums = triton_decode.parts_of(output, splits)
    relative = BiasArguments.of(bias, block_rows, group, _KEYS)
    # x is the one dimension of a grid that may exceed 65535
    _attend_kernel[(tiles * splits, kv_heads, sequences)](
        query, cache.key, cache.value, output, parts, sums,
        paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
        shape.scale * cache.k_scale * LOG2_E, cache.v_scale,
        *query.stride()[:2], *relative[:4], sinks, triton_decode.sink_stride(sinks), tokens,
        kv_heads, splits,
        IS_SPLIT=splits > 1, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        FIRST=shape.first_position, WINDOW=shape.window, ROWS=block_rows, KEYS=_KEYS,
        DIMS=max(next_power_of_2(head_dim), 16), SPAN=relative.span, **relative.constants,
        num_warps=4 if head_dim <= 128 else 8, num_stages=2,
    )  # fmt: skip
    triton_decode.join(output, parts, sums, paged.cu_seqlens, cache.v_scale, sinks)


def store_kv(key: Tensor, value: Tensor, cache: KVCache, kv_slot: Tensor) -> None:
    """Rows of key and value [tokens, kv_heads, head_dim] (strided, but for head_dim) to the places
    kv_slot [tokens] of the cache.

    Not flashinfer's append: it derives a token's place from the block table, while ours may be
    turned to block 0, where the KV of shared positions is not to be written again.
    """
    tokens, kv_heads, head_dim = key.shape
    if not tokens:
        return
    width = kv_heads * head_dim
    _store_kv_kernel[(tokens,)](
        key, value, cache.key, cache.value, kv_slot, cache.k_scale, cache.v_scale,
        *key.stride()[:2], *value.stride()[:2], head_dim, width,
        BLOCK=next_power_of_2(width), LIMIT=FP8_MAX if cache.is_fp8 else 0.0,
        num_warps=min(max(next_power_of_2(width) // 256, 1), 8),
    )  # fmt: skip


@launched
def _store_kv_kernel(
    key, value, key_cache, value_cache, kv_slot, k_scale, v_scale,
    key_stride, key_head_stride, value_stride, value_head_stride,
    head_dim: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One token. LIMIT: the largest number that can be stored; 0: what comes is stored."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(kv_slot + token).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    head, dim = at // head_dim, at % head_dim
    k = tl.load(key + token * key_stride + head * key_head_stride + dim, mask=inside)
    v = tl.load(value + token * value_stride + head * value_head_stride + dim, mask=inside)
    if LIMIT > 0:
        k, v = kept(k, k_scale, LIMIT), kept(v, v_scale, LIMIT)
    tl.store(key_cache + place + at, k.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + place + at, v.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit
def kept(values, scale, LIMIT: tl.constexpr):
    """What a cache in FP8 keeps of values, in float32 before it is rounded."""
    scaled = tl.div_rn(values.to(tl.float32), scale)
    return tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


def gather_kv(
    cache: KVCache,
    key: Tensor,
    value: Tensor,
    sequence: Tensor,
    position: Tensor,
    paged: PagedSequences,
) -> None:
    """Fill key and value [tiles * TILE, kv_heads, head_dim], contiguous, each tile with the rows of
    `sequence` [tiles] from `position` [tiles] on. Rows past the sequence's end become zeros: what
    lies there in the cache is not read."""
    rows, kv_heads, head_dim = key.shape
    if not rows:
        return
    width = kv_heads * head_dim
    block = next_power_of_2(width)
    rows_of_a_program = min(max(_GATHERED_NUMBERS // block, 1), TILE)
    _gather_kv_kernel[(rows // rows_of_a_program,)](
        cache.key, cache.value, key, value, sequence, position,
        paged.kv_length, paged.kv_indptr, paged.kv_indices,
        WIDTH=width, BLOCK=block, BLOCK_SIZE=cache.key.shape[1], ROWS=rows_of_a_program, TILE=TILE,
        num_warps=min(max(block // 1024, 4), 16),
    )  # fmt: skip


@launched(do_not_specialize_on_alignment=_TABLES)
def _gather_kv_kernel(
    key_cache, value_cache, key, value, sequence, position, kv_length, kv_indptr, kv_indices,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one tile."""
    PARTS: tl.constexpr = TILE // ROWS
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    owner = tl.load(sequence + tile)
    row = tl.arange(0, ROWS)
    at = tl.load(position + tile) + part * ROWS + row
    inside = at < tl.load(kv_length + owner)
    blocks = kv_indices + tl.load(kv_indptr + owner)
    block = tl.load(blocks + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    source = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * WIDTH)[:, None] + column
    first = tl.program_id(0).to(tl.int64) * ROWS
    place = ((first + row) * WIDTH)[:, None] + column
    written = (column < WIDTH) & (row >= 0)[:, None]
    readable = written & inside[:, None]
    keys = tl.load(key_cache + source, mask=readable, other=0.0)
    values = tl.load(value_cache + source, mask=readable, other=0.0)
    tl.store(key + place, keys, mask=written)
    tl.store(value + place, values, mask=written)


@triton.jit
def _attended(
    largest, total, result, q, key_cache, value_cache, blocks, kv_head, kv_heads, position, keys,
    begin, end, scale, relative, IS_SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """The largest score [ROWS], the sum of weights [ROWS], weighted values [ROWS, DIMS] after the
    keys from `begin` to `end`, of `keys` that the sequence has. relative: the rows' weights, the
    bank, each row's query of those in the tile [ROWS], and where the first of these stands; or
    None."""
    dim = tl.arange(0, DIMS)
    dim_inside = dim < HEAD_DIM
    for first_key in range(begin, end, KEYS):
        at = first_key + tl.arange(0, KEYS)
        # what lies past a sequence's end was never written: it is not read
        inside = at < keys
        block = tl.load(blocks + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + at % BLOCK_SIZE) * kv_heads + kv_head) * HEAD_DIM
        where = place[:, None] + dim[None, :]
        readable = inside[:, None] & dim_inside[None, :]
        k = tl.load(key_cache + where, mask=readable, other=0.0).to(q.dtype)
        v = tl.load(value_cache + where, mask=readable, other=0.0).to(q.dtype)
        # full float32 products for float32; other types have no effect from input_precision
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if relative is not None:
            own, bank, query, first_query = relative
            nearest = first_query - (first_key + KEYS - 1)
            scores += biases(own, bank, query, nearest, KEYS, EXTENT, PROFILES, BLOCK_P, SPAN)
        scores = tl.where(sees(position, at, FIRST, WINDOW), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        if IS_SPLIT or FIRST > 0 or WINDOW > 0:
            # Some rows may see none of these keys; else key 0 comes first, which all of them see.
            larger = tl.maximum(larger, -1e30)
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger
    return largest, total, result


@launched(do_not_specialize=["tokens", "splits"])
def _attend_kernel(
    query, key_cache, value_cache, output, parts, sums,
    cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, query_stride, query_head_stride, bias_weights, bank, bias_stride,
    bias_head_stride, sinks, sink_stride, tokens, kv_heads, splits,
    IS_SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) // splits * ROWS
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_token = tl.load(cu_seqlens + sequence).to(tl.int64)
    queries = (tl.load(cu_seqlens + sequence + 1) - first_token).to(tl.int32)
    if first_row >= queries * GROUP:
        return
    keys = tl.load(kv_length + sequence).to(tl.int32)
    blocks = kv_indices + tl.load(kv_indptr + sequence)

    # row = query * GROUP + head of the group
    row = first_row + tl.arange(0, ROWS)
    row_inside = row < queries * GROUP
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = keys - queries + row // GROUP
    dim = tl.arange(0, DIMS)
    dim_inside = dim < HEAD_DIM
    q = tl.load(
        query + (token * query_stride + head * query_head_stride)[:, None] + dim[None, :],
        mask=row_inside[:, None] & dim_inside[None, :],
        other=0.0,
    )
    if EXTENT > 0:
        own = load_weights(
            bias_weights, token, head, row_inside, bias_stride, bias_head_stride, PROFILES, BLOCK_P
        )
        first_query = first_row // GROUP

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None and not IS_SPLIT:
        largest = load_sinks(sinks, token, head, row_inside, sink_stride)
        total += 1.0
    result = tl.zeros([ROWS, DIMS], tl.float32)
    end = tl.minimum(keys, keys - queries + (first_row + ROWS - 1) // GROUP + 1)
    begin = 0
    if WINDOW > 0:  # of the first query
        begin = tl.maximum(keys - queries + first_row // GROUP - WINDOW + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(keys - begin, splits), KEYS) * KEYS
    begin += split * share
    end = tl.minimum(end, begin + share)
    near = begin
    if EXTENT > 0:  # keys that are too far away for a bias come first
        near = tl.maximum(keys - queries + first_query - EXTENT + 1, 0) // KEYS * KEYS
        near = tl.minimum(tl.maximum(near, begin), end)
        largest, total, result = _attended(
            largest, total, result, q, key_cache, value_cache, blocks, kv_head, kv_heads, position,
            keys, begin, near, scale, None, IS_SPLIT, HEAD_DIM, BLOCK_SIZE, FIRST, WINDOW, KEYS,
            DIMS, EXTENT, PROFILES, BLOCK_P, SPAN,
        )  # fmt: skip
        relative = own, bank, row // GROUP - first_query, keys - queries + first_query
    else:
        relative = None
    largest, total, result = _attended(
        largest, total, result, q, key_cache, value_cache, blocks, kv_head, kv_heads, position,
        keys, near, end, scale, relative, IS_SPLIT, HEAD_DIM, BLOCK_SIZE, FIRST, WINDOW, KEYS,
        DIMS, EXTENT, PROFILES, BLOCK_P, SPAN,
    )  # fmt: skip
    written = row_inside[:, None] & dim_inside[None, :]
    if IS_SPLIT:
        at = (split * tl.cast(tokens, tl.int64) + token) * (kv_heads * GROUP) + head
        tl.store(parts + (at * HEAD_DIM)[:, None] + dim[None, :], result, mask=written)
        tl.store(sums + 2 * at, largest, mask=row_inside)
        tl.store(sums + 2 * at + 1, total, mask=row_inside)
    else:
        if FIRST > 0 or WINDOW > 0:
            total = tl.where(total != 0.0, total, 1.0)  # as where parts are joined
        result = result / total[:, None] * v_scale
        place = output + ((token * kv_heads * GROUP + head) * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(place, result.to(output.dtype.element_ty), mask=written)
