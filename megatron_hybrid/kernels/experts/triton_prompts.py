"""The grouped products of experts for prompts, which give an expert a hundred rows and more: what
counts is how busy tensor cores are kept.

Weights, and inputs that lie in the order of their experts, come through tensor descriptors: in bulk
copies, which cost threads no instructions. The second product has few steps a tile, so its programs
stay and walk through the tiles, and bring the next tile's first steps while they write the one
before. Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.activation.triton import limited
from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.experts.pairs import activated, group
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2

ROWS = 128  # pairs of a block
_COLUMNS = 256  # rows of weights of a tile, both halves of a gated expert's counted
_DEPTH = 64  # columns of weights, a step
# An expert's last block has any number of rows: up to so many, a tile half as high takes them.
_FEW_ROWS = 64
_OPTIONS = {"STAGES": 4, "num_warps": 8}


def can_mix(x: Tensor, layer: ExpertWeights, pairs: int) -> bool:
    """Whether these kernels are for such inputs."""
    up, down = layer.up, layer.down
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or x.dtype.itemsize != 2:
        return False
    every = up.shape[0] + layer.elsewhere
    if pairs < 96 * every or any(weight.shape[2] % 8 for weight in (up, down)):
        return False  # descriptors have rows of 16 bytes
    return knobs.runtime.interpret or torch.cuda.get_device_capability(x.device) >= (9, 0)


def expert_parts(x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """What `can_mix` allows, contiguous -> [pairs, width]: what each pair's expert makes of its
    token, times the pair's weight. Those of experts that are elsewhere are not written."""
    up, down = layer.up, layer.down
    assert isinstance(up, Tensor) and isinstance(down, Tensor)
    chosen, (num_experts, width, inner) = experts.shape[1], down.shape
    groups = group(experts, num_experts, ROWS)
    pairs, count = experts.numel(), groups.blocks.shape[1]

    hidden = x.new_empty(pairs, inner)
    columns = _COLUMNS // 2 if layer.gated else _COLUMNS
    _up_kernel[(count * cdiv(inner, columns),)](
        x, _rows_of(up, columns), hidden, groups.order, groups.blocks, count, chosen, width, inner,
        layer.activation, layer.gated, ROWS, _FEW_ROWS, columns, _DEPTH, **_OPTIONS,
    )  # fmt: skip
    parts = x.new_empty(pairs, width)
    tiles = count * cdiv(width, _COLUMNS)
    _down_kernel[(min(processors(x.device), tiles),)](
        _rows_of(hidden, ROWS), _rows_of(down, _COLUMNS), weights, parts, groups.order,
        groups.blocks, count, width, inner, next_power_of_2(count),
        ROWS, _COLUMNS, _DEPTH, **_OPTIONS,
    )  # fmt: skip
    return parts


def _rows_of(values: Tensor, rows: int) -> TensorDescriptor:
    """For tiles of so many rows and _DEPTH columns, of all experts' rows one below the other."""
    columns = values.shape[-1]
    length = values.numel() // columns
    return TensorDescriptor(values, [length, columns], [columns, 1], [rows, _DEPTH])


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@launched(do_not_specialize=["num_blocks"])
def _up_kernel(
    x, weight, hidden, order, blocks, num_blocks, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    FEW_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden [pairs, INNER], in the order of the blocks: act(up[expert] x[token])."""
    # All columns of a block, then the next block: what runs at a time shares rows and weights.
    columns: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // columns
    tile = tl.program_id(0) % columns
    begin = tl.load(blocks + num_blocks + block)
    end = tl.load(blocks + 2 * num_blocks + block)
    if begin >= end:
        return
    expert = tl.load(blocks + block)
    if end - begin <= FEW_ROWS:
        _up_tile(
            x, weight, hidden, order, expert, begin, end, tile * BLOCK_N, CHOSEN, WIDTH, INNER,
            ACTIVATION, GATED, FEW_ROWS, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        _up_tile(
            x, weight, hidden, order, expert, begin, end, tile * BLOCK_N, CHOSEN, WIDTH, INNER,
            ACTIVATION, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


@triton.jit
def _up_tile(
    x, weight, hidden, order, expert, begin, end, first_column,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = begin + tl.arange(0, ROWS)
    valid = (row < end)[:, None]
    k = tl.arange(0, BLOCK_K)
    token = tl.load(order + row, mask=row < end, other=0).to(tl.int64) // CHOSEN
    inputs = x + token[:, None] * WIDTH + k[None, :]
    # Rows past the expert's are others', whose columns are not stored.
    weight_row = expert * (INNER * (2 if GATED else 1)) + first_column
    first = tl.zeros((ROWS, BLOCK_N), tl.float32)
    second = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        if WIDTH % BLOCK_K:
            rows = tl.load(inputs + start, mask=valid & (start + k < WIDTH)[None, :], other=0.0)
        else:
            rows = tl.load(inputs + start, mask=valid, other=0.0)
        first = tl.dot(rows, tl.trans(weight.load([weight_row, start])), first)
        if GATED:
            second = tl.dot(rows, tl.trans(weight.load([weight_row + INNER, start])), second)
    first = activated(first, ACTIVATION)
    if GATED:
        first *= limited(second, ACTIVATION)
    n = first_column + tl.arange(0, BLOCK_N)
    target = hidden + row[:, None].to(tl.int64) * INNER + n[None, :]
    tl.store(target, first.to(hidden.dtype.element_ty), mask=valid & (n < INNER)[None, :])


@launched(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden, weight, shares, parts, order, blocks, num_blocks,
    WIDTH: tl.constexpr, INNER: tl.constexpr, MOST_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts [pairs, WIDTH], in the order of pairs: share * down[expert] hidden."""
    columns: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    each = tl.arange(0, MOST_BLOCKS)
    begins = tl.load(blocks + num_blocks + each, mask=each < num_blocks, other=0)
    ends = tl.load(blocks + 2 * num_blocks + each, mask=each < num_blocks, other=0)
    tiles = tl.max(tl.where(begins < ends, each + 1, 0), axis=0) * columns  # what follows is empty
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        block = tile // columns
        first_column = tile % columns * BLOCK_N
        begin = tl.load(blocks + num_blocks + block)
        end = tl.load(blocks + 2 * num_blocks + block)
        weight_row = tl.load(blocks + block) * WIDTH + first_column
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
            rows = hidden.load([begin, start])  # those past the end are not stored
            total = tl.dot(rows, tl.trans(weight.load([weight_row, start])), total)
        row = begin + tl.arange(0, BLOCK_M)
        pair = tl.load(order + row, mask=row < end, other=0).to(tl.int64)
        total *= tl.load(shares + pair, mask=row < end, other=0.0)[:, None]
        n = first_column + tl.arange(0, BLOCK_N)
        target = parts + pair[:, None] * WIDTH + n[None, :]
        valid = (row < end)[:, None] & (n < WIDTH)[None, :]
        tl.store(target, total.to(parts.dtype.element_ty), mask=valid)
