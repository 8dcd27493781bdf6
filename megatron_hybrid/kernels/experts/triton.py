"""Experts without a loop over them and without waiting for the device, in Triton.

A pair is a token and one of the experts that its router chose; pair p belongs to token
p // chosen. Two ways:

- few tokens: each pair by itself, as products of a matrix and a vector;
- otherwise pairs are sorted by expert into blocks of rows that share an expert, and two grouped
  matrix products run over the blocks, with the weight as the left side, so that a block of 16
  rows fills a tile of tensor cores. The first one gathers its rows from x and ends with the
  activation, the second one spreads its rows back to the pairs; a token's pairs are summed last.
  An MLP that all tokens share is cut into slices of an expert's size, and each slice is one more
  expert, that every token goes to.

Sums are in float32 and in a fixed order (no atomics): the same input gives the same output.
Nothing depends on values on the host, so that every call may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import limited
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import stages_that_fit
from megatron_hybrid.kernels.experts import (
    few,
    fp4_few,
    fp4_rows,
    triton_adapted,
    triton_few,
    triton_prompts,
    triton_quantized,
)
from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS, activated, group
from megatron_hybrid.kernels.experts.protocol import (
    ExpertAdapters,
    ExpertWeights,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.experts.routing import add_norm_route as add_norm_route
from megatron_hybrid.kernels.experts.routing import route as route
from megatron_hybrid.kernels.experts.sums import PairParts
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight
from megatron_hybrid.kernels.linear.products import written_out
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.protocols import Inputs

# Of more tokens cuBLAS computes a shared MLP faster.
_MOST_SHARING = 512


class Tile(NamedTuple):
    """How a program of a product covers its weights."""

    columns: int  # rows of a weight: columns of what it gives
    depth: int  # of the inner dimension, a step
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of the grouped products."""

    rows: int  # pairs in a block
    up: Tile
    down: Tile


def choose_tiles(pairs: int, num_experts: int, gated: bool, dtype: torch.dtype) -> Tiles:
    """Tiles for grouped products, by how many rows an expert has on average."""
    average = pairs / num_experts
    if dtype.itemsize > 2:
        narrow = Tile(32, 32, warps=4, stages=2)
        return Tiles(16 if average < 32 else 64, narrow, narrow)
    if average <= 32:
        return Tiles(16 if average <= 8 else 32, Tile(64, 64, 4, 4), Tile(64, 64, 4, 3))
    if average <= 96:
        return Tiles(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))
    halves = 2 if gated else 1  # a gated tile has as many rows of the gate's weight besides
    return Tiles(128, Tile(256 // halves, 64, 8, 4), Tile(256, 64, 8, 4))


def takes_shared(x: Inputs, layer: ExpertWeights, shared: SharedExpert) -> bool:
    """As in Experts."""
    tokens = x.shape[0]
    if not isinstance(layer.up, Tensor) or not isinstance(layer.down, Tensor):
        return fp4_rows.can_mix(layer, tokens, x.dtype, shared)
    if tokens <= FEW_TOKENS:
        return tokens > 0
    return tokens <= _MOST_SHARING and shared.down.shape[1] % layer.down.shape[-1] == 0


def mix(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: Shared | None = None,
) -> Tensor:
    """As in Experts; `experts` must lie within [0, number of experts), or be that number where some
    are elsewhere."""
    mixed = mix_parts(x, experts, weights, layer, shared)
    return mixed if isinstance(mixed, Tensor) else mixed.sum()


def mix_parts(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: Shared | None = None,
) -> Tensor | PairParts:
    """As in Experts."""
    tokens, chosen = experts.shape
    plain = plain_rows(x).contiguous()
    if tokens == 0:
        return torch.empty_like(plain)
    experts, weights = experts.contiguous(), weights.contiguous()
    if fp4_rows.can_mix(layer, tokens, plain.dtype):
        if isinstance(shared, SharedExpert):
            return fp4_rows.mix(plain, experts, weights, layer, shared)
        return _with_shared(fp4_rows.mix(plain, experts, weights, layer), shared, plain)
    routed = _mix_quantized(x, experts, weights, layer)
    if routed is not None:
        return _with_shared(routed, shared, plain)
    layer = layer._replace(
        up=plain_weight(layer.up, plain.dtype), down=plain_weight(layer.down, plain.dtype)
    )
    if not isinstance(shared, SharedExpert) and triton_prompts.can_mix(
        plain, layer, tokens * chosen
    ):
        parts = triton_prompts.expert_parts(plain, experts, weights, layer)
        return _pairs(parts, experts, layer, shared, plain)
    if tokens > FEW_TOKENS:
        every = layer.up.shape[0] + layer.elsewhere
        tiles = choose_tiles(tokens * chosen, every, layer.gated, plain.dtype)
        return mix_grouped(plain, experts, weights, layer, tiles, shared)
    if isinstance(shared, SharedResult):
        return add_shared(few.mix(plain, experts, weights, layer), shared, plain)
    return few.mix(plain, experts, weights, layer, shared)


def mix_adapted(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    adapters: ExpertAdapters,
) -> Tensor:
    """As in Experts; quantised weights are written out."""
    up, down = (plain_weight(weight, plain_rows(x).dtype) for weight in (layer.up, layer.down))
    return triton_adapted.mix(x, experts, weights, layer._replace(up=up, down=down), adapters)


def _mix_quantized(
    x: Inputs, experts: Tensor, weights: Tensor, layer: ExpertWeights
) -> Tensor | PairParts | None:
    """mix_parts by kernels that read quantised weights, if these are and there is one for them."""
    if not isinstance(layer.up, QuantizedWeight) and not isinstance(layer.down, QuantizedWeight):
        return None
    pairs = experts.numel()
    if fp4_few.can_mix(layer, pairs, x.dtype):
        return fp4_few.mix(plain_rows(x).contiguous(), experts, weights, layer)
    if triton_few.can_mix(layer, experts.shape[0]):
        return triton_few.mix(x, experts, weights, layer)
    if triton_quantized.can_mix(layer, pairs):
        return triton_quantized.mix(x, experts, weights, layer)
    return None


def _with_shared(
    routed: Tensor | PairParts, shared: Shared | None, x: Tensor
) -> Tensor | PairParts:
    if shared is None:
        return routed
    assert isinstance(shared, SharedResult)
    if isinstance(routed, PairParts):
        return routed.and_shared(shared, x)
    return add_shared(routed, shared, x)


def add_shared(routed: Tensor, shared: SharedResult, x: Tensor) -> Tensor:
    """As in Experts, in float32 up to the end."""
    if shared.gate is None:
        return routed + shared.values
    if not len(x):
        return routed
    assert x.is_contiguous()  # a copy might not be there yet when the kernel reads it
    # A sum of one pair a token.
    return PairParts(routed.contiguous()).and_shared(shared, x).sum()


def plain_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """What weights are, in 16 or 32 bits."""
    return weight if isinstance(weight, Tensor) else written_out(weight, dtype)


def mix_grouped(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    tiles: Tiles,
    shared: Shared | None = None,
) -> PairParts:
    """mix_parts, with pairs sorted by expert."""
    (tokens, chosen), (num_experts, width, inner) = experts.shape, layer.down.shape
    groups = group(experts, num_experts, tiles.rows)
    up, down, slices = None, None, 0
    if isinstance(shared, SharedExpert):
        up, down = shared.up, shared.down
        slices = down.shape[1] // inner
    # Each slice's rows, one a token, are behind the pairs; its blocks are before those of groups.
    pairs, listed = tokens * chosen, groups.blocks.shape[1]
    rows = pairs + slices * tokens
    blocks = listed + slices * cdiv(tokens, tiles.rows)
    # act(up[e] x[t]) of every pair, in the order of `groups`.
    hidden = x.new_empty(rows, inner)
    _up_kernel[(blocks * cdiv(inner, tiles.up.columns),)](
        x, layer.up, up, hidden, groups.order, groups.blocks, listed, tokens, slices,
        chosen, width, inner, layer.activation, layer.gated, tiles.rows,
        **_options(tiles.up, tiles.rows, 2 if layer.gated else 1, x), **OPTIONS,
    )  # fmt: skip
    # weight * down[e] hidden of every pair, in the order of pairs.
    parts = x.new_empty(rows, width)
    _down_kernel[(blocks * cdiv(width, tiles.down.columns),)](
        hidden, layer.down, down, weights, parts, groups.order, groups.blocks, listed, tokens,
        slices, chosen, width, inner, tiles.rows, **_options(tiles.down, tiles.rows, 1, x),
        **OPTIONS,
    )  # fmt: skip
    return _pairs(parts, experts, layer, shared, x)


def _pairs(
    parts: Tensor, experts: Tensor, layer: ExpertWeights, shared: Shared | None, x: Tensor
) -> PairParts:
    """parts [pairs, width], and behind them those of a shared MLP that was cut into experts."""
    pairs = PairParts(parts, experts, layer.down.shape[0] if layer.elsewhere else 0)
    if shared is None:
        return pairs
    if isinstance(shared, SharedResult):
        return pairs.and_shared(shared, x)
    beside = parts[experts.numel() :].view(-1, *x.shape)
    return pairs._replace(beside=beside, x=x, gate=shared.gate)


def _options(tile: Tile, rows: int, halves: int, x: Tensor) -> dict[str, Any]:
    step = (rows + halves * tile.columns) * tile.depth * x.itemsize
    return {
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "STAGES": stages_that_fit(tile.stages, step, x.device),
        "num_warps": tile.warps,
    }


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


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


@triton.jit
def _load_block(
    blocks, num_blocks, tokens, block, SLICES: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Expert, first row, and where its rows end, of a block; of the shared MLP's slice i the expert
    is -1 - i."""
    each = tl.cdiv(tokens, BLOCK_M)
    listed = block
    if SLICES:
        listed = tl.maximum(block - SLICES * each, 0)
    expert = tl.load(blocks + listed)
    begin = tl.load(blocks + num_blocks + listed)
    end = tl.load(blocks + 2 * num_blocks + listed)
    if SLICES:
        part = block // each
        is_shared = part < SLICES
        first = (block - part * each) * BLOCK_M
        before = (CHOSEN + part) * tokens  # rows
        expert = tl.where(is_shared, -1 - part, expert)
        begin = tl.where(is_shared, before + first, begin)
        end = tl.where(is_shared, before + tokens, end)
    return expert.to(tl.int64), begin, end


@triton.jit
def _load_pairs(order, row, end, expert, SLICES: tl.constexpr):
    """The pairs of a block's rows: of a shared MLP's slice the rows themselves."""
    pair = tl.load(order + row, mask=row < _listed_end(expert, end, SLICES), other=0)
    if SLICES:
        pair = tl.where(expert < 0, row, pair)
    return pair.to(tl.int64)


@triton.jit
def _listed_end(expert, end, SLICES: tl.constexpr):
    """The end of a block's rows that are in the order of pairs."""
    if SLICES:
        end = tl.where(expert < 0, 0, end)
    return end


@launched(do_not_specialize=["num_blocks", "tokens"])
def _up_kernel(
    x, weight, shared, hidden, order, blocks, num_blocks, tokens, SLICES: tl.constexpr,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """SLICES: of the shared MLP, each as large as an expert; 0: there is none."""
    wait_for_inputs()
    # All columns of a block, then the next block: what runs at a time shares rows and weights.
    block = tl.program_id(0) // tl.cdiv(INNER, BLOCK_N)
    n = tl.program_id(0) % tl.cdiv(INNER, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, begin, end = _load_block(blocks, num_blocks, tokens, block, SLICES, CHOSEN, BLOCK_M)
    if begin >= end:
        return
    row = begin + tl.arange(0, BLOCK_M)
    valid = (row < end)[:, None]
    pair = _load_pairs(order, row, end, expert, SLICES)
    token = pair // CHOSEN
    weights = weight + expert * (INNER * WIDTH) * (2 if GATED else 1)
    half = INNER * WIDTH  # from the gate's rows to the others
    if SLICES:
        token = tl.where(expert < 0, pair - (CHOSEN - 1 - expert) * tokens, token)
        if expert < 0:
            weights = shared + (-1 - expert) * (INNER * WIDTH)
        half = tl.where(expert < 0, SLICES * INNER * WIDTH, INNER * WIDTH)
    k = tl.arange(0, BLOCK_K)
    inputs = x + token[:, None] * WIDTH + k[None, :]
    # Columns past the end repeat the last one; they are computed but not stored.
    column = tl.minimum(n, INNER - 1)
    weights += column[:, None] * WIDTH + k[None, :]
    first = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GATED:
        second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            rows = tl.trans(_load(inputs, valid, start, WIDTH, BLOCK_K))
            gate = _load_weights(weights, start, WIDTH, BLOCK_K)
            up = _load_weights(weights + half, start, WIDTH, BLOCK_K)
            first = tl.dot(gate, rows, first, input_precision="ieee")
            second = tl.dot(up, rows, second, input_precision="ieee")
        first = activated(first, ACTIVATION) * limited(second, ACTIVATION)
    else:
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            rows = tl.trans(_load(inputs, valid, start, WIDTH, BLOCK_K))
            up = _load_weights(weights, start, WIDTH, BLOCK_K)
            first = tl.dot(up, rows, first, input_precision="ieee")
        first = activated(first, ACTIVATION)
    let_next_start()
    target = hidden + row[None, :].to(tl.int64) * INNER + n[:, None]
    valid = (row < end)[None, :] & (n < INNER)[:, None]
    tl.store(target, first.to(hidden.dtype.element_ty), mask=valid)


@launched(do_not_specialize=["num_blocks", "tokens"])
def _down_kernel(
    hidden, weight, shared, shares, parts, order, blocks, num_blocks, tokens, SLICES: tl.constexpr,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SLICES: as above."""
    block = tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_N)
    n = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Blocks, their order and weights were known before the kernel that this one waits for.
    expert, begin, end = _load_block(blocks, num_blocks, tokens, block, SLICES, CHOSEN, BLOCK_M)
    if begin >= end:
        wait_for_inputs()  # or, if all are, the next kernel would not wait for those before
        return
    row = begin + tl.arange(0, BLOCK_M)
    valid = (row < end)[:, None]
    pair = _load_pairs(order, row, end, expert, SLICES)
    # What a slice gives counts once.
    share = tl.load(shares + pair, mask=row < _listed_end(expert, end, SLICES), other=1.0)
    weights = weight + expert * (WIDTH * INNER)
    length = INNER  # of the weight's rows
    if SLICES:
        if expert < 0:
            weights = shared + (-1 - expert) * INNER
        length = tl.where(expert < 0, SLICES * INNER, INNER)
    k = tl.arange(0, BLOCK_K)
    inputs = hidden + row[:, None].to(tl.int64) * INNER + k[None, :]
    column = tl.minimum(n, WIDTH - 1)
    weights += column[:, None] * length + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_inputs()
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        rows = tl.trans(_load(inputs, valid, start, INNER, BLOCK_K))
        down = _load_weights(weights, start, INNER, BLOCK_K)
        total = tl.dot(down, rows, total, input_precision="ieee")
    let_next_start()
    total *= share[None, :]
    target = parts + pair[None, :] * WIDTH + n[:, None]
    valid = (row < end)[None, :] & (n < WIDTH)[:, None]
    tl.store(target, total.to(parts.dtype.element_ty), mask=valid)
