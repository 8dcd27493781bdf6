"""What a token's router scores choose, by one warp or by several, for the kernels of routing.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import Router
from megatron_hybrid.kernels.launching import next_power_of_2

# Of more experts it takes longer to compare each with each than to find the best one by one.
MOST_RANKED = tl.constexpr(128)
# The key of what was taken, below all others.
_TAKEN = tl.constexpr(-(2**31))


def can_choose(router: Router) -> bool:
    """Groups of experts must be as many, and as large, as some power of two."""
    if router.num_groups == 1:
        return True
    num_experts = num_chosen_from(router)
    return not num_experts & (num_experts - 1) and not router.num_groups & (router.num_groups - 1)


def is_alone(router: Router) -> bool:
    """Whether kernels that do more than to choose can: not with sinks, nor a learned factor."""
    return not router.sinks and router.scale is None


def num_chosen_from(router: Router) -> int:
    """Experts that are no sinks."""
    return len(router.weight) - router.sinks


def empty_logits(x: Tensor, router: Router) -> Tensor:
    """[tokens, experts], for the scores of x [tokens, width]."""
    kind = x.dtype if router.scoring == "softmax" else torch.float32
    return torch.empty(x.shape[0], len(router.weight), dtype=kind, device=x.device)


def empty_choice(like: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Experts [tokens, chosen] and weights [tokens, chosen + sinks], for tokens that `like` has a
    row of each."""
    tokens, device = like.shape[0], like.device
    experts = torch.empty((tokens, router.chosen), dtype=torch.int32, device=device)
    shape = tokens, router.chosen + router.sinks
    return experts, torch.empty(shape, dtype=torch.float32, device=device)


def choice_arguments(router: Router, experts: Tensor, weights: Tensor) -> tuple[object, ...]:
    """The kernels' arguments that say how to choose; sinks and scale are others."""
    num_experts = num_chosen_from(router)
    return (
        router.bias, experts, weights, router.eps, router.factor, router.scoring,
        router.normalize, num_experts, router.chosen, router.num_groups, router.chosen_groups,
        next_power_of_2(num_experts), next_power_of_2(router.chosen),
    )  # fmt: skip


@triton.jit
def store_choice_of_warps(
    logits, biases, experts, weights, token, eps, factor, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, scale=None,
    SINKS: tl.constexpr = 0,
):  # fmt: skip
    """`store_choice` by several warps, which for each of its steps would wait for one another."""
    if BLOCK_E <= MOST_RANKED:
        _store_ranked(
            logits, biases, experts, weights, token, eps, factor, SCORING, NORMALIZE, EXPERTS,
            CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, scale, SINKS,
        )  # fmt: skip
    else:
        store_choice(
            logits, biases, experts, weights, token, eps, factor, SCORING, NORMALIZE, EXPERTS,
            CHOSEN, GROUPS, CHOSEN_GROUPS, BLOCK_E, BLOCK_C, scale, SINKS,
        )  # fmt: skip


@triton.jit
def store_choice(
    logits, biases, experts, weights, token, eps, factor, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, scale=None,
    SINKS: tl.constexpr = 0,
):  # fmt: skip
    """What a token's logits choose: the best, then the best of the others, and so on. scale: a
    number's place that weights are multiplied by, too. SINKS: behind the EXPERTS' logits there are
    so many more of a sigmoid router's; see Router."""
    logits += token * (EXPERTS + SINKS)
    values, left, key = _read(logits, biases, SCORING, EXPERTS, GROUPS, CHOSEN_GROUPS, BLOCK_E)
    place = tl.arange(0, BLOCK_C)
    if SINKS > 0:
        eps += _sum_of_sinks(logits + EXPERTS, SINKS)
    if scale is not None:
        factor *= tl.load(scale)
    expert, share, total = _chosen(
        values, left, key, biases, tl.arange(0, BLOCK_E), place, eps, factor, SCORING, NORMALIZE,
        EXPERTS, CHOSEN, names_experts(logits.dtype.element_ty, SCORING),
    )  # fmt: skip
    tl.store(experts + token * CHOSEN + place, expert, mask=place < CHOSEN)
    weights += token * (CHOSEN + SINKS)
    tl.store(weights + place, share, mask=place < CHOSEN)
    if SINKS > 0:
        _store_sinks(logits + EXPERTS, weights + CHOSEN, tl.sum(total, axis=0), factor, SINKS)


@triton.jit
def _store_ranked(
    logits, biases, experts, weights, token, eps, factor, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr, scale, SINKS: tl.constexpr,
):  # fmt: skip
    """What a token's logits choose, all at once: an expert's place is how many are before it."""
    logits += token * (EXPERTS + SINKS)
    values, left, key = _read(logits, biases, SCORING, EXPERTS, GROUPS, CHOSEN_GROUPS, BLOCK_E)
    weights += token * (CHOSEN + SINKS)
    if SINKS > 0:
        eps += _sum_of_sinks(logits + EXPERTS, SINKS)
    if scale is not None:
        factor *= tl.load(scale)
    column = tl.arange(0, BLOCK_E)
    is_before = key[:, None] > key[None, :]
    if not names_experts(logits.dtype.element_ty, SCORING):
        is_before |= (key[:, None] == key[None, :]) & (column[:, None] < column[None, :])
    # Summed over the rows, which threads have several of, not over lanes.
    rank = tl.sum(is_before.to(tl.int32), axis=0)
    is_chosen = (rank < CHOSEN) & (column < EXPERTS)
    if SCORING == "sigmoid":
        share = values
        if NORMALIZE:
            total = tl.sum(tl.where(is_chosen, share, 0.0), axis=0) + eps
            share = share / total
            if SINKS > 0:
                _store_sinks(logits + EXPERTS, weights + CHOSEN, total, factor, SINKS)
    else:
        share = tl.exp(left - tl.max(left, axis=0))
        counted = tl.where(is_chosen, share, 0.0) if NORMALIZE else share
        share = share / tl.sum(counted, axis=0)
    tl.store(experts + token * CHOSEN + rank, column, mask=is_chosen)
    tl.store(weights + rank, share * factor, mask=is_chosen)


@triton.jit
def _sink(logits, i):
    """One's sigmoid. Others may have written the logit while this kernel ran."""
    return tl.sigmoid(tl.load(logits + i, cache_modifier=".cg").to(tl.float32))


@triton.jit
def _sum_of_sinks(logits, SINKS: tl.constexpr):
    total = _sink(logits, 0)
    for i in tl.static_range(1, SINKS):
        total += _sink(logits, i)
    return total


@triton.jit
def _store_sinks(logits, weights, total, factor, SINKS: tl.constexpr):
    """Of a token whose experts and sinks have sigmoids that add up to `total`."""
    for i in tl.static_range(SINKS):
        tl.store(weights + i, _sink(logits, i) / total * factor)


@triton.jit
def store_choices(
    logits, biases, experts, weights, token, tokens, eps, factor, NAMED: tl.constexpr,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`store_choice` of many tokens [TOKENS] at once, whose logits [TOKENS, BLOCK_E] float32 are at
    hand; without groups of experts. NAMED: see `names_experts`."""
    column = tl.arange(0, logits.shape[1])[None, :]
    place = tl.arange(0, BLOCK_C)[None, :]
    values = logits
    if SCORING == "sigmoid":
        values = tl.sigmoid(values)
    left = values
    if biases is not None:
        left += biases[None, :]
    left = _of_experts(left, column, EXPERTS)
    key = _keys(left, column, EXPERTS, NAMED)
    expert, share, _ = _chosen(
        values, left, key, biases, column, place, eps, factor, SCORING, NORMALIZE, EXPERTS, CHOSEN,
        NAMED,
    )  # fmt: skip
    target = token[:, None] * CHOSEN + place
    mask = (token < tokens)[:, None] & (place < CHOSEN)
    tl.store(experts + target, expert, mask=mask)
    tl.store(weights + target, share, mask=mask)


@triton.jit
def _read(
    logits, biases, SCORING: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A token's logits as float32 or sigmoids, and what they are chosen by, as a number and as an
    integer in the same order, [BLOCK_E] each; -inf and _TAKEN behind the EXPERTS. Where it
    `names_experts` an integer ends in BLOCK_E - 1 - its place, so that no two are equal."""
    column = tl.arange(0, BLOCK_E)
    # Others may have written them while this kernel ran.
    own = tl.load(logits + column, mask=column < EXPERTS, other=0.0, cache_modifier=".cg")
    values = own.to(tl.float32)
    if SCORING == "sigmoid":
        values = tl.sigmoid(values)
    left = values
    if biases is not None:
        left += biases
    left = _of_experts(left, column, EXPERTS)
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS, CHOSEN_GROUPS)
    named: tl.constexpr = names_experts(logits.dtype.element_ty, SCORING)
    return values, left, _keys(left, column, EXPERTS, named)


@triton.jit
def _of_experts(left, column, EXPERTS: tl.constexpr):
    """-inf behind the EXPERTS, and in rows of NaN: the padding of a captured step may hold any
    bits, and still chooses real experts."""
    return tl.where((left == left) & (column < EXPERTS), left, float("-inf"))


@triton.jit
def _keys(left, column, EXPERTS: tl.constexpr, NAMED: tl.constexpr):
    """Integers in the order of `left`, of which a warp finds the largest in one instruction."""
    names: tl.constexpr = left.shape[-1] - 1
    key = _reordered((left + 0.0).to(tl.int32, bitcast=True))
    if NAMED:
        key = (key & ~names) | (names - column)
    return tl.where(column < EXPERTS, key, _TAKEN)


@triton.constexpr_function
def names_experts(kind, scoring):
    """Whether keys have room for their experts' names: 16 bits leave the last 13 of a float32's
    empty."""
    return scoring == "softmax" and kind.primitive_bitwidth == 16


@triton.jit
def _chosen(
    values, left, key, biases, column, place, eps, factor, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """Of what `_read` gives, of one token or of a row each -> experts int32 and weights float32, as
    many as `place`; CHOSEN of these count, the best first, the lower of equal ones. And, [..., 1],
    what they were divided by. column: the experts' places; place: those of the chosen."""
    names: tl.constexpr = key.shape[-1] - 1
    last: tl.constexpr = len(key.shape) - 1
    best = tl.full(place.shape, float("-inf"), tl.float32)
    expert = tl.zeros(place.shape, tl.int32)
    for j in tl.static_range(CHOSEN):
        largest = tl.max(key, axis=last, keep_dims=True)
        if NAMED:
            index = names - (largest & names)
            bits = _reordered(tl.where(largest < 0, largest | names, largest & ~names))
        else:
            index = tl.where(key == largest, column, EXPERTS - 1)
            index = tl.min(index, axis=last, keep_dims=True)
            bits = _reordered(largest)
        is_best = column == index
        if biases is not None:  # which affect the choice alone: sigmoids' bits are in order
            bits = tl.where(is_best, values.to(tl.int32, bitcast=True), 0)
            bits = tl.max(bits, axis=last, keep_dims=True)
        best = tl.where(place == j, bits.to(tl.float32, bitcast=True), best)
        expert = tl.where(place == j, index, expert)
        key = tl.where(is_best, _TAKEN, key)
    if SCORING == "sigmoid":
        share = tl.where(place < CHOSEN, best, 0.0)
        total = tl.sum(share, axis=last, keep_dims=True) + eps
        if NORMALIZE:
            share = share / total
    else:
        largest_of_all = tl.max(best, axis=last, keep_dims=True)
        share = tl.exp(best - largest_of_all)
        total = tl.sum(share, axis=last, keep_dims=True)
        if not NORMALIZE:  # and the experts that were not chosen
            others = tl.where(key == _TAKEN, float("-inf"), left)
            total += tl.sum(tl.exp(others - largest_of_all), axis=last, keep_dims=True)
        share = share / total
    return expert, share * factor, total


@triton.jit
def _reordered(bits):
    """Bits of float32 numbers -> integers in the same order, and back; of zeros, of one sign."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_best_groups(left, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr):
    """left [experts], with -inf for experts outside of the best CHOSEN_GROUPS of the GROUPS that
    follow one another: a group is as good as its two best experts."""
    size: tl.constexpr = left.shape[0] // GROUPS
    by_group = tl.reshape(left, (GROUPS, size))
    first, index = tl.max(by_group, axis=1, return_indices=True, return_indices_tie_break_left=True)
    others = tl.where(tl.arange(0, size)[None, :] == index[:, None], float("-inf"), by_group)
    score = first + tl.max(others, axis=1)
    group = tl.arange(0, GROUPS)
    is_kept = tl.zeros((GROUPS,), tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        _, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        is_kept = tl.where(group == index, 1, is_kept)
        score = tl.where(group == index, float("-inf"), score)
    by_group = tl.where((is_kept != 0)[:, None], by_group, float("-inf"))
    return tl.reshape(by_group, (GROUPS * size,))
