"""Experts with quantised weights: the ways of triton.py, whose products read codes and scales.

The weight is the left side of the products, so that 16 pairs fill a tile. Where a format rounds
inputs, products are in 8 bits; otherwise weights become 16-bit numbers in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import limited
from megatron_hybrid.kernels.experts.pairs import activated, group
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.experts.sums import PairParts
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.linear.codes import Kept
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.linear.products import (
    accumulate,
    accumulate_both,
    descriptor,
    finish,
    step_depth,
)
from megatron_hybrid.kernels.linear.triton import rows_for
from megatron_hybrid.kernels.protocols import Inputs


class Tile(NamedTuple):
    """How a program covers a product: `pairs` of inputs, `rows` of the weight, `depth` columns a
    step."""

    pairs: int
    rows: int
    depth: int
    warps: int
    stages: int


def choose_tile(pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """By how many rows an expert has on average."""
    average = pairs / num_experts
    if dtype.itemsize > 2:
        return Tile(16 if average < 32 else 64, 32, 64, 4, 2)
    if average <= 32:
        return Tile(16 if average <= 8 else 32, 64, 128, 4, 3)
    return Tile(128, 64, 128, 4, 3)


def can_mix(layer: ExpertWeights, pairs: int) -> bool:
    """Whether these kernels are for the layer's weights: in rows of 16 bytes, as descriptors have
    them, and not for many inputs in 16 bits, for which it is faster to write weights out first."""
    for weight in (layer.up, layer.down):
        if not isinstance(weight, QuantizedWeight) or weight.values.shape[-1] % 16:
            return False
        many = pairs > 32 * (weight.shape[0] + layer.elsewhere)
        if many and weight.format.activations == "none":
            return False
    return True


def mix(
    x: Inputs, experts: Tensor, weights: Tensor, layer: ExpertWeights, tile: Tile | None = None
) -> PairParts:
    """mix_parts as in Experts, of `experts` and so on as triton.mix has them."""
    up, down = layer.up, layer.down
    assert isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    (tokens, chosen), (num_experts, width, inner) = experts.shape, down.shape
    pairs, partial, dtype = tokens * chosen, layer.elsewhere > 0, x.dtype
    if tile is None:
        tile = choose_tile(pairs, num_experts + layer.elsewhere, dtype)
    order, blocks = group(experts, num_experts, tile.pairs)
    count = blocks.shape[1]
    hidden = torch.empty(pairs, inner, dtype=dtype, device=experts.device)
    tensors, depth = _Arguments.of(x, up, tile), step_depth(up.format, tile.depth)
    _up_kernel[(count * cdiv(inner, tile.rows),)](
        *tensors, hidden, order, blocks, count, width, inner,
        chosen, layer.activation, layer.gated, Kept.of(up.flat(), tensors.inputs),
        tile.pairs, tile.rows, depth, width % depth == 0, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    parts = torch.empty(pairs, width, dtype=dtype, device=experts.device)
    tensors, depth = _Arguments.of(hidden, down, tile), step_depth(down.format, tile.depth)
    _down_kernel[(count * cdiv(width, tile.rows),)](
        *tensors, weights, parts, order, blocks, count, inner, width,
        Kept.of(down.flat(), tensors.inputs),
        tile.pairs, tile.rows, depth, inner % depth == 0, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return PairParts(parts, experts, num_experts if partial else 0)


class _Arguments(NamedTuple):
    """Of both kernels: inputs as the format takes them, and the experts' weights below one
    another."""

    inputs: Tensor
    input_scale: Tensor | None
    input_row: int  # from one row's scales to the next's
    input_group: int
    weight: object  # a tensor descriptor
    scale: Tensor
    zero: Tensor | None
    row_scale: Tensor | None
    scale_row: int

    @classmethod
    def of(cls, x: Inputs, weight: QuantizedWeight, tile: Tile) -> _Arguments:
        """weight [experts, N, K]"""
        flat, format = weight.flat(), weight.format
        loaded = descriptor(flat, tile.rows, step_depth(format, tile.depth))
        scale = flat.scale
        return cls(*rows_for(x, weight), loaded, scale, flat.zero, flat.row_scale, scale.stride(0))


@triton.jit
def _block(order, blocks, num_blocks, tiles, PAIRS: tl.constexpr):
    """Of this program: expert, rows [PAIRS] of the sorted pairs, whether they are its own (after
    those the last one again), pairs."""
    block = tl.program_id(0) // tiles
    row = tl.load(blocks + num_blocks + block) + tl.arange(0, PAIRS)
    end = tl.load(blocks + 2 * num_blocks + block)
    valid = row < end
    row = tl.minimum(row, end - 1)
    return tl.load(blocks + block), row.to(tl.int64), valid, tl.load(order + row).to(tl.int64)


@triton.jit
def _is_empty(blocks, num_blocks, tiles):
    block = tl.program_id(0) // tiles
    return tl.load(blocks + num_blocks + block) >= tl.load(blocks + 2 * num_blocks + block)


@launched(do_not_specialize=["num_blocks"])
def _up_kernel(
    x, input_scale, input_row, input_group, weight, scale, zero, row_scale, scale_row,
    hidden, order, blocks, num_blocks, width, inner,
    CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, KEPT: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(inner, ROWS)
    if _is_empty(blocks, num_blocks, tiles):
        return
    expert, row, valid, pair = _block(order, blocks, num_blocks, tiles, PAIRS)
    token = pair // CHOSEN
    inputs = x + token[None, :] * width
    scales = None
    if input_scale is not None:
        scales = (input_scale + token * input_row)[None, :]
    first = tl.program_id(0) % tiles * ROWS
    n = first + tl.arange(0, ROWS)
    begin = expert * inner * (2 if GATED else 1)
    column = begin + tl.minimum(n, inner - 1)
    total = tl.zeros((ROWS, PAIRS), tl.float32)
    up = tl.zeros((ROWS, PAIRS), tl.float32)
    total, up = accumulate_both(
        total, up, weight, scale, zero, inputs, scales, input_group, valid[None, :], begin + first,
        column, inner if GATED else None, 0, width, width, scale_row, KEPT, DEPTH, EVEN, STAGES,
    )  # fmt: skip
    total = finish(total, scale, row_scale, column, scale_row, scales, valid, KEPT)
    total = activated(total, ACTIVATION)
    if GATED:
        column += inner
        up = finish(up, scale, row_scale, column, scale_row, scales, valid, KEPT)
        total *= limited(up, ACTIVATION)
    target = hidden + row[:, None] * inner + n[None, :]
    total = total.T.to(hidden.dtype.element_ty)
    tl.store(target, total, mask=valid[:, None] & (n < inner)[None, :])


@launched(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden, input_scale, input_row, input_group, weight, scale, zero, row_scale, scale_row,
    shares, parts, order, blocks, num_blocks, inner, width,
    KEPT: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(width, ROWS)
    if _is_empty(blocks, num_blocks, tiles):
        return
    expert, row, valid, pair = _block(order, blocks, num_blocks, tiles, PAIRS)
    first = tl.program_id(0) % tiles * ROWS
    n = first + tl.arange(0, ROWS)
    column = expert * width + tl.minimum(n, width - 1)
    scales = None
    if input_scale is not None:
        scales = (input_scale + row * input_row)[None, :]
    total = tl.zeros((ROWS, PAIRS), tl.float32)
    total = accumulate(
        total, weight, scale, zero, hidden + row[None, :] * inner, scales, input_group,
        valid[None, :], expert * width + first, column, 0, inner, inner, scale_row, KEPT, DEPTH,
        EVEN, STAGES,
    )  # fmt: skip
    total = finish(total, scale, row_scale, column, scale_row, scales, valid, KEPT).T
    total *= tl.load(shares + pair, mask=valid, other=0.0)[:, None]
    target = parts + pair[:, None] * width + n[None, :]
    mask = valid[:, None] & (n < width)[None, :]
    tl.store(target, total.to(parts.dtype.element_ty), mask=mask)
