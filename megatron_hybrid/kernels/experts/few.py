"""Experts with weights in 16 or 32 bits for few tokens: each pair of a token and one of its experts
by itself, as products of matrices and a vector, and the MLP that all tokens share beside them.

What counts is how fast the weights arrive. A program has few rows, and asks for many columns of
them before it multiplies the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import limited
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts.pairs import activated
from megatron_hybrid.kernels.experts.protocol import ExpertWeights, SharedExpert
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.one_row import add_products, load_columns


class Tile(NamedTuple):
    """How a program covers weights."""

    rows: int  # of each half, where a gate is beside them
    depth: int  # columns, a step
    steps: int  # whose weights are on their way at a time
    warps: int = 4


class Tiles(NamedTuple):
    """Of both products."""

    up: Tile
    down: Tile


def choose_tiles(gated: bool, columns: int) -> Tiles:
    """columns: that a row of the second product has, of all experts of a token and what is shared.
    By what was fast on an H100, in a CUDA graph over the weights of several layers."""
    up = Tile(1, 512, 6, warps=2) if gated else Tile(2, 1024, 3)
    # A warp has a row, where a row is short.
    return Tiles(up, Tile(4, 256, 18) if columns <= 8192 else Tile(2, 512, 9))


def mix(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: SharedExpert | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As in Experts, of contiguous tensors."""
    (tokens, chosen), (num_experts, width, inner) = experts.shape, layer.down.shape
    limit = num_experts if layer.elsewhere else 0
    hidden = x.new_empty(tokens, chosen, inner)
    y = x.new_empty(tokens, width)
    beside = 0 if shared is None else shared.down.shape[1]
    if tiles is None:
        tiles = choose_tiles(layer.gated, chosen * inner + beside)
    up_tile, down_tile = tiles
    routed, more = chosen * cdiv(inner, up_tile.rows), 0
    up = down = gate = shared_hidden = share = None
    if shared is not None:
        up, down, gate = shared.up, shared.down, shared.gate
        shared_hidden = x.new_empty(tokens, beside)
        more = cdiv(beside, up_tile.rows)
        if gate is not None:
            share = torch.empty(tokens, dtype=torch.float32, device=x.device)
            more += 1
    _up_kernel[(routed + more, tokens)](
        x, experts, layer.up, hidden, up, shared_hidden, gate, share, width, inner, beside,
        chosen, layer.activation, layer.gated, limit, up_tile.rows,
        min(up_tile.depth, next_power_of_2(width)), up_tile.steps, num_warps=up_tile.warps,
        **OPTIONS,
    )  # fmt: skip
    _down_kernel[(cdiv(width, down_tile.rows), tokens)](
        hidden, experts, weights, layer.down, shared_hidden, down, share, y, width, inner, beside,
        chosen, limit, down_tile.rows, min(down_tile.depth, next_power_of_2(inner)),
        down_tile.steps, num_warps=down_tile.warps, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _up_kernel(
    x, experts, weight, hidden, shared, shared_hidden, gate, share,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BESIDE: tl.constexpr, CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A token's programs: those of its experts, of the shared MLP, and one for the share of that.
    EXPERTS: 0, or how many there are: pairs with other ids are left out."""
    wait_for_inputs()
    let_next_start()
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    x += token * WIDTH
    blocks: tl.constexpr = (INNER + ROWS - 1) // ROWS
    columns, size = WIDTH, INNER
    target = hidden + token * CHOSEN * INNER
    if program < CHOSEN * blocks:
        pair = program // blocks
        expert = tl.load(experts + token * CHOSEN + pair).to(tl.int64)
        if EXPERTS:
            columns = tl.where(expert < EXPERTS, columns, 0)
            expert = tl.where(expert < EXPERTS, expert, 0)
        weight += expert * INNER * (WIDTH * (2 if GATED else 1))
        target += pair * INNER
        n = (program - pair * blocks) * ROWS + tl.arange(0, ROWS)
    else:
        n = (program - CHOSEN * blocks) * ROWS + tl.arange(0, ROWS)
        if shared is not None:
            weight = shared
            size = BESIDE
            target = shared_hidden + token * BESIDE
            if gate is not None:
                # Its one row is a program's, behind those of the MLP.
                is_gate = program == tl.num_programs(0) - 1
                sums = tl.zeros((1, DEPTH), tl.float32)
                rows = gate + tl.zeros((1, 1), tl.int64)
                end = tl.where(is_gate, WIDTH, 0)
                of_gate = load_columns(rows, 0, end, DEPTH)
                sums = add_products(sums, of_gate, rows, x, end, DEPTH)
                of_token = tl.sigmoid(tl.sum(sums, axis=1))
                place = tl.arange(0, 1)
                tl.store(share + token + place, of_token, mask=place < tl.where(is_gate, 1, 0))
                columns = tl.where(is_gate, 0, columns)
                size = tl.where(is_gate, 0, size)
    row = tl.minimum(n, size - 1).to(tl.int64)[:, None]
    rows = weight + row * WIDTH
    same = x + row * 0  # the inputs of every row, so that each thread loads what it multiplies
    first = tl.zeros((ROWS, DEPTH), tl.float32)
    second = tl.zeros((ROWS, DEPTH), tl.float32)
    for begin in tl.static_range(0, WIDTH, STEPS * DEPTH):
        loaded, others = (), ()
        for step in tl.static_range(STEPS):
            if begin + step * DEPTH < WIDTH:
                loaded = loaded + (load_columns(rows, begin + step * DEPTH, columns, DEPTH),)
                if GATED:
                    other = load_columns(rows + size * WIDTH, begin + step * DEPTH, columns, DEPTH)
                    others = others + (other,)
        for step in tl.static_range(STEPS):
            if begin + step * DEPTH < WIDTH:
                inputs = load_columns(same, begin + step * DEPTH, columns, DEPTH).to(tl.float32)
                first += loaded[step].to(tl.float32) * inputs
                if GATED:
                    second += others[step].to(tl.float32) * inputs
    value = activated(tl.sum(first, axis=1), ACTIVATION)
    if GATED:
        value *= limited(tl.sum(second, axis=1), ACTIVATION)
    tl.store(target + n, value.to(hidden.dtype.element_ty), mask=n < size)


@launched
def _down_kernel(
    hidden, experts, shares, weight, shared_hidden, shared, share, y,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BESIDE: tl.constexpr, CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One token's columns n of all its experts and the shared MLP, so that nothing is left to sum.
    EXPERTS: as above."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    row = tl.minimum(n, WIDTH - 1).to(tl.int64)[:, None]
    # Which experts they are was known before the kernel that this one waits for, and so the first
    # weights are asked for before that has ended.
    numbers = ()
    for pair in tl.static_range(CHOSEN):
        number = tl.load(experts + token * CHOSEN + pair, cache_modifier=".cg").to(tl.int64)
        numbers = numbers + (number,)
    # The steps of all experts one after the other, and those of the shared MLP behind them.
    each: tl.constexpr = (INNER + DEPTH - 1) // DEPTH
    routed: tl.constexpr = CHOSEN * each
    steps: tl.constexpr = routed + (BESIDE + DEPTH - 1) // DEPTH
    loaded = _load_steps(
        weight, shared, numbers, row, 0, steps, routed, each, WIDTH, INNER, BESIDE, EXPERTS, DEPTH,
        STEPS,
    )  # fmt: skip
    wait_for_inputs()
    let_next_start()
    of_shared = 1.0
    if share is not None:
        of_shared = tl.load(share + token)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for begin in tl.static_range(0, steps, STEPS):
        following = _load_steps(
            weight, shared, numbers, row, begin + STEPS, steps, routed, each, WIDTH, INNER, BESIDE,
            EXPERTS, DEPTH, STEPS,
        )  # fmt: skip
        for i in tl.static_range(STEPS):
            if begin + i < routed:
                of_pair = token * CHOSEN + (begin + i) // each
                end = _end(numbers[(begin + i) // each], INNER, EXPERTS)
                same = hidden + of_pair * INNER + row * 0
                inputs = load_columns(same, (begin + i) % each * DEPTH, end, DEPTH)
                factor = tl.load(shares + of_pair)
                total += loaded[i].to(tl.float32) * (inputs.to(tl.float32) * factor)
            elif begin + i < steps:
                same = shared_hidden + token * BESIDE + row * 0
                inputs = load_columns(same, (begin + i - routed) * DEPTH, BESIDE, DEPTH)
                total += loaded[i].to(tl.float32) * (inputs.to(tl.float32) * of_shared)
        loaded = following
    value = tl.sum(total, axis=1)
    tl.store(y + token * WIDTH + n, value.to(y.dtype.element_ty), mask=n < WIDTH)


@triton.jit
def _end(number, INNER: tl.constexpr, EXPERTS: tl.constexpr):
    """Where the columns of an expert's weights end: there are none of one that is elsewhere."""
    if EXPERTS:
        return tl.where(number < EXPERTS, INNER, 0)
    else:
        return INNER


@triton.jit
def _load_steps(
    weight, shared, numbers, row, begin: tl.constexpr, steps: tl.constexpr, routed: tl.constexpr,
    each: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, BESIDE: tl.constexpr,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The weights [ROWS, DEPTH] of so many steps from `begin` on."""
    loaded = ()
    for i in tl.static_range(STEPS):
        if begin + i < routed:
            number = numbers[(begin + i) // each]
            rows = weight + (number * WIDTH + row) * INNER
            end = _end(number, INNER, EXPERTS)
            loaded = loaded + (load_columns(rows, (begin + i) % each * DEPTH, end, DEPTH),)
        elif begin + i < steps:
            rows = shared + row * BESIDE
            loaded = loaded + (load_columns(rows, (begin + i - routed) * DEPTH, BESIDE, DEPTH),)
    return loaded
