"""Heads of convolved attention in one Triton kernel; the meaning is reference.py's, sums are in
float32 and rounded once.

Tiles are of one size whatever a step has, so that a token's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.convolved_heads import reference
from megatron_hybrid.kernels.convolved_heads.protocol import HeadTokens
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2

_ROWS, _COLUMNS = 32, 64  # of a program's tile: tokens, and numbers of a head
_MOST_TAPS = 2


def mix(tokens: HeadTokens, weight: Tensor, bias: Tensor, kv_heads: int) -> Tensor:
    """As in ConvolvedHeads; of more taps than models have by the reference."""
    projected, taps, value = tokens
    if len(taps) > _MOST_TAPS:
        return reference.mix(tokens, weight, bias, kv_heads)
    (count, _), (heads, dim) = projected.shape, bias.shape
    out = torch.empty(count, heads + kv_heads, dim, dtype=value.dtype, device=value.device)
    inner = max(next_power_of_2(dim), 16)
    columns = min(inner, _COLUMNS)
    if count:
        older, newest = taps if len(taps) == 2 else (None, taps[0])
        _mix_kernel[(cdiv(count, _ROWS) * (heads + kv_heads) * cdiv(dim, columns),)](
            projected, older, newest, value, weight, bias, out, count,
            projected.stride(0), 0 if older is None else older.stride(0), newest.stride(0),
            value.stride(0), heads - kv_heads, kv_heads, dim,
            TAPS=len(taps), ROWS=_ROWS, COLUMNS=columns, INNER=inner, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


@launched(do_not_specialize=["tokens"])
def _mix_kernel(
    projected, older, newest, value, weight, bias, out, tokens,
    projected_row, older_row, newest_row, value_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A program has some tokens' numbers [ROWS, COLUMNS] of one head, of queries and then keys and
    then values."""
    wait_for_inputs()
    let_next_start()
    convolved: tl.constexpr = HEADS + KV_HEADS
    every: tl.constexpr = convolved + KV_HEADS
    group: tl.constexpr = HEADS // KV_HEADS
    parts: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // parts % every
    row = tl.program_id(0) // (parts * every) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (row < tokens)[:, None]
    inside = is_row & (column < DIM)[None, :]
    row = row.to(tl.int64)[:, None]
    place = out + (row * every + head) * DIM + column[None, :]
    if head >= convolved:
        source = value + row * value_row + (head - convolved) * DIM + column[None, :]
        tl.store(place, tl.load(source, mask=inside, other=0), mask=inside)
    else:
        i = tl.arange(0, INNER)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        matrix = weight + (head * DIM + column)[None, :] * (TAPS * DIM) + i[:, None]
        is_weight = (i < DIM)[:, None] & (column < DIM)[None, :]
        is_input = is_row & (i < DIM)[None, :]
        own = head * DIM + i[None, :]
        if TAPS == 2:
            x = tl.load(older + row * older_row + own, mask=is_input, other=0)
            w = tl.load(matrix, mask=is_weight, other=0)
            total = tl.dot(x, w, total, input_precision="ieee")
        x = tl.load(newest + row * newest_row + own, mask=is_input, other=0)
        w = tl.load(matrix + (TAPS - 1) * DIM, mask=is_weight, other=0)
        total = tl.dot(x, w, total, input_precision="ieee")
        total += tl.load(bias + head * DIM + column, mask=column < DIM, other=0).to(tl.float32)
        heads = projected + row * projected_row + column[None, :]
        if head < HEADS:
            query = tl.load(heads + head * DIM, mask=inside, other=0).to(tl.float32)
            key_head = head // group
        else:
            key_head = head - HEADS
            query = tl.zeros([ROWS, COLUMNS], tl.float32)
            for member in tl.static_range(group):
                one = tl.load(heads + (key_head * group + member) * DIM, mask=inside, other=0)
                query += one.to(tl.float32)
            query = query / group
        key = tl.load(heads + (HEADS + key_head) * DIM, mask=inside, other=0).to(tl.float32)
        tl.store(place, total + (query + key) * 0.5, mask=inside)
