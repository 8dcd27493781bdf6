"""Pairs of a token and one of the experts that its router chose: sorted by expert into blocks, and
what experts made of them summed for each token; for the products in triton.py and
triton_quantized.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# At most so many tokens go pair by pair: more would read experts that they share too often.
FEW_TOKENS = 4


def sum_pairs(
    parts: Tensor, experts: Tensor, num_experts: int, dtype: torch.dtype | None = None
) -> Tensor:
    """parts [tokens * chosen, width] -> the sum of each token's, of `dtype` or as the parts.
    `num_experts`: 0, or how many are here: those of other ids are left out."""
    (tokens, chosen), width = experts.shape, parts.shape[1]
    y = parts.new_empty(tokens, width, dtype=dtype)
    block = min(triton.next_power_of_2(width), 1024)
    _sum_kernel[(tokens, triton.cdiv(width, block))](
        parts, experts, y, chosen, width, num_experts, block, num_warps=4
    )
    return y


class Groups(NamedTuple):
    """Pairs by expert, cut into blocks of at most `rows` that share an expert."""

    order: Tensor  # [pairs] int32: pairs sorted by expert, then by pair
    blocks: Tensor  # [3, blocks] int32: expert, first row in `order`, end row; empty where equal


def group(experts: Tensor, num_experts: int, rows: int, partial: bool = False) -> Groups:
    """experts [tokens, chosen] -> Groups. `partial`: ids past the last expert are in no block, and
    as many places at the end of the order are of no use.

    The number of blocks depends on shapes only: expert e's blocks begin at (rows of experts before
    e) // rows + e, which leaves room for its last, partly filled block and makes
    pairs // rows + experts in all."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    make = torch.zeros if partial else torch.empty  # then no expert's blocks reach the end
    blocks = make(3, pairs // rows + num_experts, dtype=torch.int32, device=experts.device)
    chunk = min(max(triton.next_power_of_2(pairs), 128), 8192)
    _group_kernel[(num_experts,)](
        experts, order, blocks, pairs, blocks.shape[1], rows, chunk,
        num_warps=min(max(chunk // 512, 1), 16),
    )  # fmt: skip
    return Groups(order, blocks)


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@triton.jit(do_not_specialize=["pairs", "num_blocks"])
def _group_kernel(
    experts, order, blocks, pairs, num_blocks, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr
):
    """One program an expert: it counts the pairs of lower experts, which gives its first row,
    and its own, then places these."""
    expert = tl.program_id(0)
    offset = tl.arange(0, CHUNK)
    lower = tl.zeros((CHUNK,), tl.int32)
    own = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + offset
        chosen = tl.load(experts + pair, mask=pair < pairs, other=tl.num_programs(0))
        lower += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    begin = tl.sum(lower, axis=0)
    end = begin + tl.sum(own, axis=0)

    first = begin // BLOCK_M + expert
    last = end // BLOCK_M + expert + 1  # where the next expert's blocks begin
    step = tl.arange(0, 64)
    for start in range(first, last, 64):
        block = start + step
        valid = block < last
        row = tl.minimum(begin + (block - first) * BLOCK_M, end)
        tl.store(blocks + block, expert + 0 * block, mask=valid)
        tl.store(blocks + num_blocks + block, row, mask=valid)
        tl.store(blocks + 2 * num_blocks + block, tl.minimum(row + BLOCK_M, end), mask=valid)

    place = begin
    for start in range(0, pairs, CHUNK):
        pair = start + offset
        chosen = tl.load(experts + pair, mask=pair < pairs, other=tl.num_programs(0))
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, axis=0) - 1, pair, mask=mine != 0)
        place += tl.sum(mine, axis=0)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Of float32 values; ACTIVATION: "silu" or "relu2"."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "relu2", "activations are silu and relu2")
        positive = tl.maximum(x, 0.0)
        return positive * positive


@triton.jit
def _sum_kernel(
    parts, experts, y,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EXPERTS: 0, or how many there are: other ids' parts hold anything."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(CHOSEN):
        pair = token * CHOSEN + j
        end = WIDTH
        if EXPERTS:
            end = tl.where(tl.load(experts + pair) < EXPERTS, WIDTH, 0)
        part = tl.load(parts + pair * WIDTH + column, mask=column < end, other=0.0)
        total += part.to(tl.float32)
    tl.store(y + token * WIDTH + column, total.to(y.dtype.element_ty), mask=valid)
