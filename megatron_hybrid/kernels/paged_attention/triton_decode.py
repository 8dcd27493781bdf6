"""Attention of a few queries a sequence over many keys, in Triton: decodes, and their drafts.

What it takes is the time to read the keys and values, so each is read once: a program has the query
heads of one KV head as rows of one tile, and a part of the sequence's keys, a tile of which lies in
one block. The parts are put together by a second kernel (Dao et al., "Flash-Decoding", 2023).
Lengths are read on the device: the grid depends on shapes alone.

FP8 keys and values become float16, which has each of their numbers exactly, by one instruction for
two of them; for bfloat16 it would be three, two of them slow. Queries lose nothing either: each is
divided by a power of two, so that it is in range.

The product with the values needs two keys side by side, and memory has two dims side by side:

    key 0    d0 d1 | d2 d3 | ...        even    key 0, 1 of d0 | key 0, 1 of d2 | ...
    key 1    d0 d1 | d2 d3 | ...        odd     key 0, 1 of d1 | key 0, 1 of d3 | ...

Values of 16 bits are transposed by the hardware on their way to the registers, FP8 ones are not. So
two dims are read as one number of 16 bits, and taken apart behind it: one product for the even
dims, one for the odd ones. (Where values have 16 bits, the halves are the first and the last dims.)

Keys that are too far away for a bias by distance come first, in a loop that knows of none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import AttentionShape, KVCache, PagedSequences
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.launching import launched, next_power_of_2
from megatron_hybrid.kernels.paged_attention.protocol import RelativeBias
from megatron_hybrid.kernels.paged_attention.triton_bias import (
    BiasArguments,
    biases_of_few,
    load_weights,
)
from megatron_hybrid.kernels.paged_attention.triton_kv_tiles import sees
from megatron_hybrid.kernels.paged_attention.triton_sinks import load_sinks

LOG2_E = 1.4426950408889634  # exp2 is what devices have
MOST_SPLITS = 64
_FEW_SPLITS = 8  # joined by a kernel of their own: two are all that can be wanted
_MOST_ROWS = 64  # queries times the query heads of a KV head: the rows of a tile
_MOST_BIASED = 8  # queries, where there is a bias: each is a product more
_PROGRAMS = 8  # a multiprocessor: two rounds of as many as run on it at once
_TILE_BYTES = 48 << 10  # of keys and values on their way to a program


def serves(shape: AttentionShape, longest: int) -> bool:
    """Whether `attend` can compute sequences of up to so many queries."""
    rows = longest * (shape.heads // shape.kv_heads)
    power_of_two = shape.head_dim & (shape.head_dim - 1) == 0
    return (
        rows <= _MOST_ROWS
        and shape.block_size % 32 == 0
        and power_of_two
        and shape.head_dim > 16
        and (longest <= _MOST_BIASED or not shape.relative)
    )


def splits_for(sequences: int, kv_heads: int, device: torch.device) -> int:
    """Into how many parts keys are split: as many as keep the device busy."""
    wanted = _PROGRAMS * processors(device) // (sequences * kv_heads)
    return max(1, min(wanted, MOST_SPLITS))


def attend(
    query: Tensor,
    cache: KVCache,
    paged: PagedSequences,
    shape: AttentionShape,
    longest: int,
    output: Tensor,
    splits: int | None = None,
    bias: RelativeBias | None = None,
    sinks: Tensor | None = None,
) -> None:
    """As in Attention, for sequences of up to `longest` queries that this module `serves`, into
    output [tokens, heads, head_dim], contiguous. splits: see splits_for."""
    tokens, heads, head_dim = query.shape
    kv_heads, block_size = shape.kv_heads, shape.block_size
    sequences = len(paged.kv_length)
    if splits is None:
        splits = splits_for(sequences, kv_heads, query.device)
    parts, sums = parts_of(output, splits)
    is_fp8 = cache.is_fp8
    rows = max(16, next_power_of_2(longest * heads // kv_heads))  # 16: of a product
    itemsize = cache.key.element_size()
    keys = 64 if block_size % 64 == 0 and head_dim <= 128 and itemsize < 4 else 32
    tile_bytes = 2 * keys * head_dim * itemsize
    # With 128 registers a thread four programs run on a multiprocessor.
    takes_more = is_fp8 or (bias is not None and itemsize < 4)
    registers = {"maxnreg": 128} if takes_more and rows == 16 else {}
    relative = BiasArguments.of(bias, rows, heads // kv_heads, keys)
    _attend_kernel[(kv_heads * splits, sequences)](
        query, cache.key, cache.value.view(torch.int16) if is_fp8 else cache.value,
        output, parts, sums,
        paged.cu_seqlens, paged.kv_length, paged.kv_indptr, paged.kv_indices,
        shape.scale * cache.k_scale * LOG2_E, cache.v_scale,
        *query.stride()[:2], *relative[:4], sinks, sink_stride(sinks), tokens, kv_heads, splits,
        IS_SPLIT=splits > 1, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        FIRST=shape.first_position, WINDOW=shape.window, ROWS=rows, KEYS=keys, FP8=is_fp8,
        STAGES=min(max(_TILE_BYTES // tile_bytes, 2), 4),
        ASSEMBLY=query.is_cuda,  # not in Triton's interpreter
        QUERIES=next_power_of_2(longest) if bias is not None else 0, **relative.constants,
        num_warps=4, **registers, **OPTIONS,
    )  # fmt: skip
    join(output, parts, sums, paged.cu_seqlens, cache.v_scale, sinks)


def sink_stride(sinks: Tensor | None) -> int:
    """Of a token's."""
    return 0 if sinks is None else sinks.stride(0)


def parts_of(output: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Memory for the results of so many parts of the keys, [splits, *output's shape] float32, and
    for the largest score and the sum of weights of each, [splits, tokens, heads, 2] float32."""
    if splits == 1:
        return output, output  # which nobody reads
    tokens, heads, head_dim = output.shape
    parts = output.new_empty((splits, tokens, heads, head_dim), dtype=torch.float32)
    return parts, output.new_empty((splits, tokens, heads, 2), dtype=torch.float32)


def join(
    output: Tensor,
    parts: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor,
    v_scale: float,
    sinks: Tensor | None = None,
) -> None:
    """The results of all parts, which have been written to what `parts_of` gave, into `output`
    [tokens, heads, head_dim], with the sinks, which no part of several has; where there is one
    part, all is there already."""
    if parts is output:
        return
    splits, tokens, heads, head_dim = parts.shape
    _join_kernel[(tokens, heads)](
        output, parts, sums, cu_seqlens, sinks, sink_stride(sinks), len(cu_seqlens) - 1, tokens,
        splits, v_scale,
        HEADS=heads, PLACES=_FEW_SPLITS if splits <= _FEW_SPLITS else MOST_SPLITS,
        HEAD_DIM=head_dim, DIMS=next_power_of_2(head_dim), num_warps=4, **OPTIONS,
    )  # fmt: skip


# `splits` changes with the number of sequences: one more must not be compiled for.
@launched(do_not_specialize=["sequences", "tokens", "splits"])
def _join_kernel(
    output, parts, sums, cu_seqlens, sinks, sink_stride, sequences, tokens, splits, v_scale,
    HEADS: tl.constexpr, PLACES: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """One head of one token."""
    wait_for_inputs()
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(cu_seqlens + sequences):
        return  # padding, which no program has computed
    dim = tl.arange(0, DIMS)
    inside = dim < HEAD_DIM
    split = tl.arange(0, PLACES)
    at = (split * tl.cast(tokens, tl.int64) + token) * HEADS + tl.program_id(1)
    total = tl.load(sums + 2 * at + 1, mask=split < splits, other=0.0)
    # Of a part that sees no key the sum is 0, and the rest was not written. A NaN is no 0.
    seen = total != 0.0
    largest = tl.load(sums + 2 * at, mask=seen, other=float("-inf"))
    most = tl.maximum(tl.max(largest, 0), -1e30)
    if sinks is not None:
        sink = load_sinks(sinks, token, tl.program_id(1), True, sink_stride)
        most = tl.maximum(most, sink)
    factor = tl.exp2(largest - most)
    part = tl.load(
        parts + (at * HEAD_DIM)[:, None] + dim[None, :],
        mask=seen[:, None] & inside[None, :],
        other=0.0,
    )
    total = tl.sum(total * factor, 0)
    if sinks is not None:
        total += tl.exp2(sink - most)
    total = tl.where(total != 0.0, total, 1.0)  # of a row that sees nothing, whose result is 0
    result = tl.sum(part * factor[:, None], 0) / total * v_scale
    place = output + (token * HEADS + tl.program_id(1)) * HEAD_DIM + dim
    tl.store(place, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _taken_apart(pair, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Two FP8 dims as one number of 16 bits -> the even dims, the odd ones. The assembly, two keys
    at a time, is four instructions; of the same in Triton nine are made."""
    if ASSEMBLY and dtype == tl.float16:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 keys;
            .reg .b16 both, rest;
            prmt.b32 keys, $2, 0, 0x4420;
            mov.b32 {both, rest}, keys;
            cvt.rn.f16x2.e4m3x2 $0, both;
            prmt.b32 keys, $2, 0, 0x4431;
            mov.b32 {both, rest}, keys;
            cvt.rn.f16x2.e4m3x2 $1, both;
            }""",
            "=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = pair.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        odd = (pair >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return even, odd


@triton.jit
def _attended(
    state, q, factor, key_cache, value_cache, blocks, kv_head, kv_heads, position, length, begin,
    stop, end, relative, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr, QUERIES: tl.constexpr, EXTENT: tl.constexpr, PROFILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """`state` after the keys from `begin`, where a tile begins, to `stop`, behind which others
    follow up to `end`: the block of the next tile, the largest score [ROWS], the sum of weights
    [ROWS], and both halves of the weighted values [ROWS, HEAD_DIM / 2]: see the top of the file.
    factor [ROWS]: of scores. relative: the rows' weights, the bank, each row's query [ROWS], and
    where the first of these stands; or None."""
    block, largest, total, result_0, result_1 = state
    VALUE_DIM: tl.constexpr = HEAD_DIM // 2 if FP8 else HEAD_DIM
    tile, dim, half = tl.arange(0, KEYS), tl.arange(0, HEAD_DIM), tl.arange(0, HEAD_DIM // 2)
    k_place = tile[:, None] * (kv_heads * HEAD_DIM) + dim[None, :]
    v_place = tile[:, None] * (kv_heads * VALUE_DIM) + half[None, :]
    for first in tl.range(begin, stop, KEYS, num_stages=STAGES):
        here = (block.to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE) * kv_heads + kv_head
        # the next tile's, so that its keys need not wait for it
        block = tl.load(blocks + (first + KEYS) // BLOCK_SIZE, mask=first + KEYS < end, other=0)
        at = first + tile
        readable = (at < length)[:, None]  # what lies past the end was never written
        k = tl.load(key_cache + here * HEAD_DIM + k_place, mask=readable, other=0.0)
        values = value_cache + here * VALUE_DIM + v_place
        if FP8:
            pair = tl.load(values, mask=readable, other=0)
            v_0, v_1 = _taken_apart(pair, q.dtype, ASSEMBLY)
        else:
            v_0 = tl.load(values, mask=readable, other=0.0)
            v_1 = tl.load(values + HEAD_DIM // 2, mask=readable, other=0.0)
        # full float32 products for float32; other types have no effect from input_precision
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * factor[:, None]
        if relative is not None:
            own, bank, query, first_query = relative
            nearest = first_query - (first + KEYS - 1)
            scores += biases_of_few(
                own, bank, query, nearest, QUERIES, KEYS, EXTENT, PROFILES, BLOCK_P
            )
        scores = tl.where(sees(position, at, FIRST, WINDOW), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        w = weights.to(q.dtype)
        result_0 = tl.dot(w, v_0, result_0 * shrink[:, None], input_precision="ieee")
        result_1 = tl.dot(w, v_1, result_1 * shrink[:, None], input_precision="ieee")
        largest = larger
    return block, largest, total, result_0, result_1


@launched(do_not_specialize=["tokens", "splits"])
def _attend_kernel(
    query, key_cache, value_cache, output, parts, sums,
    cu_seqlens, kv_length, kv_indptr, kv_indices,
    scale, v_scale, query_stride, query_head_stride, bias_weights, bank, bias_stride,
    bias_head_stride, sinks, sink_stride, tokens, kv_heads, splits,
    IS_SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    FP8: tl.constexpr, STAGES: tl.constexpr, ASSEMBLY: tl.constexpr, QUERIES: tl.constexpr,
    EXTENT: tl.constexpr, PROFILES: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A part of the keys of one KV head of one sequence."""
    # the heads of one block lie side by side: who reads them runs side by side
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads
    sequence = tl.program_id(1)
    first_token = tl.load(cu_seqlens + sequence).to(tl.int64)
    queries = (tl.load(cu_seqlens + sequence + 1) - first_token).to(tl.int32)
    if queries == 0:
        wait_for_inputs()  # so that who waits for this kernel waits for all before it
        return
    length = tl.load(kv_length + sequence).to(tl.int32)
    begin = 0
    if WINDOW > 0:  # of the first query
        begin = tl.maximum(length - queries - WINDOW + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(length - begin, splits), KEYS) * KEYS
    begin += split * share
    end = tl.minimum(length, begin + share)

    # row = query * GROUP + head of the group
    row = tl.arange(0, ROWS)
    row_inside = row < queries * GROUP
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = length - queries + row // GROUP
    dim = tl.arange(0, HEAD_DIM)
    # Lengths and blocks were there before, the newest key was not.
    blocks = kv_indices + tl.load(kv_indptr + sequence)
    block = tl.load(blocks + begin // BLOCK_SIZE, mask=begin < end, other=0)
    wait_for_inputs()
    let_next_start()
    q = tl.load(
        query + (token * query_stride + head * query_head_stride)[:, None] + dim[None, :],
        mask=row_inside[:, None],
        other=0.0,
    )
    factor = tl.full([ROWS], scale, tl.float32)
    if FP8 and query.dtype.element_ty != tl.float32:
        # the power of two below the largest number of a row: its exponent alone
        exact = q.to(tl.float32)
        power = tl.max(tl.abs(exact), 1).to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.where(power == 0, 1.0, power.to(tl.float32, bitcast=True))
        q = (exact / power[:, None]).to(tl.float16)
        factor *= power

    largest = tl.full([ROWS], -1e30, tl.float32)  # a row may see none of these keys
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None and not IS_SPLIT:
        largest = tl.maximum(largest, load_sinks(sinks, token, head, row_inside, sink_stride))
        total += 1.0
    result = tl.zeros([ROWS, HEAD_DIM // 2], tl.float32)
    state = block, largest, total, result, result
    near = begin
    if EXTENT > 0:
        near = tl.maximum(length - queries - EXTENT + 1, 0) // KEYS * KEYS
        near = tl.minimum(tl.maximum(near, begin), end)
        state = _attended(
            state, q, factor, key_cache, value_cache, blocks, kv_head, kv_heads, position, length,
            begin, near, end, None, HEAD_DIM, BLOCK_SIZE, FIRST, WINDOW, KEYS, FP8, STAGES,
            ASSEMBLY, QUERIES, EXTENT, PROFILES, BLOCK_P,
        )  # fmt: skip
    relative = None
    if EXTENT > 0:
        own = load_weights(
            bias_weights, token, head, row_inside, bias_stride, bias_head_stride, PROFILES, BLOCK_P
        )
        relative = own, bank, row // GROUP, length - queries
    _, largest, total, result_0, result_1 = _attended(
        state, q, factor, key_cache, value_cache, blocks, kv_head, kv_heads, position, length,
        near, end, end, relative, HEAD_DIM, BLOCK_SIZE, FIRST, WINDOW, KEYS, FP8, STAGES,
        ASSEMBLY, QUERIES, EXTENT, PROFILES, BLOCK_P,
    )  # fmt: skip

    STEP: tl.constexpr = 2 if FP8 else 1
    half = tl.arange(0, HEAD_DIM // 2)
    written = row_inside[:, None]
    if IS_SPLIT:
        at = (split * tl.cast(tokens, tl.int64) + token) * (kv_heads * GROUP) + head
        tl.store(sums + 2 * at, largest, mask=row_inside)
        tl.store(sums + 2 * at + 1, total, mask=row_inside)
        place = parts + (at * HEAD_DIM)[:, None] + (half * STEP)[None, :]
    else:
        total = tl.where(total != 0.0, total, 1.0)  # as in _join_kernel
        result_0 = (result_0 / total[:, None] * v_scale).to(output.dtype.element_ty)
        result_1 = (result_1 / total[:, None] * v_scale).to(output.dtype.element_ty)
        at = (token * kv_heads * GROUP + head) * HEAD_DIM
        place = output + at[:, None] + (half * STEP)[None, :]
    OTHER: tl.constexpr = 1 if FP8 else HEAD_DIM // 2
    tl.store(place, result_0, mask=written)
    tl.store(place + OTHER, result_1, mask=written)
