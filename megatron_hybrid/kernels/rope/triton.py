"""What attention takes of a projection, in one Triton kernel: heads normed and rotated, keys and
values stored; the calls are protocols.Rope's.

A norm is rounded before the rotation, and that once more. A program computes some heads of one
token, so a token's bits do not depend on what it is batched with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.contract import FP8_MAX, KVCache
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.norm.triton import inverse_rms, scaled
from megatron_hybrid.kernels.paged_attention.triton import kept, store_kv
from megatron_hybrid.kernels.protocols import HeadNorms, Plan

_ANGLES = 128  # of a program, one a thread


def plan(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """As in Rope -> [tokens, rotary_dim] float32: cosines, then sines."""
    tokens, half = positions.shape[0], frequencies.shape[0]
    table = torch.empty(tokens, 2 * half, device=positions.device)
    block = next_power_of_2(half)
    rows = max(1, _ANGLES // block)
    if tokens:
        _angles_kernel[(cdiv(tokens, rows),)](
            positions, frequencies, table, tokens, HALF=half, ROWS=rows, BLOCK=block, num_warps=4,
            **OPTIONS,
        )  # fmt: skip
    return table


def prepare(
    qkv: Tensor, norms: HeadNorms | None, plan: Tensor | None, cache: KVCache, attention: Plan
) -> Tensor:
    """As in Rope."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = cache.key.shape[2]
    heads = all_heads - 2 * kv_heads
    if norms is None and plan is None:
        query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
        store_kv(key, value, cache, attention.kv_slot)
        return query
    query = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    stored = cache.key, cache.value, attention.kv_slot, cache.k_scale, cache.v_scale
    _launch(qkv, norms, plan, query, *stored, kv_heads, FP8_MAX if cache.is_fp8 else 0.0)
    return query


def turn(
    qkv: Tensor, norms: HeadNorms | None, plan: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As in Rope."""
    tokens, all_heads, head_dim = qkv.shape
    heads = all_heads // 3
    query, key, value = qkv.split(heads, dim=1)
    if norms is None and plan is None:
        return query, key, value
    query, key = torch.empty(
        2, tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device
    ).unbind()
    _launch(qkv, norms, plan, query, key, None, None, 1.0, 1.0, heads, 0.0)
    return query, key, value


def _launch(
    qkv: Tensor,
    norms: HeadNorms | None,
    plan: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    kv_slot: Tensor | None,
    k_scale: float,
    v_scale: float,
    kv_heads: int,
    limit: float,
) -> None:
    """Keys, and values if they have a place, go where kv_slot says; None: one behind the other."""
    tokens, heads, head_dim = query.shape
    block = next_power_of_2(head_dim)
    rows = max(1024 // block, 1)
    programs = cdiv(heads, rows) + (1 if value is None else 2) * cdiv(kv_heads, rows)
    if tokens:
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        _prepare_kernel[(tokens * programs,)](
            qkv, q_weight, k_weight, plan, query, key, value, kv_slot,
            *qkv.stride()[:2], eps, k_scale, v_scale, heads, kv_heads, head_dim,
            ROTARY_DIM=0 if plan is None else plan.shape[1],
            LIMIT=limit, ROWS=rows, BLOCK=block,
            num_warps=min(max(rows * block // 256, 1), 8), **OPTIONS,
        )  # fmt: skip


@launched(do_not_specialize=["tokens"])
def _angles_kernel(
    positions, frequencies, table, tokens,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Large angles are reduced exactly, as torch does it: these are no approximations."""
    i = tl.arange(0, BLOCK)[None, :]
    frequency = tl.load(frequencies + i, mask=i < HALF, other=0.0)
    wait_for_inputs()
    let_next_start()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    angle = position.to(tl.float32)[:, None] * frequency
    place = table + token.to(tl.int64)[:, None] * (2 * HALF) + i
    inside = (token < tokens)[:, None] & (i < HALF)
    tl.store(place, tl.cos(angle), mask=inside)
    tl.store(place + HALF, tl.sin(angle), mask=inside)


@launched
def _prepare_kernel(
    qkv, q_weight, k_weight, table, query, key_cache, value_cache, kv_slot,
    token_stride, head_stride, eps, k_scale, v_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LIMIT: the largest number that can be stored; 0: what comes is stored. Without a cache of
    values they stay where they are; without kv_slot a token's key goes to the token's place."""
    keys: tl.constexpr = HEADS  # the first head of keys, and that of values
    values: tl.constexpr = HEADS + KV_HEADS
    # A program has heads of one kind: then it reads one norm's weights, which are more than a head.
    q_programs: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    k_programs: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    kinds: tl.constexpr = 1 if value_cache is None else 2
    programs: tl.constexpr = q_programs + kinds * k_programs
    token = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    is_query = program < q_programs
    is_value = program >= q_programs + k_programs
    first, end, before = keys, values, q_programs
    if is_query:
        first, end, before = 0, keys, 0
    if is_value:
        first, end, before = values, values + KV_HEADS, q_programs + k_programs
    head = first + (program - before) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (head < end) & (dim < HEAD_DIM)
    if q_weight is not None:
        weights = _weights(q_weight, k_weight, dim, inside, is_query)
    wait_for_inputs()
    let_next_start()
    source = qkv + token * token_stride + head * head_stride
    numbers = tl.load(source + dim, mask=inside, other=0)
    result = numbers
    if q_weight is not None:
        inverse = inverse_rms(numbers, HEAD_DIM, eps)
        result = scaled(numbers.to(weights.dtype), inverse, weights).to(numbers.dtype)
    if ROTARY_DIM:
        # Dimensions i and i + half turn together: each is computed with the other one beside it.
        half: tl.constexpr = ROTARY_DIM // 2
        other = dim + half - dim // half * ROTARY_DIM
        rotated = inside & (dim < ROTARY_DIM)
        beside = tl.load(source + other, mask=rotated, other=0)
        if q_weight is not None:
            weights = _weights(q_weight, k_weight, other, rotated, is_query)
            beside = scaled(beside.to(weights.dtype), inverse, weights).to(numbers.dtype)
        angle = table + token * ROTARY_DIM + dim % half
        cosine = tl.load(angle, mask=rotated, other=1.0)
        sine = tl.load(angle + half, mask=rotated, other=0.0)
        turned = beside.to(tl.float32) * tl.where(dim < half, -sine, sine)
        result = (result.to(tl.float32) * cosine + turned).to(numbers.dtype)
    result = tl.where(is_value, numbers, result)

    if is_query:
        place = (token * HEADS + head) * HEAD_DIM + dim
        tl.store(query + place, result, mask=inside)
    else:
        slot = token
        if kv_slot is not None:
            slot = tl.load(kv_slot + token).to(tl.int64)
        place = (slot * KV_HEADS + head - first) * HEAD_DIM + dim
        stored = result
        if LIMIT > 0:
            stored = kept(stored, tl.where(is_value, v_scale, k_scale), LIMIT)
        stored = stored.to(key_cache.dtype.element_ty)
        if value_cache is None:
            tl.store(key_cache + place, stored, mask=inside)
        elif is_value:
            tl.store(value_cache + place, stored, mask=inside)
        else:
            tl.store(key_cache + place, stored, mask=inside)


@triton.jit
def _weights(q_weight, k_weight, dim, valid, is_query):
    """[heads, dims]"""
    if is_query:
        weights = tl.load(q_weight + dim, mask=valid, other=0)
    else:
        weights = tl.load(k_weight + dim, mask=valid, other=0)
    return weights
