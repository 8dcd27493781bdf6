"""Routers in Triton: the scores of all experts, and the best of them. Of few tokens in one kernel,
whose last program for a token chooses; otherwise cuBLAS makes the scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts import reference
from megatron_hybrid.kernels.experts.protocol import Router
from megatron_hybrid.kernels.linear.one_row import add_products, load_columns
from megatron_hybrid.kernels.linear.products import counters

_FEW_TOKENS = 8
_ROWS = 2  # of the router's weight, in a program for few tokens
_DEPTH = 1024


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """As in Experts."""
    tokens = x.shape[0]
    is_few = 0 < tokens <= _FEW_TOKENS and x.dtype.itemsize == 2
    if not is_few or not _can_choose(router):
        return choose(scores(x, router), router)
    x = x.contiguous()
    num_experts, width = router.weight.shape
    experts, weights = _results(x, router)
    kind = x.dtype if router.scoring == "softmax" else torch.float32
    logits = torch.empty(tokens, num_experts, dtype=kind, device=x.device)
    _route_kernel[(triton.cdiv(num_experts, _ROWS), tokens)](
        x, router.weight, logits, counters(x.device), *_choice(router, experts, weights),
        width, ROWS=_ROWS, DEPTH=min(_DEPTH, triton.next_power_of_2(width)), num_warps=4, **OPTIONS,
    )  # fmt: skip
    return experts, weights


def scores(x: Tensor, router: Router) -> Tensor:
    """[tokens, width] -> logits [tokens, experts]; see Router. Those in float32 are made of numbers
    in 16 bits without writing them out in 32 first."""
    weight, in_16_bits = router.weight, x.dtype == router.weight.dtype and x.dtype.itemsize == 2
    if router.scoring == "sigmoid" and x.is_cuda and in_16_bits:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return reference.scores(x, router)


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """`route` from the logits [tokens, experts] on."""
    if not _can_choose(router):
        return reference.choose(logits, router)
    tokens = logits.shape[0]
    experts, weights = _results(logits, router)
    if tokens:
        _choose_kernel[(triton.cdiv(tokens, 4),)](
            logits.contiguous(), tokens, *_choice(router, experts, weights), ROWS=4, num_warps=1
        )
    return experts, weights


def _can_choose(router: Router) -> bool:
    """Groups of experts must be as many, and as large, as some power of two."""
    if router.num_groups == 1:
        return True
    num_experts = len(router.weight)
    return not num_experts & (num_experts - 1) and not router.num_groups & (router.num_groups - 1)


def _results(like: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    shape = like.shape[0], router.chosen
    experts = torch.empty(shape, dtype=torch.int32, device=like.device)
    return experts, torch.empty(shape, dtype=torch.float32, device=like.device)


def _choice(router: Router, experts: Tensor, weights: Tensor) -> tuple[object, ...]:
    """The kernels' arguments that say how to choose."""
    num_experts = len(router.weight)
    return (
        router.bias, experts, weights, router.eps, router.factor, router.scoring,
        router.normalize, num_experts, router.chosen, router.num_groups, router.chosen_groups,
        triton.next_power_of_2(num_experts), triton.next_power_of_2(router.chosen),
    )  # fmt: skip


@triton.jit
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
    wait_for_inputs()
    let_next_start()
    sums = add_products(sums, loaded, rows, x + token * width, width, DEPTH)
    values = tl.sum(sums, axis=1).to(logits.dtype.element_ty)
    tl.store(logits + token * EXPERTS + n, values, mask=n < EXPERTS)
    tl.debug_barrier()
    if tl.atomic_add(counter + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter + token, 0)
        column = tl.arange(0, BLOCK_E)[None, :]
        own = tl.load(
            logits + token * EXPERTS + column, mask=column < EXPERTS, other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        expert, share = _chosen(
            own, bias, eps, factor, SCORING, NORMALIZE, EXPERTS, CHOSEN, GROUPS, CHOSEN_GROUPS,
            BLOCK_C,
        )  # fmt: skip
        place = tl.arange(0, BLOCK_C)[None, :]
        tl.store(experts + token * CHOSEN + place, expert, mask=place < CHOSEN)
        tl.store(weights + token * CHOSEN + place, share, mask=place < CHOSEN)


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.
@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits, tokens, bias, experts, weights, eps, factor,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_E)
    source = tl.minimum(row, tokens - 1)[:, None] * EXPERTS + column[None, :]
    own = tl.load(logits + source, mask=(column < EXPERTS)[None, :], other=float("-inf"))
    expert, share = _chosen(
        own, bias, eps, factor, SCORING, NORMALIZE, EXPERTS, CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_C
    )
    place = tl.arange(0, BLOCK_C)
    target = row[:, None] * CHOSEN + place[None, :]
    valid = (row < tokens)[:, None] & (place < CHOSEN)[None, :]
    tl.store(experts + target, expert, mask=valid)
    tl.store(weights + target, share, mask=valid)


@triton.jit
def _chosen(
    logits, bias, eps, factor, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """logits [ROWS, BLOCK_E], -inf past the last expert -> experts int32 and weights float32,
    [ROWS, BLOCK_C] each; CHOSEN of these count, the best first, the lower of equal ones."""
    rows: tl.constexpr = logits.shape[0]
    column = tl.arange(0, logits.shape[1])[None, :]
    values = logits.to(tl.float32)
    if SCORING == "sigmoid":
        values = tl.sigmoid(values)
    left = values
    if bias is not None:
        left += tl.load(bias + column, mask=column < EXPERTS, other=0.0)
    # Rows of NaN (the padding of a captured step may hold any bits) still choose real experts.
    left = tl.where((left == left) & (column < EXPERTS), left, float("-inf"))
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS, CHOSEN_GROUPS)
    place = tl.arange(0, BLOCK_C)[None, :]
    best = tl.full((rows, BLOCK_C), float("-inf"), tl.float32)
    expert = tl.zeros((rows, BLOCK_C), tl.int32)
    for j in tl.static_range(CHOSEN):
        value, index = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_best = column == index[:, None]
        if bias is not None:  # which affects the choice alone
            value = tl.sum(tl.where(is_best, values, 0.0), axis=1)
        best = tl.where(place == j, value[:, None], best)
        expert = tl.where(place == j, index[:, None], expert)
        left = tl.where(is_best, float("-inf"), left)
    if SCORING == "sigmoid":
        share = tl.where(place < CHOSEN, best, 0.0)
        if NORMALIZE:
            share = share / (tl.sum(share, axis=1)[:, None] + eps)
    else:
        largest = tl.max(best, axis=1)[:, None]
        share = tl.exp(best - largest)
        total = tl.sum(share, axis=1)[:, None]
        if not NORMALIZE:  # and the experts that were not chosen
            total += tl.sum(tl.exp(left - largest), axis=1)[:, None]
        share = share / total
    return expert, share * factor


@triton.jit
def _in_best_groups(left, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr):
    """left [ROWS, experts], with -inf for experts outside of the best CHOSEN_GROUPS of the GROUPS
    that follow one another: a group is as good as its two best experts."""
    rows: tl.constexpr = left.shape[0]
    size: tl.constexpr = left.shape[1] // GROUPS
    by_group = tl.reshape(left, (rows, GROUPS, size))
    first, index = tl.max(by_group, axis=2, return_indices=True, return_indices_tie_break_left=True)
    others = tl.where(
        tl.arange(0, size)[None, None, :] == index[:, :, None], float("-inf"), by_group
    )
    score = first + tl.max(others, axis=2)
    group = tl.arange(0, GROUPS)[None, :]
    is_kept = tl.zeros((rows, GROUPS), tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        _, index = tl.max(score, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_kept = tl.where(group == index[:, None], 1, is_kept)
        score = tl.where(group == index[:, None], float("-inf"), score)
    by_group = tl.where((is_kept != 0)[:, :, None], by_group, float("-inf"))
    return tl.reshape(by_group, (rows, GROUPS * size))
