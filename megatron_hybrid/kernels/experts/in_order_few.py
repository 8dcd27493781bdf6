"""The products of experts that have few rows each, with K summed in order in one accumulator:
decodes in batch-invariant mode. What counts is how fast the weights arrive.

Weights come by TMA, several steps ahead, and are the left side of the products, so that 16 rows
fill a tile of tensor cores. Of a few tokens each pair is a block by itself, and nothing is sorted;
otherwise a block has an expert's rows. Tiles change no bits, and are chosen by how many programs
they make.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_hybrid.kernels.activation.triton import activated_product, limited
from megatron_hybrid.kernels.dependent_launch import (
    ENABLED,
    OPTIONS,
    let_next_start,
    wait_for_inputs,
)
from megatron_hybrid.kernels.devices import stages_that_fit
from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS, activated, group
from megatron_hybrid.kernels.experts.protocol import ExpertWeights, SharedExpert
from megatron_hybrid.kernels.launching import cdiv, launched

MOST_ROWS = 32  # of an expert on average
_SHARED_BYTES = 110 * 1024  # of a program: two are on a multiprocessor at a time
_MOST_STAGES = 8
_ENOUGH = 120  # programs: about one a multiprocessor


class Tile(NamedTuple):
    """How a program covers weights."""

    rows: int  # of each half, where a gate is beside them
    depth: int = 128  # columns, a step
    stages: int = _MOST_STAGES  # fewer where there is no memory for them
    warps: int = 4
    # Weights are asked for, into the L2 cache, before the inputs are there: of the second product.
    weights_first: bool = True


class Tiles(NamedTuple):
    """Of both products."""

    pairs: int  # of a block
    is_sorted: bool  # by expert; otherwise a block has one pair
    up: Tile
    down: Tile


def choose_tiles(
    tokens: int, chosen: int, every: int, width: int, inner: int, gated: bool
) -> Tiles:
    """every: experts, on all ranks."""
    pairs = tokens * chosen
    blocks = min(pairs, every)  # that have rows, at most, where experts have few
    up, down = _rows(blocks, inner), _rows(blocks, width)
    # Steps of half the depth where both halves of a gated weight would leave room for few of them.
    depth = 64 if gated and up == 64 else 128
    # Of few tokens the first product's weights come no faster than it asks for them.
    is_sorted = tokens > FEW_TOKENS
    second = Tile(down, weights_first=is_sorted)
    return Tiles(16 if pairs <= 8 * every else 32, is_sorted, Tile(up, depth), second)


def _rows(blocks: int, rows: int) -> int:
    """As many as leave enough programs."""
    return next((size for size in (64, 32) if blocks * cdiv(rows, size) >= _ENOUGH), 16)


def can_mix(x: Tensor, layer: ExpertWeights, pairs: int) -> bool:
    """Whether these kernels are for such inputs."""
    up, down = layer.up, layer.down
    if not isinstance(up, Tensor) or not isinstance(down, Tensor):
        return False
    every = up.shape[0] + layer.elsewhere
    return pairs <= MOST_ROWS * every and fits(x, up, down)


def fits(x: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether they have types and places that these kernels can load."""
    if x.dtype.itemsize != 2 or any(weight.dtype != x.dtype for weight in (up, down)):
        return False
    for values in (x, up, down):  # descriptors have rows of 16 bytes
        if values.shape[-1] % 8 or values.data_ptr() % 16 or not values.is_contiguous():
            return False
    return knobs.runtime.interpret or torch.cuda.get_device_capability(x.device) >= (9, 0)


def takes_shared(x: Tensor, shared: SharedExpert) -> bool:
    """Whether `expert_parts` of inputs that it can mix may be given this MLP."""
    up, down = shared.up, shared.down
    if not isinstance(up, Tensor) or not isinstance(down, Tensor):
        return False
    return 0 < len(x) <= FEW_TOKENS and fits(x, up, down)


def expert_parts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    tiles: Tiles | None = None,
    shared: SharedExpert | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What `fits`, contiguous -> [pairs, width]: what each pair's expert makes of its token, times
    the pair's weight. Those of experts that are elsewhere are not written. And [tokens, width]:
    what the shared MLP gives, to the bit what its two products by themselves would."""
    up, down = layer.up, layer.down
    assert isinstance(up, Tensor) and isinstance(down, Tensor)
    (tokens, chosen), (num_experts, width, inner) = experts.shape, down.shape
    if tiles is None:
        every = num_experts + layer.elsewhere
        tiles = choose_tiles(tokens, chosen, every, width, inner, layer.gated)
    pairs, rows, listed = tokens * chosen, tiles.pairs, tokens * chosen
    order = blocks = None
    if tiles.is_sorted:
        order, blocks = group(experts, num_experts, rows)
        listed = blocks.shape[1]
    limit = num_experts if layer.elsewhere else 0
    own_hidden = own = own_up = own_down = None
    own_inner = 0
    if shared is not None:
        assert isinstance(shared.up, Tensor) and isinstance(shared.down, Tensor)
        own_inner = shared.down.shape[1]
        own_hidden, own = x.new_empty(tokens, own_inner), torch.empty_like(x)
        own_up = _tiles_of(shared.up, *tiles.up[:2])
        own_down = _tiles_of(shared.down, *tiles.down[:2])

    hidden = x.new_empty(pairs, inner)
    tile = tiles.up
    _up_kernel[(listed * cdiv(inner, tile.rows) + cdiv(own_inner, tile.rows),)](
        x if tiles.is_sorted else _tiles_of(x, rows, tile.depth), _tiles_of(up, *tile[:2]), hidden,
        own_up, own_hidden, experts, order, blocks, listed, tokens, chosen, width, inner, own_inner,
        layer.activation, layer.gated, limit, rows, tile.rows, tile.depth,
        _stages(tile, rows, 2 if layer.gated else 1, x), num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    parts = x.new_empty(pairs, width)
    tile = tiles.down
    across = cdiv(width, tile.rows)
    _down_kernel[(listed * across + (0 if own is None else across),)](
        _tiles_of(hidden, rows, tile.depth), _tiles_of(down, *tile[:2]), down, weights, parts,
        None if own_hidden is None else _tiles_of(own_hidden, rows, tile.depth),
        own_down, None if shared is None else shared.down, own,
        experts, order, blocks, listed, tokens, width, inner, own_inner, limit, rows, tile.rows,
        tile.depth, _stages(tile, rows, 1, x), tile.weights_first, num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    return parts, own


def _tiles_of(values: Tensor, rows: int, depth: int) -> TensorDescriptor:
    """Of so many rows and columns, of all experts' rows one below the other."""
    columns = values.shape[-1]
    return TensorDescriptor(
        values, [values.numel() // columns, columns], [columns, 1], [rows, depth]
    )


def _stages(tile: Tile, pairs: int, halves: int, x: Tensor) -> int:
    step = (pairs + halves * tile.rows) * tile.depth * x.itemsize
    most = max(2, min(tile.stages, _SHARED_BYTES // step))
    return stages_that_fit(most, step, x.device)


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@triton.jit
def _load_block(experts, blocks, num_blocks, block, EXPERTS: tl.constexpr):
    """Expert, first row, and where its rows end, of a block; without `blocks` of one pair. EXPERTS:
    0, or how many there are: a pair of another is no row."""
    if blocks is None:
        expert = tl.load(experts + block, cache_modifier=".cg").to(tl.int32)
        begin = block
        end = block + 1
        if EXPERTS:
            end = tl.where(expert < EXPERTS, end, begin)
    else:
        expert = tl.load(blocks + block)
        begin = tl.load(blocks + num_blocks + block)
        end = tl.load(blocks + 2 * num_blocks + block)
    return expert, begin, end


@triton.jit
def _load_pairs(order, row, end):
    """The pairs of a block's rows."""
    if order is None:
        return row.to(tl.int64)
    else:
        return tl.load(order + row, mask=row < end, other=0).to(tl.int64)


@triton.jit
def _shared_up(
    x, weight, hidden, tokens, first_row, WIDTH: tl.constexpr, INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS of hidden [tokens, INNER]: act(up x). x, weight: descriptors."""
    total = tl.zeros((ROWS, PAIRS), tl.float32)
    gates = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        values = x.load([0, start])
        loaded = weight.load([first_row, start])
        if GATED:
            others = weight.load([first_row + INNER, start])
            gates = tl.dot(loaded, values.T, gates)
            total = tl.dot(others, values.T, total)
        else:
            total = tl.dot(loaded, values.T, total)
    n = first_row + tl.arange(0, ROWS)
    m = tl.arange(0, PAIRS)
    kind: tl.constexpr = hidden.dtype.element_ty
    result = activated_product(gates, total, kind, ACTIVATION, GATED)
    mask = (n < INNER)[:, None] & (m < tokens)[None, :]
    tl.store(hidden + m[None, :] * INNER + n[:, None], result, mask=mask)


@launched(do_not_specialize=["num_blocks", "tokens"])
def _up_kernel(
    x, weight, hidden, own_weight, own_hidden, experts, order, blocks, num_blocks, tokens,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, OWN_INNER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden [pairs, INNER], in the order of the blocks: act(up[expert] x[token]). x: a descriptor,
    where nothing is sorted. own_...: of an MLP that all tokens go through besides, or None; the
    last programs are its."""
    wait_for_inputs()
    let_next_start()
    # All rows of an expert's weight, then the next block's: these share inputs.
    tiles: tl.constexpr = (INNER + ROWS - 1) // ROWS
    block = tl.program_id(0) // tiles
    if own_weight is not None:
        own_tile = tl.program_id(0) - num_blocks * tiles
        if own_tile >= 0:
            _shared_up(
                x, own_weight, own_hidden, tokens, own_tile * ROWS, WIDTH, OWN_INNER, ACTIVATION,
                GATED, PAIRS, ROWS, DEPTH, STAGES,
            )  # fmt: skip
            return
    first_row = tl.program_id(0) % tiles * ROWS
    expert, begin, end = _load_block(experts, blocks, num_blocks, block, EXPERTS)
    if begin >= end:
        return
    row = begin + tl.arange(0, PAIRS)
    pair = _load_pairs(order, row, end)
    k = tl.arange(0, DEPTH)
    if order is not None:
        inputs = x + (pair // CHOSEN)[:, None] * WIDTH + k[None, :]
    # Rows past the expert's are others', whose results are not stored.
    weight_row = expert * (INNER * (2 if GATED else 1)) + first_row
    first = tl.zeros((ROWS, PAIRS), tl.float32)
    second = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        if order is None:
            values = x.load([begin // CHOSEN, start])  # and the next tokens, which do not count
        elif WIDTH % DEPTH:
            mask = (row < end)[:, None] & (start + k < WIDTH)[None, :]
            values = tl.load(inputs + start, mask=mask, other=0.0)
        else:
            values = tl.load(inputs + start, mask=(row < end)[:, None], other=0.0)
        loaded = weight.load([weight_row, start])
        if GATED:
            others = weight.load([weight_row + INNER, start])
        first = tl.dot(loaded, values.T, first)
        if GATED:
            second = tl.dot(others, values.T, second)
    first = activated(first, ACTIVATION)
    if GATED:
        first *= limited(second, ACTIVATION)
    n = first_row + tl.arange(0, ROWS)
    target = hidden + row[None, :].to(tl.int64) * INNER + n[:, None]
    mask = (row < end)[None, :] & (n < INNER)[:, None]
    tl.store(target, first.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _shared_down(
    hidden, weight, asked_for, y, tokens, first_row, WIDTH: tl.constexpr, INNER: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """ROWS of y [tokens, WIDTH]: down hidden. hidden, weight: descriptors."""
    if WEIGHTS_FIRST:
        _ask_for(asked_for, first_row, WIDTH, INNER, ROWS)
    wait_for_inputs()
    let_next_start()
    total = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        total = tl.dot(weight.load([first_row, start]), hidden.load([0, start]).T, total)
    n = first_row + tl.arange(0, ROWS)
    m = tl.arange(0, PAIRS)
    mask = (n < WIDTH)[:, None] & (m < tokens)[None, :]
    tl.store(y + m[None, :] * WIDTH + n[:, None], total.to(y.dtype.element_ty), mask=mask)


@launched(do_not_specialize=["num_blocks", "tokens"])
def _down_kernel(
    hidden, weight, asked_for, shares, parts, own_hidden, own_weight, own_asked_for, own, experts,
    order, blocks, num_blocks, tokens,
    WIDTH: tl.constexpr, INNER: tl.constexpr, OWN_INNER: tl.constexpr, EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """parts [pairs, WIDTH], in the order of pairs: share * down[expert] hidden. hidden, weight:
    descriptors; asked_for: the weight. own_...: as of _up_kernel; own [tokens, WIDTH]."""
    tiles: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    block = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * ROWS
    if own_weight is not None:  # noqa: SIM102
        if block == num_blocks:
            _shared_down(
                own_hidden, own_weight, own_asked_for, own, tokens, first_row, WIDTH, OWN_INNER,
                PAIRS, ROWS, DEPTH, STAGES, WEIGHTS_FIRST,
            )  # fmt: skip
            return
    # Blocks, their order and shares were known before the kernel that this one waits for.
    expert, begin, end = _load_block(experts, blocks, num_blocks, block, EXPERTS)
    if begin >= end:
        wait_for_inputs()  # or, if all are, the next kernel would not wait for those before
        return
    row = begin + tl.arange(0, PAIRS)
    pair = _load_pairs(order, row, end)
    share = tl.load(shares + pair, mask=row < end, other=0.0)
    if WEIGHTS_FIRST:
        _ask_for(asked_for + expert.to(tl.int64) * (WIDTH * INNER), first_row, WIDTH, INNER, ROWS)
    wait_for_inputs()
    let_next_start()
    weight_row = expert * WIDTH + first_row
    total = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        values = hidden.load([begin, start])  # rows past the block's are not stored
        total = tl.dot(weight.load([weight_row, start]), values.T, total)
    total *= share[None, :]
    n = first_row + tl.arange(0, ROWS)
    target = parts + pair[None, :] * WIDTH + n[:, None]
    mask = (row < end)[None, :] & (n < WIDTH)[:, None]
    tl.store(target, total.to(parts.dtype.element_ty), mask=mask)


@triton.jit
def _ask_for(
    weight, first_row, LENGTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS of a weight [LENGTH, COLUMNS], into the L2 cache: in about as many pieces as there are
    threads. The last piece of a row may lie over the one before."""
    if ENABLED:
        pieces: tl.constexpr = max(1, 128 // ROWS)
        size: tl.constexpr = (COLUMNS // 8 + pieces - 1) // pieces * 8
        piece = tl.arange(0, ROWS * pieces)
        row = tl.minimum(first_row + piece // pieces, LENGTH - 1)
        place = weight + row * COLUMNS + tl.minimum(piece % pieces * size, COLUMNS - size)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [place.to(tl.int64), tl.full(piece.shape, size * 2, tl.int32)], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
