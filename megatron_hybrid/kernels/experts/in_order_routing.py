"""Routers of which a token's bits are its own: one order of sums, and one way to choose, for any
number of tokens.

Scores are products of tensor cores in the order of the columns in one accumulator, whose bits no
tile changes; so tiles are chosen by how many tokens there are. One warp chooses for a token, or
several where nothing that they sum up depends on it: in the one kernel that makes the norm before
the router, too, for very few tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import stages_that_fit
from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.choices import (
    can_choose,
    choice_arguments,
    empty_choice,
    empty_logits,
    is_alone,
    store_choice,
)
from megatron_hybrid.kernels.experts.protocol import NormedRoutes, Router
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2, triton_type
from megatron_hybrid.kernels.linear.few_rows import ask_for, together
from megatron_hybrid.kernels.linear.products import counters
from megatron_hybrid.kernels.norm.triton import add_and_norm, warps_for


class Tile(NamedTuple):
    """What a program of the scores has."""

    tokens: int
    rows: int  # of the router's weight
    depth: int  # columns, a step
    stages: int
    warps: int = 4


_MOST_NORMED = 4  # tokens whose norm every program makes

_IN_FLOAT32 = Tile(16, 16, 32, 2)  # of any number of tokens: here tiles might change bits


def choose_tile(tokens: int, in_16_bits: bool) -> Tile:
    """Of few tokens what counts is how soon all of the weight is asked for."""
    if not in_16_bits:
        return _IN_FLOAT32
    if tokens <= 128:
        return Tile(16, 16, 256, 8)
    if tokens <= 1024:
        return Tile(64, 16, 128, 8)
    return Tile(64, 32, 128, 4) if tokens <= 4096 else Tile(128, 64, 64, 4)


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """As in Experts."""
    return choose(scores(x, router), router)


def scores(x: Tensor, router: Router, tile: Tile | None = None) -> Tensor:
    """x [tokens, width] -> logits [tokens, experts]: in x's dtype for "softmax", otherwise in
    float32."""
    weight, (tokens, width) = router.weight, x.shape
    num_experts = len(weight)
    in_16_bits = x.dtype == weight.dtype and x.dtype.itemsize == 2
    if tile is None:
        tile = choose_tile(tokens, in_16_bits)
    logits = empty_logits(x, router)
    size = 2 if in_16_bits else 4
    step = (tile.tokens + tile.rows) * tile.depth * size
    if tokens:
        _scores_kernel[(cdiv(num_experts, tile.rows), cdiv(tokens, tile.tokens))](
            x.contiguous(), weight, logits, tokens, width, num_experts, tile.tokens, tile.rows,
            tile.depth, stages_that_fit(tile.stages, step, x.device),
            triton_type(x.dtype if in_16_bits else torch.float32), num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
    return logits


def add_norm_route(
    x: Tensor,
    residual: Tensor,
    multiplier: float,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    router: Router,
) -> NormedRoutes | None:
    """As in Experts, with the bits of the kernels apart. The sum is a tensor of its own: programs
    may still read the residual."""
    (tokens, width), num_experts = x.shape, len(router.weight)
    if not 0 < tokens <= _MOST_NORMED or not (can_choose(router) and is_alone(router)):
        return None
    if not (x.dtype == dtype == router.weight.dtype and dtype.itemsize == 2 and width % 8 == 0):
        return None
    if router.scoring == "softmax" and not router.normalize:  # a sum over all experts
        return None
    tile, block = choose_tile(tokens, True), next_power_of_2(width)
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    logits = empty_logits(x, router)
    experts, weights = empty_choice(logits, router)
    step = (tile.tokens + tile.rows) * tile.depth * dtype.itemsize
    _norm_route_kernel[(cdiv(num_experts, tile.rows),)](
        x, residual, weight, normed, total, router.weight, logits, counters(x.device),
        *choice_arguments(router, experts, weights), tokens, x.stride(0), residual.stride(0),
        multiplier, eps, width, tile.tokens, tile.rows, tile.depth,
        stages_that_fit(tile.stages, step, x.device), block,
        # With another number the norm's kernel sums up in another order.
        num_warps=warps_for(block), **OPTIONS,
    )  # fmt: skip
    return NormedRoutes(normed, total, (experts, weights))


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """`route` from the logits [tokens, experts] on."""
    if not can_choose(router):
        return reference.choose(logits, router)  # row by row, too
    experts, weights = empty_choice(logits, router)
    if len(logits):
        _choose_kernel[(len(logits),)](
            logits.contiguous(),
            *choice_arguments(router, experts, weights),
            router.scale,
            router.sinks,
            num_warps=1,
            **OPTIONS,
        )
    return experts, weights


@launched(do_not_specialize=["tokens"])
def _scores_kernel(
    x, weight, logits, tokens, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """KIND: of the numbers that are multiplied."""
    wait_for_inputs()
    let_next_start()
    _store_scores(
        x, weight, logits, tl.program_id(1) * TOKENS, tokens, WIDTH, EXPERTS, TOKENS, ROWS, DEPTH,
        STAGES, KIND,
    )  # fmt: skip


@triton.jit
def _store_scores(
    x, weight, logits, first, tokens, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Of TOKENS tokens from the first on, and this program's experts."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = first + tl.arange(0, TOKENS)
    k = tl.arange(0, DEPTH)
    is_there = (token < tokens)[:, None]
    inputs = x + token.to(tl.int64)[:, None] * WIDTH + k[None, :]
    # Experts past the end repeat the last one; they are computed but not stored.
    rows = weight + tl.minimum(n, EXPERTS - 1)[:, None] * WIDTH + k[None, :]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        if WIDTH % DEPTH:
            within = (start + k < WIDTH)[None, :]
            values = tl.load(inputs + start, mask=is_there & within, other=0.0)
            numbers = tl.load(rows + start, mask=within, other=0.0)
        else:
            values = tl.load(inputs + start, mask=is_there, other=0.0)
            numbers = tl.load(rows + start)
        total = tl.dot(values.to(KIND), tl.trans(numbers.to(KIND)), total, input_precision="ieee")
    target = logits + token.to(tl.int64)[:, None] * EXPERTS + n[None, :]
    tl.store(target, total.to(logits.dtype.element_ty), mask=is_there & (n < EXPERTS)[None, :])


@launched(do_not_specialize=["tokens"])
def _norm_route_kernel(
    x, residual, norm, normed, sums, weight, logits, counter, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr, tokens, x_row, residual_row, multiplier, norm_eps,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm's add_rms_norm to sums and normed, by every program alike; the scores of ROWS experts;
    and, by the last program, the choice."""
    n = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), EXPERTS - 1)
    ask_for(weight + n.to(tl.int64) * WIDTH, WIDTH)
    biases = None
    if bias is not None:
        number = tl.arange(0, BLOCK_E)
        biases = tl.load(bias + number, mask=number < EXPERTS, other=0.0)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < WIDTH
    factors = tl.load(norm + column, mask=mask, other=0)
    wait_for_inputs()
    let_next_start()
    for i in range(tokens):
        token = tl.cast(i, tl.int64)
        inputs = tl.load(x + token * x_row + column, mask=mask, other=0).to(tl.float32)
        carried = tl.load(residual + token * residual_row + column, mask=mask, other=0)
        total, scaled = add_and_norm(inputs, carried, factors, multiplier, WIDTH, norm_eps)
        # All programs write the same, and read what they wrote themselves.
        tl.store(sums + token * WIDTH + column, total, mask=mask)
        tl.store(normed + token * WIDTH + column, scaled, mask=mask)
    together()
    _store_scores(
        normed, weight, logits, 0, tokens, WIDTH, EXPERTS, TOKENS, ROWS, DEPTH, STAGES,
        normed.dtype.element_ty,
    )  # fmt: skip
    together()
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        for i in range(tokens):
            store_choice(
                logits, biases, experts, weights, tl.cast(i, tl.int64), eps, factor, SCORING,
                NORMALIZE, EXPERTS, CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C,
            )  # fmt: skip


@launched
def _choose_kernel(
    logits, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr, scale, SINKS: tl.constexpr,
):  # fmt: skip
    biases = None
    if bias is not None:
        column = tl.arange(0, BLOCK_E)
        biases = tl.load(bias + column, mask=column < EXPERTS, other=0.0)
    wait_for_inputs()
    let_next_start()
    store_choice(
        logits, biases, experts, weights, tl.program_id(0).to(tl.int64), eps, factor, SCORING,
        NORMALIZE, EXPERTS, CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C, scale, SINKS,
    )  # fmt: skip
