"""Pairs of a token and one of the experts that its router chose, sorted by expert into blocks; for
the products in triton.py and triton_quantized.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import apply_activation
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2

# At most so many tokens go pair by pair: more would read experts that they share too often.
FEW_TOKENS = 4
# Up to so many pairs are grouped by one kernel, in which each expert's program reads all of them.
_FEW_PAIRS = 4096
_CHUNK = 256  # pairs that are compared with each other
_MOST_PIECES = 128  # about as many as a GPU has multiprocessors: each reads all others' counts


class Groups(NamedTuple):
    """Pairs by expert, cut into blocks of at most `rows` that share an expert."""

    order: Tensor  # [pairs] int32: pairs sorted by expert, then by pair
    blocks: Tensor  # [3, blocks] int32: expert, first row in `order`, end row; empty where equal


def group(experts: Tensor, num_experts: int, rows: int) -> Groups:
    """experts [tokens, chosen] -> Groups. Ids past the last expert are in no block, and as many
    places at the end of the order are of no use.

    The number of blocks depends on shapes only: pairs // rows + experts leave room for the last,
    partly filled block of each expert. Of few pairs expert e's blocks begin at (rows of experts
    before e) // rows + e; of many the empty blocks come last."""
    pairs = experts.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    blocks = torch.empty(3, pairs // rows + num_experts, dtype=torch.int32, device=experts.device)
    if pairs <= _FEW_PAIRS:
        block = max(next_power_of_2(pairs), 128)
        _group_few_kernel[(num_experts,)](
            experts, order, blocks, pairs, blocks.shape[1], rows, block,
            num_warps=max(block // 512, 1), **OPTIONS,
        )  # fmt: skip
        return Groups(order, blocks)
    chunks = cdiv(pairs, _CHUNK * _MOST_PIECES)
    pieces = cdiv(pairs, _CHUNK * chunks)
    bins = next_power_of_2(num_experts)
    counts = torch.empty(pieces, bins, dtype=torch.int32, device=experts.device)
    _count_kernel[(pieces,)](experts, counts, pairs, chunks, num_experts, _CHUNK, bins)
    _place_kernel[(pieces,)](
        experts, counts, order, blocks, pairs, chunks, blocks.shape[1],
        num_experts, rows, _CHUNK, bins, num_warps=8,
    )  # fmt: skip
    return Groups(order, blocks)


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@launched(do_not_specialize=["pairs", "num_blocks"])
def _group_few_kernel(
    experts, order, blocks, pairs, num_blocks, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr
):
    """One program an expert: it counts the pairs of lower experts, which gives its first row,
    and its own, then places these. Blocks that are left over are empty ones of the last expert."""
    wait_for_inputs()
    let_next_start()
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=tl.num_programs(0))
    own = (chosen == expert).to(tl.int32)
    begin = tl.sum((chosen < expert).to(tl.int32), axis=0)
    end = begin + tl.sum(own, axis=0)

    first = begin // BLOCK_M + expert
    last = end // BLOCK_M + expert + 1  # where the next expert's blocks begin
    last = tl.where(expert == tl.num_programs(0) - 1, num_blocks, last)
    step = tl.arange(0, 64)
    for start in range(first, last, 64):
        block = start + step
        row = tl.minimum(begin + (block - first) * BLOCK_M, end)
        _store_blocks(
            blocks, num_blocks, block, expert + 0 * block, row, end, block < last, BLOCK_M
        )

    tl.store(order + begin + tl.cumsum(own, axis=0) - 1, pair, mask=own != 0)


# Many pairs are sorted by counting: each piece of `chunks` chunks is counted by a program of a
# first kernel, and placed by one of a second, which adds up the counts of all pieces by itself.


@launched(do_not_specialize=["pairs", "chunks"])
def _count_kernel(
    experts, counts, pairs, chunks, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr
):
    """counts [pieces, BINS]: the pairs of each expert in each piece."""
    piece = tl.program_id(0)
    total = tl.zeros((BINS,), tl.int32)
    for chunk in range(piece * chunks, (piece + 1) * chunks):
        chosen = _load_experts(experts, chunk * CHUNK + tl.arange(0, CHUNK), pairs, EXPERTS)
        total += tl.histogram(chosen, BINS, mask=chosen < EXPERTS)
    tl.store(counts + piece * BINS + tl.arange(0, BINS), total)


@launched(do_not_specialize=["pairs", "chunks", "num_blocks"])
def _place_kernel(
    experts, counts, order, blocks, pairs, chunks, num_blocks, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """A piece's pairs into `order`, and some of the blocks: of each expert the piece-th, and those
    that many pieces further."""
    piece = tl.program_id(0)
    pieces = tl.num_programs(0)
    expert = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)  # in the pieces before
    step: tl.constexpr = 16384 // BINS
    for start in range(0, pieces, step):
        other = start + tl.arange(0, step)[:, None]
        count = tl.load(counts + other * BINS + expert[None, :], mask=other < pieces, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(other < piece, count, 0), axis=0)
    end = tl.cumsum(total, axis=0)
    begin = end - total

    number = tl.cdiv(total, BLOCK_M)
    first = tl.cumsum(number, axis=0) - number
    number = tl.where(expert < EXPERTS, number, 0)
    # What is left over is the last expert's, whose rows end before.
    number = tl.where(expert == EXPERTS - 1, num_blocks - first, number)
    for i in range(piece, tl.max(number, axis=0), pieces):
        row = tl.minimum(begin + i * BLOCK_M, end)
        _store_blocks(blocks, num_blocks, first + i, expert, row, end, i < number, BLOCK_M)

    place = begin + before  # of the next pair
    within = tl.arange(0, CHUNK)
    for chunk in range(piece * chunks, (piece + 1) * chunks):
        pair = chunk * CHUNK + within
        chosen = _load_experts(experts, pair, pairs, EXPERTS)
        key = chosen * CHUNK + within  # in the order that is wanted
        rank = tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)
        valid = chosen < EXPERTS
        count = tl.histogram(chosen, BINS, mask=valid)
        # Of the chunk's pairs by rank, an expert's begin behind those of lower experts.
        base = place - (tl.cumsum(count, axis=0) - count)
        row = tl.gather(base, tl.where(valid, chosen, 0), 0) + rank
        tl.store(order + row, pair, mask=valid)
        place += count


@triton.jit
def _load_experts(experts, pair, pairs, EXPERTS: tl.constexpr):
    """EXPERTS past the end, and for all ids past the last expert."""
    chosen = tl.load(experts + pair, mask=pair < pairs, other=EXPERTS)
    return tl.minimum(chosen, EXPERTS).to(tl.int32)


@triton.jit
def _store_blocks(blocks, num_blocks, block, expert, row, end, valid, BLOCK_M: tl.constexpr):
    tl.store(blocks + block, expert, mask=valid)
    tl.store(blocks + num_blocks + block, row, mask=valid)
    tl.store(blocks + 2 * num_blocks + block, tl.minimum(row + BLOCK_M, end), mask=valid)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Of float32 values; ACTIVATION: "silu", "relu2", or one of limit_of's and caps_of's (see
    `limited`, too)."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION != "relu2":
        return apply_activation(x, ACTIVATION)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive
