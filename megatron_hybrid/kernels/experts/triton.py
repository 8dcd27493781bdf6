"""Experts without a loop over them and without waiting for the device, in Triton.

A pair is a token and one of the experts that its router chose; pair p belongs to token
p // chosen. Two ways:

- few tokens: each pair by itself, as products of a matrix and a vector;
- otherwise pairs are sorted by expert into blocks of rows that share an expert, and two grouped
  matrix products run over the blocks. The first one gathers its rows from x and ends with the
  activation, the second one spreads its rows back to the pairs; a token's pairs are summed last.

Sums are in float32 and in a fixed order (no atomics): the same input gives the same output.
Nothing depends on values on the host, so that every call may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.experts import fp4_few, triton_few, triton_quantized
from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS, activated, group, sum_pairs
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight
from megatron_hybrid.kernels.linear.products import written_out
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import ExpertWeights, Inputs


class Tile(NamedTuple):
    """How a program of a product covers its weights."""

    columns: int  # rows of the weights: columns of the product
    depth: int  # of the inner dimension, a step
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of the grouped products."""

    rows: int  # pairs in a block
    up: Tile
    down: Tile


FEW_UP = Tile(columns=8, depth=512, warps=4, stages=1)
FEW_DOWN = Tile(columns=8, depth=512, warps=4, stages=1)


def choose_tiles(pairs: int, num_experts: int, gated: bool, dtype: torch.dtype) -> Tiles:
    """Tiles for grouped products, by how many rows an expert has on average."""
    average = pairs / num_experts
    halves = 2 if gated else 1  # a gated tile has as many columns of the gate besides
    if dtype.itemsize > 2:
        narrow = Tile(32, 32, warps=4, stages=2)
        return Tiles(16 if average < 32 else 64, narrow, narrow)
    if average <= 8:
        return Tiles(16, Tile(64 // halves, 128, 4, 4), Tile(64, 128, 4, 4))
    if average <= 32:
        return Tiles(32, Tile(64 // halves, 128, 4, 4), Tile(64, 128, 4, 4))
    if average <= 96:
        return Tiles(64, Tile(128 // halves, 64, 4, 4), Tile(128, 64, 4, 4))
    return Tiles(128, Tile(256 // halves, 64, 8, 4), Tile(256, 64, 8, 4))


def route(logits: Tensor, chosen: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """As in Experts; experts are int32."""
    tokens, num_experts = logits.shape
    logits = logits.contiguous()
    experts = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    rows = 4
    if tokens:
        _route_kernel[(triton.cdiv(tokens, rows),)](
            logits, experts, weights, tokens, normalize, num_experts, chosen, rows,
            triton.next_power_of_2(num_experts), triton.next_power_of_2(chosen), num_warps=1,
        )  # fmt: skip
    return experts, weights


def mix(x: Inputs, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """As in Experts; `experts` must lie within [0, number of experts), or be that number where some
    are elsewhere."""
    tokens, chosen = experts.shape
    plain = plain_rows(x).contiguous()
    if tokens == 0:
        return torch.empty_like(plain)
    experts, weights = experts.contiguous(), weights.contiguous()
    up, down = layer.up, layer.down
    if isinstance(up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        if fp4_few.can_mix(layer, tokens * chosen, plain.dtype):
            return fp4_few.mix(plain, experts, weights, layer)
        if triton_few.can_mix(layer, tokens):
            return triton_few.mix(x, experts, weights, layer)
        if triton_quantized.can_mix(layer, tokens * chosen):
            return triton_quantized.mix(x, experts, weights, layer)
        layer = layer._replace(
            up=_plain_weight(up, plain.dtype), down=_plain_weight(down, plain.dtype)
        )
    x = plain
    if tokens <= FEW_TOKENS:
        return mix_few(x, experts, weights, layer)
    every = layer.up.shape[0] + layer.elsewhere
    tiles = choose_tiles(tokens * chosen, every, layer.gated, x.dtype)
    return mix_grouped(x, experts, weights, layer, tiles)


def add_shared(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """As in Experts, in float32 up to the end."""
    tokens, width = x.shape
    x, routed, shared = x.contiguous(), routed.contiguous(), shared.contiguous()
    y = torch.empty_like(routed)
    block = min(triton.next_power_of_2(width), 2048)
    if tokens:
        _add_shared_kernel[(tokens,)](
            routed, shared, x, gate, y, width, block, num_warps=max(block // 256, 1)
        )
    return y


def _plain_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """What weights are, in 16 or 32 bits."""
    return weight if isinstance(weight, Tensor) else written_out(weight, dtype)


def mix_few(x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """mix, pair by pair."""
    tokens, chosen = experts.shape
    num_experts = layer.up.shape[0] if layer.elsewhere else 0
    width, inner = layer.down.shape[1:]
    hidden = x.new_empty(tokens * chosen, inner)
    _few_up_kernel[(triton.cdiv(inner, FEW_UP.columns), tokens * chosen)](
        x, experts, layer.up, hidden, chosen, width, inner, layer.activation, layer.gated,
        num_experts, **_options(FEW_UP),
    )  # fmt: skip
    y = x.new_empty(tokens, width)
    _few_down_kernel[(triton.cdiv(width, FEW_DOWN.columns), tokens)](
        hidden, experts, weights, layer.down, y, chosen, width, inner, num_experts,
        **_options(FEW_DOWN),
    )  # fmt: skip
    return y


def mix_grouped(
    x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights, tiles: Tiles
) -> Tensor:
    """mix, with pairs sorted by expert."""
    (tokens, chosen), (num_experts, width, inner) = experts.shape, layer.down.shape
    partial = layer.elsewhere > 0
    groups = group(experts, num_experts, tiles.rows, partial)
    pairs, count = tokens * chosen, groups.blocks.shape[1]
    # act(up[e] x[t]) of every pair, in the order of `groups`.
    hidden = x.new_empty(pairs, inner)
    _up_kernel[(count * triton.cdiv(inner, tiles.up.columns),)](
        x, layer.up, hidden, groups.order, groups.blocks, count, chosen, width, inner,
        layer.activation, layer.gated, tiles.rows, **_options(tiles.up),
    )  # fmt: skip
    # weight * down[e] hidden of every pair, in the order of pairs.
    parts = x.new_empty(pairs, width)
    _down_kernel[(count * triton.cdiv(width, tiles.down.columns),)](
        hidden, layer.down, weights, parts, groups.order, groups.blocks, count, width, inner,
        tiles.rows, **_options(tiles.down),
    )  # fmt: skip
    return sum_pairs(parts, experts, num_experts if partial else 0)


def _options(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits, experts, weights, tokens,
    NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_E)
    source = tl.minimum(row, tokens - 1)[:, None] * EXPERTS + column[None, :]
    left = tl.load(logits + source, mask=(column < EXPERTS)[None, :], other=float("-inf"))
    left = left.to(tl.float32)
    # Rows of NaN (the padding of a captured step may hold any bits) still choose real experts.
    left = tl.where(left == left, left, float("-inf"))
    place = tl.arange(0, BLOCK_C)
    best = tl.full((ROWS, BLOCK_C), float("-inf"), tl.float32)
    expert = tl.zeros((ROWS, BLOCK_C), tl.int32)
    for j in tl.static_range(CHOSEN):
        value, index = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        here = (place == j)[None, :]
        best = tl.where(here, value[:, None], best)
        expert = tl.where(here, index[:, None], expert)
        left = tl.where(column[None, :] == index[:, None], float("-inf"), left)
    share = tl.exp(best - tl.max(best, axis=1)[:, None])
    total = tl.sum(share, axis=1)
    if not NORMALIZE:  # and the experts that were not chosen
        total += tl.sum(tl.exp(left - tl.max(best, axis=1)[:, None]), axis=1)
    share = share / total[:, None]
    target = row[:, None] * CHOSEN + place[None, :]
    valid = (row < tokens)[:, None] & (place < CHOSEN)[None, :]
    tl.store(experts + target, expert, mask=valid)
    tl.store(weights + target, share, mask=valid)


@triton.jit
def _load(pointers, valid, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K] of rows that are SIZE long, from column k on; zeros where not `valid`
    [rows, 1] and past the end."""
    if SIZE % BLOCK_K:
        valid = valid & (k + tl.arange(0, BLOCK_K) < SIZE)[None, :]
    return tl.load(pointers + k, mask=valid, other=0.0)


@triton.jit
def _load_weights(pointers, k, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """_load of weights, whose rows are all valid: without a mask where that can be."""
    if SIZE % BLOCK_K:
        valid = (k + tl.arange(0, BLOCK_K) < SIZE)[None, :]
        return tl.load(pointers + k, mask=valid, other=0.0)
    else:
        return tl.load(pointers + k)


@triton.jit(do_not_specialize=["num_blocks"])
def _up_kernel(
    x, weight, hidden, order, blocks, num_blocks, CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # All columns of a block, then the next block: what runs at a time shares rows and weights.
    block = tl.program_id(0) // tl.cdiv(INNER, BLOCK_N)
    n = tl.program_id(0) % tl.cdiv(INNER, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(blocks + num_blocks + block)
    end = tl.load(blocks + 2 * num_blocks + block)
    expert = tl.load(blocks + block).to(tl.int64)
    if begin >= end:
        return
    row = begin + tl.arange(0, BLOCK_M)
    valid = (row < end)[:, None]
    token = tl.load(order + row, mask=row < end, other=0).to(tl.int64) // CHOSEN
    k = tl.arange(0, BLOCK_K)
    inputs = x + token[:, None] * WIDTH + k[None, :]
    # Columns past the end repeat the last one; they are computed but not stored.
    column = tl.minimum(n, INNER - 1)
    weights = weight + expert * (INNER * WIDTH) * (2 if GATED else 1)
    weights += column[:, None] * WIDTH + k[None, :]
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            rows = _load(inputs, valid, start, WIDTH, BLOCK_K)
            gate = _load_weights(weights, start, WIDTH, BLOCK_K)
            up = _load_weights(weights + INNER * WIDTH, start, WIDTH, BLOCK_K)
            first = tl.dot(rows, tl.trans(gate), first, input_precision="ieee")
            second = tl.dot(rows, tl.trans(up), second, input_precision="ieee")
        first = activated(first, ACTIVATION) * second
    else:
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            rows = _load(inputs, valid, start, WIDTH, BLOCK_K)
            up = _load_weights(weights, start, WIDTH, BLOCK_K)
            first = tl.dot(rows, tl.trans(up), first, input_precision="ieee")
        first = activated(first, ACTIVATION)
    target = hidden + row[:, None].to(tl.int64) * INNER + n[None, :]
    tl.store(target, first.to(hidden.dtype.element_ty), mask=valid & (n < INNER)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden, weight, shares, parts, order, blocks, num_blocks,
    WIDTH: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_N)
    n = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(blocks + num_blocks + block)
    end = tl.load(blocks + 2 * num_blocks + block)
    expert = tl.load(blocks + block).to(tl.int64)
    if begin >= end:
        return
    row = begin + tl.arange(0, BLOCK_M)
    valid = (row < end)[:, None]
    k = tl.arange(0, BLOCK_K)
    inputs = hidden + row[:, None].to(tl.int64) * INNER + k[None, :]
    column = tl.minimum(n, WIDTH - 1)
    weights = weight + expert * (WIDTH * INNER) + column[:, None] * INNER + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        rows = _load(inputs, valid, start, INNER, BLOCK_K)
        down = _load_weights(weights, start, INNER, BLOCK_K)
        total = tl.dot(rows, tl.trans(down), total, input_precision="ieee")
    pair = tl.load(order + row, mask=row < end, other=0).to(tl.int64)
    total *= tl.load(shares + pair, mask=row < end, other=0.0)[:, None]
    target = parts + pair[:, None] * WIDTH + n[None, :]
    tl.store(target, total.to(parts.dtype.element_ty), mask=valid & (n < WIDTH)[None, :])


@triton.jit
def _add_shared_kernel(routed, shared, x, gate, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        k = start + column
        inputs = tl.load(x + row + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        sums += inputs * tl.load(gate + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    share = tl.sigmoid(tl.sum(sums, axis=0))
    for start in tl.static_range(0, WIDTH, BLOCK):
        k = start + column
        value = tl.load(routed + row + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        value += share * tl.load(shared + row + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        tl.store(y + row + k, value.to(y.dtype.element_ty), mask=k < WIDTH)


@triton.jit
def _few_up_kernel(
    x, experts, weight, hidden, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """EXPERTS: 0, or how many there are: pairs with other ids are left out."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + pair).to(tl.int64)
    if EXPERTS:  # noqa: SIM102 (decided when the kernel is compiled)
        if expert >= EXPERTS:
            return
    k = tl.arange(0, BLOCK_K)
    column = tl.minimum(n, INNER - 1)
    weights = weight + expert * (INNER * WIDTH) * (2 if GATED else 1)
    weights += column[:, None] * WIDTH + k[None, :]
    inputs = x + pair // CHOSEN * WIDTH + k
    first = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        row = tl.load(inputs + start, mask=start + k < WIDTH, other=0.0).to(tl.float32)
        first += _load_weights(weights, start, WIDTH, BLOCK_K).to(tl.float32) * row[None, :]
        if GATED:
            up = _load_weights(weights + INNER * WIDTH, start, WIDTH, BLOCK_K)
            second += up.to(tl.float32) * row[None, :]
    value = activated(tl.sum(first, axis=1), ACTIVATION)
    if GATED:
        value *= tl.sum(second, axis=1)
    tl.store(hidden + pair * INNER + n, value.to(hidden.dtype.element_ty), mask=n < INNER)


@triton.jit
def _few_down_kernel(
    hidden, experts, shares, weight, y, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token's columns n: the loop over its pairs is here, so that nothing is left to sum.
    EXPERTS: as above."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    column = tl.minimum(n, WIDTH - 1)
    weights = weight + column[:, None] * INNER + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for pair in tl.static_range(CHOSEN):
        pair = token * CHOSEN + pair
        expert = tl.load(experts + pair).to(tl.int64)
        own = weights + expert * (WIDTH * INNER)
        share = tl.load(shares + pair)
        end = INNER
        if EXPERTS:
            end = tl.where(expert < EXPERTS, INNER, 0)
        for start in tl.range(0, end, BLOCK_K, num_stages=STAGES):
            inputs = hidden + pair * INNER + start + k
            row = tl.load(inputs, mask=start + k < INNER, other=0.0).to(tl.float32) * share
            total += _load_weights(own, start, INNER, BLOCK_K).to(tl.float32) * row[None, :]
    value = tl.sum(total, axis=1)
    tl.store(y + token * WIDTH + n, value.to(y.dtype.element_ty), mask=n < WIDTH)
