"""Sampling on a GPU without sorting, in Triton; the calls are those of reference.py.

Whatever top-k, top-p and min-p keep is a prefix of a row's logits, the largest first and equal ones
by their ids: all above some logit, and the first few that equal it. So a row is drawn from by

1. reading it once: the largest logit of every group of 64 tokens, and the sum of its weights;
2. a row without filters: the drawn token's group, and the token in it. Otherwise a limit that all
   kept logits reach is found among the groups' largest: if these are k, k logits reach it; if their
   weights alone make top-p's share, those above it do. The few groups that have such a logit are
   read again, and what reaches the limit is listed with its ids, in their order;
3. a search for the edge of the kept ones in that list, and the draw from it. Where too much is kept
   for a list, it searches the row itself.

A search goes by integers that are ordered as the logits are and have no more bits than these. A
row's sums are in an order of their own: its token depends neither on other rows, nor on where they
begin in memory, nor on the flags of Filters; on the logits' type it does, which decides how threads
share a row. Nothing depends on values on the host, so that every call may be captured in a CUDA
graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.sampling import reference
from megatron_hybrid.kernels.sampling.log_softmax import log_softmax
from megatron_hybrid.kernels.sampling.protocol import Filters

__all__ = ["argmax", "draw", "log_softmax", "penalise"]

penalise = reference.penalise


class Sizes(NamedTuple):
    """How a row is cut, powers of 2: tests have smaller ones."""

    group: int = 64  # tokens
    program: int = 8192  # tokens that a program reads of a row
    groups: int = 1024  # the most that are read again
    tile: int = 32  # groups that are read again at a time
    listed: int = 4096  # the most tokens of a list
    list_block: int = 1024  # tokens of a list that a search reads at a time
    row_block: int = 4096  # the same of a row


SIZES = Sizes()
# Bits of a float32 that these types leave zero.
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

_KNOWN_COUNTERS: dict[torch.device, Tensor] = {}


def argmax(logits: Tensor, program: int = SIZES.program) -> Tensor:
    """As in Sampling."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    parts = cdiv(vocabulary, program)
    largest = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    _argmax_kernel[(rows, parts)](
        logits, logits.stride(0), vocabulary, largest, _counters(logits.device, rows), tokens,
        PROGRAM=program, PARTS=next_power_of_2(parts), num_warps=8,
    )  # fmt: skip
    return tokens


def _counters(device: torch.device, rows: int) -> Tensor:
    """Zeros for as many rows, which every call leaves as zeros: a device's run one after the
    other."""
    known = _KNOWN_COUNTERS.get(device)
    if known is None or len(known) < rows:
        count = max(1024, next_power_of_2(rows))
        known = _KNOWN_COUNTERS[device] = torch.zeros(count, dtype=torch.int32, device=device)
    return known


def draw(logits: Tensor, filters: Filters, point: Tensor, sizes: Sizes = SIZES) -> Tensor:
    """As in Sampling."""
    if logits.dtype not in _LOW_BITS:
        logits = logits.float()
    rows, vocabulary = logits.shape
    device, stride = logits.device, logits.stride(0) if rows > 1 else vocabulary
    # Rows that begin at multiples of 16 are loaded in wider pieces, and are added up accordingly:
    # always or never.
    wide = stride % 16 == 0 and logits.data_ptr() % 16 == 0
    if logits.stride(1) != 1 or wide != (vocabulary % 16 == 0):
        logits, stride = logits.clone(memory_format=torch.contiguous_format), vocabulary

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=device)

    tokens = empty(dtype=torch.int64)
    if rows == 0:
        return tokens
    temperature, top_k, top_p, min_p, *uses = filters
    groups = cdiv(vocabulary, sizes.group)
    largest, sums = (empty(groups, dtype=torch.float32) for _ in range(2))
    _groups_kernel[(rows, cdiv(vocabulary, sizes.program))](
        logits, stride, vocabulary, temperature, largest, sums, groups,
        PROGRAM=sizes.program, GROUP=sizes.group, num_warps=8,
    )  # fmt: skip
    filtered = any(uses)
    listed = sizes.listed if filtered else 0
    values, ids = empty(listed, dtype=logits.dtype), empty(listed, dtype=torch.int32)
    chosen = empty(sizes.groups if filtered else 0, dtype=torch.int32)
    counts, limits, top = (empty(dtype=kind) for kind in (torch.int32, torch.int32, torch.float32))
    total = empty(dtype=torch.float64)
    low_bits = _LOW_BITS[logits.dtype]
    arguments = (
        logits, stride, vocabulary, temperature, top_k, top_p, min_p, point, tokens,
        values, ids, counts, limits, top, total,
    )  # fmt: skip
    _list_kernel[(rows,)](
        *arguments, largest, sums, groups, chosen,
        FILTERED=filtered, GROUP=sizes.group, GROUPS=next_power_of_2(groups),
        CHOSEN=sizes.groups, TILE=sizes.tile, LISTED=sizes.listed, LOW_BITS=low_bits, num_warps=8,
    )  # fmt: skip
    if filtered:
        blocks = cdiv(vocabulary, sizes.row_block)
        _draw_kernel[(rows,)](
            *arguments,
            LISTED=sizes.listed, LOW_BITS=low_bits, LIST_BLOCK=sizes.list_block,
            ROW_BLOCK=sizes.row_block, ROW_BLOCKS=next_power_of_2(blocks), num_warps=16,
        )  # fmt: skip
    return tokens


# ---------------------------------------------------------------- the most likely token


@triton.jit
def _load_logits(logits, at, vocabulary):
    return tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)


@launched
def _argmax_kernel(
    logits, stride, vocabulary, largest, counter, tokens,
    PROGRAM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each part of a row; the row's last program finds the first token that
    has the largest of these."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    at = part * PROGRAM + tl.arange(0, PROGRAM)
    peak = tl.max(_load_logits(logits + row * stride, at, vocabulary), 0)
    tl.store(largest + row * parts + part, peak)
    tl.debug_barrier()
    if tl.atomic_add(counter + row, 1, sem="acq_rel") == parts - 1:
        tl.store(counter + row, 0)
        every = tl.arange(0, PARTS)
        peaks = tl.load(
            largest + row * parts + every, mask=every < parts, other=float("-inf"),
            cache_modifier=".cg",  # not what this processor may have read before others wrote
        )  # fmt: skip
        top = tl.max(peaks, 0)
        first = tl.min(tl.where((peaks == top) & (every < parts), every, PARTS), 0)
        # Of NaNs, which the padding of a captured step may hold, some token all the same.
        at = tl.where(first < PARTS, first, 0) * PROGRAM + tl.arange(0, PROGRAM)
        x = _load_logits(logits + row * stride, at, vocabulary)
        token = tl.min(tl.where((x == top) & (at < vocabulary), at, vocabulary), 0)
        tl.store(tokens + row, tl.where(token < vocabulary, token, 0).to(tl.int64))


# ---------------------------------------------------------------- draws


@triton.jit
def _finite(x):
    """In place of the largest logit of tokens that are all masked: it is subtracted from theirs."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _factor(temperature, row):
    """A logit less the largest, times this, is the logarithm of its weight to the base of 2."""
    return 1.4426950408889634 / tl.maximum(tl.load(temperature + row), 1e-5)


@triton.jit
def _key(x, LOW_BITS: tl.constexpr):
    """An integer of 32 - LOW_BITS bits; the order is that of x, which has LOW_BITS zeros."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is no less than 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def _value(key, LOW_BITS: tl.constexpr):
    """The x of a _key."""
    bits = (key << LOW_BITS) | tl.where(key < 0, (1 << LOW_BITS) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _find(weights, at, before, target):
    """The first of `at` where the sum of `weights` from `before` on exceeds target; never one of
    weight 0, even where the rounding of a parallel sum would choose it."""
    above = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(above, at, 2147483647), 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    return tl.minimum(first, last)


@launched
def _groups_kernel(
    logits, stride, vocabulary, temperature, largest, sums, groups,
    PROGRAM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest logit of each group, and the sum of weights of which its own is 1."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = part * (PROGRAM // GROUP) + tl.arange(0, PROGRAM // GROUP)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load_logits(logits + row * stride, at, vocabulary)
    peaks = tl.max(x, 1)
    weights = tl.exp2((x - _finite(peaks)[:, None]) * _factor(temperature, row))
    target = row * groups + group
    tl.store(largest + target, peaks, mask=group < groups)
    tl.store(sums + target, tl.sum(weights, 1), mask=group < groups)


@launched
def _list_kernel(
    logits, stride, vocabulary, temperature, top_k, top_p, min_p, point, tokens,
    values, ids, counts, limits, tops, totals, largest, sums, groups, chosen,
    FILTERED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr,
    TILE: tl.constexpr, LISTED: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """Draw a row without filters, whose count becomes -1; of another one list what may be kept, and
    how much that is; 0: too much."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    factor = _factor(temperature, row)
    group = tl.arange(0, GROUPS)
    within = group < groups
    peaks = tl.load(largest + row * groups + group, mask=within, other=float("-inf"))
    top = _finite(tl.max(peaks, 0))
    weights = tl.exp2((peaks - top) * factor)  # of the groups' largest
    likely = weights > 0  # where nothing has a weight, nothing needs to be looked at
    masses = tl.load(sums + row * groups + group, mask=within, other=0.0).to(tl.float64) * weights
    total = tl.sum(masses, 0)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    has_k = (k > 0) & (k < vocabulary)
    if not (FILTERED and (has_k | (p < 1) | (least > 0))):
        target = tl.load(point + row) * total
        found = _find(masses, group, 0.0, target)
        before = tl.sum(tl.where(group < found, masses, 0.0), 0)
        at = found * GROUP + tl.arange(0, GROUP)
        own = tl.exp2((_load_logits(logits, at, vocabulary) - top) * factor).to(tl.float64)
        tl.store(tokens + row, _find(own, at, before, target).to(tl.int64))
        tl.store(counts + row, -1)
    else:
        by_weight = (p < 1) & (has_k == 0)
        share = p.to(tl.float64) * total
        enough = tl.where(has_k, k, tl.where(p < 1, CHOSEN, vocabulary))
        keys = _key(peaks, LOW_BITS)
        limit = tl.full((), -(1 << (31 - LOW_BITS)), tl.int64)  # less than any
        end = _key(top, LOW_BITS).to(tl.int64) + 1
        while end - limit > 1:
            middle = limit + (end - limit) // 2
            reach = (keys >= middle) & likely
            reached = tl.sum(reach.to(tl.int32), 0) >= enough
            if by_weight:
                reached |= tl.sum(tl.where(reach, weights, 0.0).to(tl.float64), 0) >= share
            if reached:
                limit = middle
            else:
                end = middle
        reach = (keys >= limit) & likely
        # Of top-p's share the unlikely ones have a part, so that min-p may leave them out only
        # where nothing but their number matters.
        if (has_k == 0) & (p >= 1):
            reach &= weights >= least
        count = tl.sum(reach.to(tl.int32), 0)
        place = tl.cumsum(reach.to(tl.int32), 0) - 1
        chosen += row * CHOSEN
        tl.store(chosen + place, group, mask=reach & (place < CHOSEN))
        tl.debug_barrier()  # what other threads have written is read
        listed = tl.full((), 0, tl.int32)
        mass = tl.full((), 0.0, tl.float64)
        for first in range(0, tl.where(count <= CHOSEN, count, 0), TILE):
            one = first + tl.arange(0, TILE)
            # Past the end of the vocabulary, where there is no more group.
            own = tl.load(chosen + one, mask=one < count, other=GROUPS)
            at = tl.reshape(own[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (TILE * GROUP,))
            x = _load_logits(logits, at, vocabulary)
            own_weights = tl.exp2((x - top) * factor)
            keep = (_key(x, LOW_BITS) >= limit) & (own_weights > 0)
            goal = listed + tl.cumsum(keep.to(tl.int32), 0) - 1
            fits = keep & (goal < LISTED)
            tl.store(values + row * LISTED + goal, x.to(values.dtype.element_ty), mask=fits)
            tl.store(ids + row * LISTED + goal, at, mask=fits)
            listed += tl.sum(keep.to(tl.int32), 0)
            mass += tl.sum(tl.where(keep, own_weights, 0.0), 0)
        whole = (listed > LISTED) | (by_weight & (mass < share))
        tl.store(counts + row, tl.where(whole, 0, listed))
        tl.store(limits + row, limit.to(tl.int32))
        tl.store(tops + row, top)
        tl.store(totals + row, total)


@launched
def _draw_kernel(
    logits, stride, vocabulary, temperature, top_k, top_p, min_p, point, tokens,
    values, ids, counts, limits, tops, totals,
    LISTED: tl.constexpr, LOW_BITS: tl.constexpr, LIST_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw the rows that have filters."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if count < 0:
        return
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k < vocabulary, k, 0)
    factor, top, total = _factor(temperature, row), tl.load(tops + row), tl.load(totals + row)
    share = tl.load(point + row)
    lowest = tl.full((), -(1 << (31 - LOW_BITS)), tl.int64)  # a key less than any
    if count > 0:
        low = tl.maximum(tl.load(limits + row).to(tl.int64) - 1, lowest)
        place = _draw(
            values + row * LISTED, count, low, top, factor, total, k, p, least, share,
            LOW_BITS, LIST_BLOCK, LISTED // LIST_BLOCK,
        )  # fmt: skip
        token = tl.load(ids + row * LISTED + place)
    else:
        token = _draw(
            logits + row * stride, vocabulary, lowest, top, factor, total, k, p, least, share,
            LOW_BITS, ROW_BLOCK, ROW_BLOCKS,
        )  # fmt: skip
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _draw(
    source, count, low, top, factor, total, k, p, least, point,
    LOW_BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The place that `point` draws among `count` logits, which have every kept one: they are above
    the key `low`. total: of weights where k (0: off) does not count. The edge is the key of the
    last kept one, and `ties` so many of those that have it are kept."""
    high = _key(top, LOW_BITS).to(tl.int64) + 1
    edge, ties = low, tl.full((), 2147483647, tl.int32)
    if k > 0:
        edge, over = _edge(source, count, low, high, k, top, factor, False, LOW_BITS, BLOCK)
        ties = (k - over).to(tl.int32)
    if p < 1:
        if k > 0:
            above = (edge + 1 + tl.zeros((8,), tl.int64)).to(tl.int32)
            over = _reaching(source, count, above, top, factor, True, LOW_BITS, BLOCK)
            total = tl.max(over, 0).to(tl.float64) + ties * _weight(edge, top, factor, LOW_BITS)
        share = p.to(tl.float64) * total
        last, over = _edge(source, count, edge, high, share, top, factor, True, LOW_BITS, BLOCK)
        # Of equal ones each is kept before which less than the share is.
        weight = _weight(last, top, factor, LOW_BITS)
        fit = tl.ceil((share - over) / tl.maximum(weight, 1e-300))
        fit = tl.minimum(tl.maximum(fit, 1.0), 1073741824.0).to(tl.int32)
        ties = tl.where(last == edge, tl.minimum(ties, fit), fit)
        edge = last
    block = tl.arange(0, BLOCKS)
    masses, equals = tl.zeros((BLOCKS,), tl.float64), tl.zeros((BLOCKS,), tl.int32)
    for i in range(0, tl.cdiv(count, BLOCK)):
        at = i * BLOCK + tl.arange(0, BLOCK)
        x = _load_logits(source, at, count)
        key, weights = _key(x, LOW_BITS), tl.exp2((x - top) * factor)
        above = (at < count) & (key > edge) & (weights >= least)
        mass = tl.sum(tl.where(above, weights, 0.0).to(tl.float64), 0)
        masses = tl.where(block == i, mass, masses)
        equal = tl.sum(((at < count) & (key == edge)).to(tl.int32), 0)
        equals = tl.where(block == i, equal, equals)
    weight = _weight(edge, top, factor, LOW_BITS)
    weight = tl.where(weight >= least, weight, 0.0)
    upto = tl.cumsum(equals, 0)
    earlier = tl.minimum(upto - equals, ties)  # kept ones of the blocks before
    masses += (tl.minimum(upto, ties) - earlier) * weight
    target = point * tl.sum(masses, 0)
    found = _find(masses, block, 0.0, target)
    before = tl.sum(tl.where(block < found, masses, 0.0), 0)
    ties -= tl.sum(tl.where(block == found, earlier, 0), 0)
    at = found * BLOCK + tl.arange(0, BLOCK)
    x = _load_logits(source, at, count)
    key, weights = _key(x, LOW_BITS), tl.exp2((x - top) * factor)
    equal = (at < count) & (key == edge)
    kept = (at < count) & (key > edge) | equal & (tl.cumsum(equal.to(tl.int32), 0) <= ties)
    weights = tl.where(kept & (weights >= least), weights, 0.0).to(tl.float64)
    return _find(weights, at, before, target)


@triton.jit
def _weight(key, top, factor, LOW_BITS: tl.constexpr):
    """Of one key; 0 of one that no logit has."""
    weight = tl.exp2((_value(key.to(tl.int32), LOW_BITS) - top) * factor)
    return tl.where(weight > 0, weight, 0.0).to(tl.float64)


@triton.jit
def _edge(
    source, count, low, high, target, top, factor,
    WEIGHED: tl.constexpr, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest key from `low` on above which the logits are fewer than `target`, or have less
    weight, and how many they are, or have. None is `high` or above."""
    over = tl.full((), 0.0, tl.float64)
    while high - low > 1:
        inside = tl.maximum((high - low) * (tl.arange(0, 8) + 1) // 9, 1)
        keys = low + inside
        found = _reaching(source, count, keys.to(tl.int32), top, factor, WEIGHED, LOW_BITS, BLOCK)
        found = found.to(tl.float64)
        less = found < target
        high, low = tl.min(tl.where(less, keys, high), 0), tl.max(tl.where(less, low, keys), 0)
        over = tl.maximum(over, tl.max(tl.where(less, found, 0.0), 0))
    return low, over


@triton.jit
def _reaching(
    source, count, keys, top, factor,
    WEIGHED: tl.constexpr, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many of `count` logits reach each of `keys` [8], or what these weigh: [8] float32."""
    sums = tl.zeros((8, BLOCK), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = _load_logits(source, at, count)
        reach = (at < count) & (_key(x, LOW_BITS) >= keys[:, None])
        if WEIGHED:
            sums += tl.where(reach, tl.exp2((x - top) * factor), 0.0)
        else:
            sums += reach.to(tl.float32)
    return tl.sum(sums, 1)
