"""Routers in Triton: the scores of all experts, and the best of them. Of few tokens in one kernel,
whose last program for a token chooses, and which can make the norm before the router, too; of some
hundreds in one, too, where a program can have all experts, or else in two, the first of which makes
the scores in small tiles; otherwise cuBLAS makes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.devices import stages_that_fit
from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.choices import (
    MOST_RANKED,
    can_choose,
    choice_arguments,
    empty_choice,
    empty_logits,
    is_alone,
    names_experts,
    num_chosen_from,
    store_choice,
    store_choice_of_warps,
    store_choices,
)
from megatron_hybrid.kernels.experts.protocol import NormedRoutes, Router
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2, triton_type
from megatron_hybrid.kernels.linear.one_row import add_products, load_columns
from megatron_hybrid.kernels.linear.products import counters
from megatron_hybrid.kernels.norm.triton import add_and_norm, warps_for

_FEW_TOKENS = 8
_ROWS = 2  # of the router's weight, in a program for few tokens
_DEPTH = 1024
_WARPS = 4
# Every program of a token makes its norm. Up to so many do, about one a multiprocessor, so that
# what they read besides is little for the L2 cache; 0: never.
_MOST_NORMS = 128
# Of more tokens cuBLAS makes the scores faster.
_MOST_TILED = 512
# A program reads the whole weight, if that is small: numbers, and experts.
_MOST_WHOLE = 64 * 2048
_MOST_EXPERTS = 64
_TOKENS = 16  # of such a program
# Otherwise a program has so many tokens and experts, and loads so many columns a step, steps ahead.
# Few programs ask for the same weights, since these come from memory: what is on its way already is
# handed to one program after the other.
_TILE = {"TOKENS": 64, "ROWS": 16, "DEPTH": 128}
_STAGES = 8


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """As in Experts."""
    tokens = x.shape[0]
    num_experts, width = router.weight.shape
    if not _are_few(tokens, x.dtype, router):
        if _fits_a_program(x, router):
            return _route_whole(x.contiguous(), router)
        return choose(scores(x, router), router)
    x = x.contiguous()
    experts, weights = empty_choice(x, router)
    logits = empty_logits(x, router)
    _route_kernel[(cdiv(num_experts, _ROWS), tokens)](
        x, router.weight, logits, counters(x.device), *choice_arguments(router, experts, weights),
        width, ROWS=_ROWS, DEPTH=min(_DEPTH, next_power_of_2(width)), num_warps=_WARPS, **OPTIONS,
    )  # fmt: skip
    return experts, weights


def _fits_a_program(x: Tensor, router: Router) -> bool:
    """Whether some programs, each of which reads the whole weight, route these tokens."""
    weight = router.weight
    in_16_bits = x.dtype == weight.dtype and x.dtype.itemsize == 2
    small = len(weight) <= _MOST_EXPERTS and weight.numel() <= _MOST_WHOLE
    can = is_alone(router) and router.num_groups == 1
    return in_16_bits and small and can and 0 < len(x) <= _MOST_TILED


def _route_whole(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    (num_experts, width), tokens = router.weight.shape, len(x)
    experts, weights = empty_choice(x, router)
    rows, depth = max(16, next_power_of_2(num_experts)), 256 if width % 256 == 0 else 128
    stages = stages_that_fit(4, (_TOKENS + rows) * depth * x.itemsize, x.device)
    _route_whole_kernel[(cdiv(tokens, _TOKENS),)](
        x, router.weight, router.bias, experts, weights, tokens, router.eps, router.factor,
        router.scoring, router.normalize, num_experts, router.chosen, rows,
        next_power_of_2(router.chosen), width, _TOKENS, depth, stages, triton_type(x.dtype),
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return experts, weights


def add_norm_route(
    x: Tensor,
    residual: Tensor,
    multiplier: float,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    router: Router,
) -> NormedRoutes | None:
    """As in Experts; the sum is in `residual`'s place, and all has the bits of the two kernels
    apart."""
    (tokens, width), num_experts = x.shape, len(router.weight)
    programs, block = cdiv(num_experts, _ROWS), next_power_of_2(width)
    if not _are_few(tokens, dtype, router) or tokens * programs > _MOST_NORMS:
        return None
    # With another number of warps the norm's kernel sums up in another order.
    if block != 2 * _DEPTH or warps_for(block) != _WARPS:
        return None
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    experts, weights = empty_choice(normed, router)
    logits = empty_logits(normed, router)
    _norm_route_kernel[(programs, tokens)](
        x, residual, weight, normed, router.weight, logits, counters(x.device),
        *choice_arguments(router, experts, weights), width, x.stride(0), residual.stride(0),
        multiplier, eps, ROWS=_ROWS, DEPTH=_DEPTH, num_warps=_WARPS, **OPTIONS,
    )  # fmt: skip
    return NormedRoutes(normed, residual, (experts, weights))


def _are_few(tokens: int, dtype: torch.dtype, router: Router) -> bool:
    """Whether such tokens' scores and choice are one kernel."""
    can = can_choose(router) and is_alone(router)
    return 0 < tokens <= _FEW_TOKENS and dtype.itemsize == 2 and can


def scores(x: Tensor, router: Router) -> Tensor:
    """[tokens, width] -> logits [tokens, experts]; see Router. Those in float32 are made of numbers
    in 16 bits without writing them out in 32 first."""
    weight, in_16_bits = router.weight, x.dtype == router.weight.dtype and x.dtype.itemsize == 2
    if in_16_bits and 0 < x.shape[0] <= _MOST_TILED:
        return tiled_scores(x, router)
    if router.scoring == "sigmoid" and x.is_cuda and in_16_bits:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return reference.scores(x, router)


def tiled_scores(x: Tensor, router: Router) -> Tensor:
    """`scores`, of numbers in 16 bits."""
    (tokens, width), num_experts = x.shape, len(router.weight)
    logits = empty_logits(x, router)
    step = (_TILE["TOKENS"] + _TILE["ROWS"]) * _TILE["DEPTH"] * x.itemsize
    _scores_kernel[(cdiv(num_experts, _TILE["ROWS"]), cdiv(tokens, _TILE["TOKENS"]))](
        x.contiguous(), router.weight, logits, tokens, WIDTH=width, EXPERTS=num_experts, **_TILE,
        STAGES=stages_that_fit(_STAGES, step, x.device), num_warps=4, **OPTIONS,
    )  # fmt: skip
    return logits


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """`route` from the logits [tokens, experts] on."""
    if not can_choose(router):
        return reference.choose(logits, router)
    tokens, num_experts = len(logits), num_chosen_from(router)
    experts, weights = empty_choice(logits, router)
    if tokens:
        # Several warps compare all of few tokens' experts at once; otherwise one warp has a row,
        # and waits for no other.
        is_ranked = tokens <= _MOST_TILED and next_power_of_2(num_experts) <= MOST_RANKED.value
        _choose_kernel[(tokens,)](
            logits.contiguous(), *choice_arguments(router, experts, weights), router.scale,
            router.sinks, num_warps=_WARPS if is_ranked else 1, IS_RANKED=is_ranked, **OPTIONS,
        )  # fmt: skip
    return experts, weights


@launched
def _route_kernel(
    x, weight, logits, counter, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr, width, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    rows = weight + tl.minimum(n, EXPERTS - 1)[:, None] * width
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    loaded = load_columns(rows, 0, width, DEPTH)
    biases = None
    if bias is not None:
        biases = _load_biases(bias, EXPERTS, BLOCK_E)
    wait_for_inputs()
    let_next_start()
    sums = add_products(sums, loaded, rows, x + token * width, width, DEPTH)
    if _store_scores(sums, logits, counter, n, token, EXPERTS):
        store_choice_of_warps(
            logits, biases, experts, weights, token, eps, factor, SCORING, NORMALIZE, EXPERTS,
            CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C,
        )  # fmt: skip


@launched
def _norm_route_kernel(
    x, residual, norm, normed, weight, logits, counter, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr, width, x_row, residual_row, multiplier, norm_eps,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A row is two steps of the product: 2 * DEPTH columns at most, and more than DEPTH."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    rows = weight + tl.minimum(n, EXPERTS - 1)[:, None] * width
    first_weights = load_columns(rows, 0, width, DEPTH)
    second_weights = load_columns(rows, DEPTH, width, DEPTH)
    biases = None
    if bias is not None:
        biases = _load_biases(bias, EXPERTS, BLOCK_E)
    column = tl.arange(0, 2 * DEPTH)[None, :]
    mask = column < width
    factors = tl.load(norm + column, mask=mask, other=0)
    wait_for_inputs()
    let_next_start()
    inputs = tl.load(x + token * x_row + column, mask=mask, other=0).to(tl.float32)
    residual += token * residual_row
    carried = tl.load(residual + column, mask=mask, other=0)
    total, scaled = add_and_norm(inputs, carried, factors, multiplier, width, norm_eps)
    scaled = scaled.to(normed.dtype.element_ty)
    halves = tl.reshape(scaled.to(tl.float32), (2, DEPTH))
    half = tl.arange(0, 2)[:, None]
    first = tl.sum(tl.where(half == 0, halves, 0.0), axis=0)
    second = tl.sum(tl.where(half == 1, halves, 0.0), axis=0)
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    sums += first_weights.to(tl.float32) * first[None, :]
    sums += second_weights.to(tl.float32) * second[None, :]
    if _store_scores(sums, logits, counter, n, token, EXPERTS):
        # All of the token's programs have read the residual.
        tl.store(residual + column, total, mask=mask)
        tl.store(normed + token * width + column, scaled, mask=mask)
        store_choice_of_warps(
            logits, biases, experts, weights, token, eps, factor, SCORING, NORMALIZE, EXPERTS,
            CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _store_scores(sums, logits, counter, n, token, EXPERTS: tl.constexpr):
    """Logits of experts n, whose products `sums` [ROWS, DEPTH] has; whether this program is the
    last of its token, so that all are there."""
    values = tl.sum(sums, axis=1).to(logits.dtype.element_ty)
    tl.store(logits + token * EXPERTS + n, values, mask=n < EXPERTS)
    tl.debug_barrier()
    last = tl.atomic_add(counter + token, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(counter + token, 0)
    return last


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.
@launched(do_not_specialize=["tokens"])
def _scores_kernel(
    x, weight, logits, tokens, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = _products(x, weight, token, n, tokens, WIDTH, EXPERTS, TOKENS, ROWS, DEPTH, STAGES)
    target = logits + token[:, None] * EXPERTS + n[None, :]
    mask = (token < tokens)[:, None] & (n < EXPERTS)[None, :]
    tl.store(target, total.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _products(
    x, weight, token, n, tokens, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of these tokens [TOKENS] and experts n [ROWS]: [TOKENS, ROWS] float32."""
    k = tl.arange(0, DEPTH)
    # Tokens and experts past the end repeat the last ones; they are computed but not stored.
    inputs = x + tl.minimum(token, tokens - 1)[:, None] * WIDTH + k[None, :]
    rows = weight + tl.minimum(n, EXPERTS - 1)[:, None] * WIDTH + k[None, :]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        if WIDTH % DEPTH:
            mask = (start + k < WIDTH)[None, :]
            values = tl.load(inputs + start, mask=mask, other=0.0)
            numbers = tl.load(rows + start, mask=mask, other=0.0)
        else:
            values = tl.load(inputs + start)
            numbers = tl.load(rows + start)
        total = tl.dot(values, tl.trans(numbers), total)
    return total


@launched
def _choose_kernel(
    logits, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr, scale, SINKS: tl.constexpr, IS_RANKED: tl.constexpr,
):  # fmt: skip
    biases = None
    if bias is not None:
        biases = _load_biases(bias, EXPERTS, BLOCK_E)
    wait_for_inputs()
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    if IS_RANKED:
        store_choice_of_warps(
            logits, biases, experts, weights, token, eps, factor, SCORING, NORMALIZE, EXPERTS,
            CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C, scale, SINKS,
        )  # fmt: skip
    else:
        store_choice(
            logits, biases, experts, weights, token, eps, factor, SCORING, NORMALIZE, EXPERTS,
            CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C, scale, SINKS,
        )  # fmt: skip


@launched(do_not_specialize=["tokens"])
def _route_whole_kernel(
    x, weight, bias, experts, weights, tokens, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """KIND: of inputs, which softmax routers' logits are rounded to."""
    biases = None
    if bias is not None:
        biases = _load_biases(bias, EXPERTS, BLOCK_E)
    wait_for_inputs()
    let_next_start()
    n = tl.arange(0, BLOCK_E)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    logits = _products(x, weight, token, n, tokens, WIDTH, EXPERTS, TOKENS, BLOCK_E, DEPTH, STAGES)
    if SCORING == "softmax":
        logits = logits.to(KIND).to(tl.float32)
    store_choices(
        logits, biases, experts, weights, token, tokens, eps, factor, names_experts(KIND, SCORING),
        SCORING, NORMALIZE, EXPERTS, CHOSEN, BLOCK_C,
    )  # fmt: skip


@triton.jit
def _load_biases(bias, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    column = tl.arange(0, BLOCK_E)
    return tl.load(bias + column, mask=column < EXPERTS, other=0.0)
