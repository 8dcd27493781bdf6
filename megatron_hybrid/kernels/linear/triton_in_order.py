"""Products of which an output's bits do not depend on how many rows there are: of a GPU in
batch-invariant mode.

Every output is one sum over k, in order, in one accumulator. For types of 16 bits tensor cores add
up 16 products at a time, and give the same sums whatever the tile is, on whichever side the weight
stands, and by either kind of instruction (tests/gpu/test_in_order_gpu.py): so tiles are chosen by
the sizes alone. float32 has one tile.

Few rows are few_rows.py's, with tiles that are not cut. For more, programs stay on their processors
and take one tile after the other; inputs, weights and outputs go by TMA. Of some hundred rows
cuBLAS has better tiles, and mostly sums in the same order, too, unless it cuts the columns: `learn`
looks for which sizes it does, of steps that are captured. Quantised weights are
quantized_in_order.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.linear import few_rows, quantized_in_order, reference
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, Weight
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.linear.triton import quantize_rows, weights_changed
from megatron_hybrid.kernels.protocols import Inputs

__all__ = ["multiply", "multiply_activated", "quantize_rows", "weights_changed"]


class Tile(NamedTuple):
    """How a program covers a product."""

    tokens: int
    rows: int  # of the weight
    depth: int
    warps: int
    stages: int
    speed: float  # of its operations, beside the fastest one's


_TILES = (
    Tile(128, 256, 64, 8, 4, 1.0),
    Tile(128, 128, 64, 4, 4, 0.85),
    Tile(64, 128, 64, 4, 5, 0.7),
    Tile(128, 64, 64, 4, 5, 0.7),
    Tile(64, 64, 64, 4, 6, 0.5),
)
_GROUP = 8  # tiles of tokens beside each other, which read the same weights
_MOST_LEARNED = 1024  # tokens
_MOST_CANCELLED = 1 << 24  # numbers of a weight

# Sizes of products that cuBLAS sums in order: tokens, rows, columns, type, whether there is a bias.
_learned: dict[tuple[int, int, int, torch.dtype, bool], bool] = {}


def learn(weights: Iterable[tuple[Tensor, bool]], token_counts: Iterable[int]) -> None:
    """Find out which products of so many tokens with such weights, with a bias or without, cuBLAS
    sums in order. Waits for the device."""
    counts = [n for n in token_counts if few_rows.LARGEST < n <= _MOST_LEARNED]
    for weight, has_bias in weights:
        rows, columns = weight.shape
        if weight.dtype.itemsize != 2 or not few_rows.fits(weight, weight):
            continue
        generator = torch.Generator(weight.device).manual_seed(0)
        for tokens in counts:
            key = tokens, rows, columns, weight.dtype, has_bias
            if key in _learned or not _is_aligned(weight):
                continue
            numbers = torch.empty(tokens * columns + rows, dtype=weight.dtype, device=weight.device)
            x, of_bias = numbers.normal_(generator=generator).split([tokens * columns, rows])
            x, bias = x.view(tokens, columns), of_bias if has_bias else None
            _learned[key] = _are_equal(x, weight, bias)
            if _learned[key] and weight.numel() <= _MOST_CANCELLED:
                of_bias.zero_()
                _learned[key] = _are_equal(x, _cancelled(x, weight, generator), bias)


def _are_equal(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.equal(F.linear(x, weight, bias), multiply_many(x, weight, bias))


def _cancelled(x: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    """A weight whose products with x would be zero if nothing was rounded: the second half of the
    columns, x's too now, takes away what the first one adds. What is left are errors, which any
    other order changes. Of numbers at random one result in ten thousand shows that, once it is
    rounded, and a small product has fewer."""
    weight = torch.empty_like(like).normal_(generator=generator)
    for values, sign in ((x, 1), (weight, -1)):
        first, second = values[:, : 2 * (values.shape[1] // 2)].chunk(2, dim=1)
        torch.mul(first, sign, out=second)
    return weight


def _is_aligned(values: Tensor) -> bool:
    """cuBLAS chooses by how inputs lie in memory."""
    return values.is_contiguous() and values.data_ptr() % 256 == 0


def choose_tile(tokens: int, rows: int, programs: int) -> Tile:
    """The one with which a processor has least to do, where as many programs run at once."""

    def cost(tile: Tile) -> float:
        tiles = cdiv(tokens, tile.tokens) * cdiv(rows, tile.rows)
        return cdiv(tiles, programs) * tile.tokens * tile.rows / tile.speed

    return min(_TILES, key=cost)


def few_tile(rows: int, processors: int) -> few_rows.Tile:
    """Of few rows of inputs, for a weight of so many rows, by what was fast on an H200."""
    if rows > 32768:
        return few_rows.Tile(128, 128, 4, is_cut=False)
    tiles = cdiv(rows, 64)
    if tiles > processors:
        return few_rows.Tile(64, 256, 6, is_chained=True)
    if 3 * tiles > 2 * processors:
        return few_rows.Tile(64, 128, 5, is_cut=False)
    return few_rows.Tile(64, 256, 6, is_cut=False)


def multiply(x: Inputs, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """As in Linear."""
    if isinstance(weight, QuantizedWeight):
        if quantized_in_order.can_multiply(weight):
            return quantized_in_order.multiply(x, weight, bias)
        return reference.multiply(x, weight, bias, linear=_in_one_tile)
    x = plain_rows(x)
    if x.dtype != weight.dtype or x.dtype == torch.float32 or not few_rows.fits(weight, weight):
        return _in_one_tile(x, weight, bias)
    if not few_rows.fits(x, weight):  # a single row is contiguous wherever it begins
        x = x.clone(memory_format=torch.contiguous_format)
    tokens, rows = x.shape[0], weight.shape[0]
    if tokens <= few_rows.LARGEST:
        return few_rows.multiply(x, weight, bias, few_tile(rows, processors(x.device)))
    key = tokens, *weight.shape, weight.dtype, bias is not None
    if _learned.get(key, False) and _is_aligned(x) and _is_aligned(weight):
        return F.linear(x, weight, bias)
    return multiply_many(x, weight, bias)


def multiply_activated(
    x: Inputs, weight: Weight, bias: Tensor | None, activation: str, gated: bool
) -> Tensor | None:
    """As in Linear."""
    if isinstance(weight, QuantizedWeight):
        return None
    x = plain_rows(x)
    if x.shape[0] > few_rows.LARGEST or not few_rows.fits(x, weight) or not x.shape[0]:
        return None
    tile = few_tile(weight.shape[0] // (2 if gated else 1), processors(x.device))
    return few_rows.multiply(x, weight, bias, tile, activation=activation, gated=gated)


def multiply_many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias in 16 bits, of rows that few_rows.fits takes."""
    (tokens, columns), rows = x.shape, weight.shape[0]
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    at_once = processors(x.device)
    tile = choose_tile(tokens, rows, at_once)
    tiles = cdiv(tokens, tile.tokens) * cdiv(rows, tile.rows)
    whole = rows % 8 == 0  # TMA writes rows of multiples of 16 bytes
    half = tile.rows // 2
    _many_rows_kernel[(min(at_once, tiles),)](
        TensorDescriptor(x, [tokens, columns], [x.stride(0), 1], [tile.tokens, tile.depth]),
        TensorDescriptor(weight, [rows, columns], [weight.stride(0), 1], [tile.rows, tile.depth]),
        TensorDescriptor(y, [tokens, rows], [rows, 1], [tile.tokens, half]) if whole else None,
        y, bias, tokens, rows, columns, min(at_once, tiles),
        tile.tokens, tile.rows, tile.depth, _GROUP, tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return y


def _in_one_tile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By float32's multiplications and additions, or of rows that TMA cannot load."""
    (tokens, columns), rows = x.shape, weight.shape[0]
    dtype = torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tokens:
        _plain_kernel[(cdiv(rows, 32), cdiv(tokens, 16))](
            x, weight, bias, y, tokens, rows, columns, *x.stride(), weight.stride(0),
            16, 32, 32, dtype == torch.float32, num_warps=4,
        )  # fmt: skip
    return y


@launched(do_not_specialize=["tokens", "programs"])
def _many_rows_kernel(
    x, weight, to_y, y, bias, tokens, rows, columns, programs,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x, weight, to_y: tensor descriptors, the last one of half a tile's rows or None."""
    down = tl.cdiv(tokens, TOKENS)
    across = tl.cdiv(rows, ROWS)
    steps = tl.cdiv(columns, DEPTH)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        group = tile // (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        within = tile % (GROUP * across)
        first_token = (group * GROUP + within % height) * TOKENS
        first_row = within // height * ROWS
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for step in tl.range(steps, num_stages=STAGES):
            a = x.load([first_token, step * DEPTH])
            b = weight.load([first_row, step * DEPTH])
            total = tl.dot(a, b.T, total)
        if bias is not None:
            n = first_row + tl.arange(0, ROWS)
            total += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
        if to_y is not None:
            halves = tl.permute(tl.reshape(total, (TOKENS, 2, ROWS // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            to_y.store([first_token, first_row], left.to(to_y.dtype))
            to_y.store([first_token, first_row + ROWS // 2], right.to(to_y.dtype))
        else:
            m = first_token + tl.arange(0, TOKENS)
            n = first_row + tl.arange(0, ROWS)
            place = y + m[:, None].to(tl.int64) * rows + n[None, :]
            mask = (m < tokens)[:, None] & (n < rows)[None, :]
            tl.store(place, total.to(y.dtype.element_ty), mask=mask)


@launched(do_not_specialize=["tokens"])
def _plain_kernel(
    x, weight, bias, y, tokens, rows, columns, x_row, x_column, weight_row,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, columns, DEPTH):
        is_there = start + k < columns
        a = tl.load(
            x + m[:, None].to(tl.int64) * x_row + (start + k)[None, :] * x_column,
            mask=(m < tokens)[:, None] & is_there[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            weight + n[None, :].to(tl.int64) * weight_row + (start + k)[:, None],
            mask=(n < rows)[None, :] & is_there[:, None], other=0.0,
        )  # fmt: skip
        if IN_FLOAT32:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
    mask = (m < tokens)[:, None] & (n < rows)[None, :]
    place = y + m[:, None].to(tl.int64) * rows + n[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=mask)
