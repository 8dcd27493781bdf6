"""Routers of which a token's bits are its own: one order of sums, and one way to choose, for any
number of tokens.

Scores are products of tensor cores in the order of the columns in one accumulator, whose bits no
tile changes; so tiles are chosen by how many tokens there are. One warp chooses for a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import stages_that_fit
from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.choices import store_choice
from megatron_hybrid.kernels.experts.protocol import Router
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2, triton_type


class Tile(NamedTuple):
    """What a program of the scores has."""

    tokens: int
    rows: int  # of the router's weight
    depth: int  # columns, a step
    stages: int
    warps: int = 4


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
    kind = x.dtype if router.scoring == "softmax" else torch.float32
    logits = torch.empty(tokens, num_experts, dtype=kind, device=x.device)
    size = 2 if in_16_bits else 4
    step = (tile.tokens + tile.rows) * tile.depth * size
    if tokens:
        _scores_kernel[(cdiv(num_experts, tile.rows), cdiv(tokens, tile.tokens))](
            x.contiguous(), weight, logits, tokens, width, num_experts, tile.tokens, tile.rows,
            tile.depth, stages_that_fit(tile.stages, step, x.device),
            triton_type(x.dtype if in_16_bits else torch.float32), num_warps=tile.warps, **OPTIONS,
        )  # fmt: skip
    return logits


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """`route` from the logits [tokens, experts] on."""
    tokens, num_experts = logits.shape
    if router.num_groups > 1 and not (_is_power(num_experts) and _is_power(router.num_groups)):
        return reference.choose(logits, router)  # row by row, too
    experts = torch.empty(tokens, router.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, router.chosen, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits.contiguous(), router.bias, experts, weights, router.eps, router.factor,
            router.scoring, router.normalize, num_experts, router.chosen, router.num_groups,
            router.chosen_groups, next_power_of_2(num_experts), next_power_of_2(router.chosen),
            num_warps=1, **OPTIONS,
        )  # fmt: skip
    return experts, weights


def _is_power(number: int) -> bool:
    """Of two."""
    return not number & (number - 1)


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@launched(do_not_specialize=["tokens"])
def _scores_kernel(
    x, weight, logits, tokens, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """KIND: of the numbers that are multiplied."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, DEPTH)
    is_there = (token < tokens)[:, None]
    inputs = x + token.to(tl.int64)[:, None] * WIDTH + k[None, :]
    # Experts past the end repeat the last one; they are computed but not stored.
    rows = weight + tl.minimum(n, EXPERTS - 1)[:, None] * WIDTH + k[None, :]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    wait_for_inputs()
    let_next_start()
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


@launched
def _choose_kernel(
    logits, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    biases = None
    if bias is not None:
        column = tl.arange(0, BLOCK_E)
        biases = tl.load(bias + column, mask=column < EXPERTS, other=0.0)
    wait_for_inputs()
    let_next_start()
    store_choice(
        logits, biases, experts, weights, tl.program_id(0).to(tl.int64), eps, factor, SCORING,
        NORMALIZE, EXPERTS, CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C,
    )  # fmt: skip
