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

from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS, activated, group, sum_pairs
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.kernels.linear.products import Kept, accumulate, descriptor, finish, step_depth
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.linear.triton import quantize_rows
from megatron_hybrid.kernels.protocols import ExpertWeights, Inputs, QuantizedRows


class Tile(NamedTuple):
    """How a program covers a product: `pairs` of inputs, `rows` of the weight, `depth` columns a
    step."""

    pairs: int
    rows: int
    depth: int
    warps: int
    stages: int


def choose_tile(pairs: int, num_experts: int, format: WeightFormat, dtype: torch.dtype) -> Tile:
    """By how many rows an expert has on average."""
    average = pairs / num_experts
    if dtype.itemsize > 2:
        return Tile(16 if average < 32 else 64, 32, 64, 4, 2)
    if average <= 32:
        few_rows = format.bits == 4 and pairs <= num_experts // 4
        return Tile(16 if average <= 8 else 32, 32 if few_rows else 64, 128, 4, 3)
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
) -> Tensor:
    """As in Experts, of `experts` and so on as triton.mix has them."""
    up, down = layer.up, layer.down
    assert isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    (tokens, chosen), (num_experts, width, inner) = experts.shape, down.shape
    pairs, partial, dtype = tokens * chosen, layer.elsewhere > 0, x.dtype
    if tile is None:
        tile = choose_tile(pairs, num_experts + layer.elsewhere, up.format, dtype)
    # Of few tokens each pair is a block of its own.
    single = tokens <= FEW_TOKENS
    order = blocks = experts
    count = pairs
    if not single:
        order, blocks = group(experts, num_experts, tile.pairs, partial)
        count = blocks.shape[1]
    limit = num_experts if partial else 0
    hidden = torch.empty(pairs, inner, dtype=dtype, device=experts.device)
    tensors, depth = _Arguments.of(x, up, tile), step_depth(up.format, tile.depth)
    _up_kernel[(count * triton.cdiv(inner, tile.rows),)](
        *tensors, hidden, order, blocks, count, width, inner,
        chosen, layer.activation, layer.gated, single, limit, Kept.of(up.flat(), tensors.inputs),
        tile.pairs, tile.rows, depth, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    parts = torch.empty(pairs, width, dtype=dtype, device=experts.device)
    tensors, depth = _Arguments.of(hidden, down, tile), step_depth(down.format, tile.depth)
    _down_kernel[(count * triton.cdiv(width, tile.rows),)](
        *tensors, weights, parts, order, blocks, count, inner, width,
        single, limit, Kept.of(down.flat(), tensors.inputs),
        tile.pairs, tile.rows, depth, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return sum_pairs(parts, experts, limit)


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
        rows: tuple[Tensor, Tensor | None, int, int]
        if format.activations == "none":
            rows = plain_rows(x).contiguous(), None, 0, 0
        else:
            taken = x
            if isinstance(x, Tensor) or not _fits(x, weight):
                taken = quantize_rows(plain_rows(x), format, weight.input_scale)
            assert not isinstance(taken, Tensor)
            rows = taken.values, taken.scale, *taken.scale.stride()
        loaded = descriptor(flat, tile.rows, step_depth(format, tile.depth))
        scale = flat.scale
        return cls(*rows, loaded, scale, flat.zero, flat.row_scale, scale.stride(0))


def _fits(x: QuantizedRows, weight: QuantizedWeight) -> bool:
    """Whether rows were rounded for this format: a constant scale is each layer's own."""
    format = weight.format
    groups = 1
    if format.activations == "group" and format.columns is not None:
        groups = -(-weight.shape[-1] // format.columns)
    alike = x.values.dtype == weight.values.dtype and x.scale.shape[1] == groups
    return alike and format.activations != "tensor"


@triton.jit
def _block(order, blocks, num_blocks, tiles, SINGLE: tl.constexpr, PAIRS: tl.constexpr):
    """Of this program: expert, rows [PAIRS] of the sorted pairs, whether they are there, pairs."""
    block = tl.program_id(0) // tiles
    if SINGLE:
        expert = tl.load(blocks + block)
        row = block + tl.arange(0, PAIRS)
        valid = tl.arange(0, PAIRS) < 1
        pair = row
    else:
        expert = tl.load(blocks + block)
        row = tl.load(blocks + num_blocks + block) + tl.arange(0, PAIRS)
        valid = row < tl.load(blocks + 2 * num_blocks + block)
        pair = tl.load(order + row, mask=valid, other=0)
    return expert.to(tl.int32), row.to(tl.int64), valid, pair.to(tl.int64)


@triton.jit
def _is_empty(blocks, num_blocks, tiles, SINGLE: tl.constexpr, EXPERTS: tl.constexpr):
    """EXPERTS: 0, or how many there are: single pairs with other ids are left out."""
    block = tl.program_id(0) // tiles
    if SINGLE:
        empty = EXPERTS != 0 and tl.load(blocks + block) >= EXPERTS
    else:
        begin = tl.load(blocks + num_blocks + block)
        empty = begin >= tl.load(blocks + 2 * num_blocks + block)
    return empty


@triton.jit(do_not_specialize=["num_blocks"])
def _up_kernel(
    x, input_scale, input_row, input_group, weight, scale, zero, row_scale, scale_row,
    hidden, order, blocks, num_blocks, width, inner,
    CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, SINGLE: tl.constexpr,
    EXPERTS: tl.constexpr, KEPT: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(inner, ROWS)
    if _is_empty(blocks, num_blocks, tiles, SINGLE, EXPERTS):
        return
    expert, row, valid, pair = _block(order, blocks, num_blocks, tiles, SINGLE, PAIRS)
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
    total = accumulate(
        total, weight, scale, zero, inputs, scales, input_group, valid[None, :], begin + first,
        column, width, scale_row, KEPT, DEPTH, STAGES,
    )  # fmt: skip
    total = finish(total, scale, row_scale, column, scale_row, scales, input_group, valid, KEPT)
    total = activated(total, ACTIVATION)
    if GATED:
        up = tl.zeros((ROWS, PAIRS), tl.float32)
        up = accumulate(
            up, weight, scale, zero, inputs, scales, input_group, valid[None, :],
            begin + inner + first, column + inner, width, scale_row, KEPT, DEPTH, STAGES,
        )  # fmt: skip
        column += inner
        total *= finish(up, scale, row_scale, column, scale_row, scales, input_group, valid, KEPT)
    target = hidden + row[:, None] * inner + n[None, :]
    total = total.T.to(hidden.dtype.element_ty)
    tl.store(target, total, mask=valid[:, None] & (n < inner)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden, input_scale, input_row, input_group, weight, scale, zero, row_scale, scale_row,
    shares, parts, order, blocks, num_blocks, inner, width,
    SINGLE: tl.constexpr, EXPERTS: tl.constexpr, KEPT: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(width, ROWS)
    if _is_empty(blocks, num_blocks, tiles, SINGLE, EXPERTS):
        return
    expert, row, valid, pair = _block(order, blocks, num_blocks, tiles, SINGLE, PAIRS)
    first = tl.program_id(0) % tiles * ROWS
    n = first + tl.arange(0, ROWS)
    column = expert * width + tl.minimum(n, width - 1)
    scales = None
    if input_scale is not None:
        scales = (input_scale + row * input_row)[None, :]
    total = tl.zeros((ROWS, PAIRS), tl.float32)
    total = accumulate(
        total, weight, scale, zero, hidden + row[None, :] * inner, scales, input_group,
        valid[None, :], expert * width + first, column, inner, scale_row, KEPT, DEPTH, STAGES,
    )  # fmt: skip
    total = finish(total, scale, row_scale, column, scale_row, scales, input_group, valid, KEPT).T
    total *= tl.load(shares + pair, mask=valid, other=0.0)[:, None]
    target = parts + pair[:, None] * width + n[None, :]
    mask = valid[:, None] & (n < width)[None, :]
    tl.store(target, total.to(parts.dtype.element_ty), mask=mask)
