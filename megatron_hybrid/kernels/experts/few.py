"""Experts with weights in 16 or 32 bits for few tokens: each pair of a token and one of its experts
by itself, as products of matrices and a vector, and the MLP that all tokens share beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts.pairs import activated
from megatron_hybrid.kernels.experts.protocol import ExpertWeights, SharedExpert
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.one_row import add_products, load_columns

_UP_ROWS = 2
_UP_DEPTH = 1024
_DOWN_ROWS = 4
_DOWN_DEPTH = 512


def mix(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: SharedExpert | None = None,
) -> Tensor:
    """As in Experts, of contiguous tensors."""
    (tokens, chosen), (num_experts, width, inner) = experts.shape, layer.down.shape
    limit = num_experts if layer.elsewhere else 0
    hidden = x.new_empty(tokens, chosen, inner)
    y = x.new_empty(tokens, width)
    routed, beside, more = chosen * cdiv(inner, _UP_ROWS), 0, 0
    up = down = gate = shared_hidden = share = None
    if shared is not None:
        up, down, gate = shared.up, shared.down, shared.gate
        beside = down.shape[1]
        shared_hidden = x.new_empty(tokens, beside)
        more = cdiv(beside, _UP_ROWS)
        if gate is not None:
            share = torch.empty(tokens, dtype=torch.float32, device=x.device)
            more += 1
    _up_kernel[(routed + more, tokens)](
        x, experts, layer.up, hidden, up, shared_hidden, gate, share, width, inner, beside,
        chosen, layer.activation, layer.gated, limit, _UP_ROWS,
        min(_UP_DEPTH, next_power_of_2(width)), num_warps=4, **OPTIONS,
    )  # fmt: skip
    _down_kernel[(cdiv(width, _DOWN_ROWS), tokens)](
        hidden, experts, weights, layer.down, shared_hidden, down, share, y, width, inner, beside,
        chosen, limit, _DOWN_ROWS, min(_DOWN_DEPTH, next_power_of_2(inner)),
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return y


@launched
def _up_kernel(
    x, experts, weight, hidden, shared, shared_hidden, gate, share, width, inner, beside,
    CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A token's programs: those of its experts, of the shared MLP, and one for the share of that.
    EXPERTS: 0, or how many there are: pairs with other ids are left out."""
    wait_for_inputs()
    let_next_start()
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    x += token * width
    blocks = tl.cdiv(inner, ROWS)
    columns, size = width, inner
    target = hidden + token * CHOSEN * inner
    if program < CHOSEN * blocks:
        pair = program // blocks
        expert = tl.load(experts + token * CHOSEN + pair).to(tl.int64)
        if EXPERTS:
            columns = tl.where(expert < EXPERTS, columns, 0)
            expert = tl.where(expert < EXPERTS, expert, 0)
        weight += expert * inner * (width * (2 if GATED else 1))
        target += pair * inner
        n = (program - pair * blocks) * ROWS + tl.arange(0, ROWS)
    else:
        n = (program - CHOSEN * blocks) * ROWS + tl.arange(0, ROWS)
        if shared is not None:
            weight = shared
            size = beside
            target = shared_hidden + token * beside
            if gate is not None:
                # Its one row is a program's, behind those of the MLP.
                is_gate = program == tl.num_programs(0) - 1
                sums = tl.zeros((1, DEPTH), tl.float32)
                rows = gate + tl.zeros((1, 1), tl.int64)
                end = tl.where(is_gate, width, 0)
                of_gate = load_columns(rows, 0, end, DEPTH)
                sums = add_products(sums, of_gate, rows, x, end, DEPTH)
                of_token = tl.sigmoid(tl.sum(sums, axis=1))
                place = tl.arange(0, 1)
                tl.store(share + token + place, of_token, mask=place < tl.where(is_gate, 1, 0))
                columns = tl.where(is_gate, 0, columns)
                size = tl.where(is_gate, 0, size)
    row = tl.minimum(n, size - 1).to(tl.int64)[:, None]
    first = tl.zeros((ROWS, DEPTH), tl.float32)
    if GATED:
        rows, others = weight + row * width, weight + (row + size) * width
        first, second = _add_both(first, rows, others, x, columns, DEPTH)
        value = activated(tl.sum(first, axis=1), ACTIVATION) * tl.sum(second, axis=1)
    else:
        rows = weight + row * width
        loaded = load_columns(rows, 0, columns, DEPTH)
        first = add_products(first, loaded, rows, x, columns, DEPTH)
        value = activated(tl.sum(first, axis=1), ACTIVATION)
    tl.store(target + n, value.to(hidden.dtype.element_ty), mask=n < size)


@triton.jit
def _add_both(total, rows, others, x, columns, DEPTH: tl.constexpr):
    """add_products of two sets of rows, with inputs that are loaded once, to zeros and zeros."""
    first, second = total, total
    loaded = load_columns(rows, 0, columns, DEPTH)
    other = load_columns(others, 0, columns, DEPTH)
    for start in range(0, columns, DEPTH):
        following = load_columns(rows, start + DEPTH, columns, DEPTH)
        other_following = load_columns(others, start + DEPTH, columns, DEPTH)
        k = start + tl.arange(0, DEPTH)
        inputs = tl.load(x + k, mask=k < columns, other=0.0).to(tl.float32)[None, :]
        first += loaded.to(tl.float32) * inputs
        second += other.to(tl.float32) * inputs
        loaded = following
        other = other_following
    return first, second


@launched
def _down_kernel(
    hidden, experts, shares, weight, shared_hidden, shared, share, y, width, inner, beside,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One token's columns n of all its experts and the shared MLP, so that nothing is left to sum.
    EXPERTS: as above."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    column = tl.minimum(n, width - 1).to(tl.int64)[:, None]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    # The steps of all experts one after the other, so that the first step of one is loaded while
    # the last of another is multiplied. Which experts they are was known before the kernel that
    # this one waits for.
    steps = tl.cdiv(inner, DEPTH)
    loaded = _load_step(
        weight, experts + token * CHOSEN, column, 0, steps, width, inner, CHOSEN, EXPERTS, DEPTH
    )
    if shared is not None:
        rows = shared + column * beside
        of_shared = load_columns(rows, 0, beside, DEPTH)
    wait_for_inputs()
    let_next_start()
    for step in range(CHOSEN * steps):
        following = _load_step(
            weight, experts + token * CHOSEN, column, step + 1, steps, width, inner,
            CHOSEN, EXPERTS, DEPTH,
        )  # fmt: skip
        pair = token * CHOSEN + step // steps
        k = step % steps * DEPTH + tl.arange(0, DEPTH)
        end = inner
        if EXPERTS:
            end = tl.where(tl.load(experts + pair) < EXPERTS, inner, 0)
        inputs = tl.load(hidden + pair * inner + k, mask=k < end, other=0.0).to(tl.float32)
        total += loaded.to(tl.float32) * (inputs * tl.load(shares + pair))[None, :]
        loaded = following
    value = tl.sum(total, axis=1)
    if shared is not None:
        total = tl.zeros((ROWS, DEPTH), tl.float32)
        inputs = shared_hidden + token * beside
        total = add_products(total, of_shared, rows, inputs, beside, DEPTH)
        more = tl.sum(total, axis=1)
        if share is not None:
            more *= tl.load(share + token)
        value += more
    tl.store(y + token * width + n, value.to(y.dtype.element_ty), mask=n < width)


@triton.jit
def _load_step(
    weight, experts, column, step, steps, width, inner,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[ROWS, DEPTH] of the weights of a token's `step`: `steps` of them belong to an expert."""
    pair = step // steps
    source = experts + tl.minimum(pair, CHOSEN - 1)
    expert = tl.load(source, cache_modifier=".cg").to(tl.int64)
    end = tl.where(pair < CHOSEN, inner, 0)
    if EXPERTS:
        end = tl.where(expert < EXPERTS, end, 0)
    start = (step - pair * steps) * DEPTH
    return load_columns(weight + (expert * width + column) * inner, start, end, DEPTH)
