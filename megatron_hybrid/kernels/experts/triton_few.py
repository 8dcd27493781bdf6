"""Experts with quantised weights for few tokens: each pair of a token and an expert by itself, as
products of a matrix and a vector (kernels/linear/few.py)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import limited
from megatron_hybrid.kernels.experts.pairs import FEW_TOKENS, activated
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.codes import Kept
from megatron_hybrid.kernels.linear.few import (
    DEPTH,
    ROWS,
    can_chunk,
    chunk_sums,
    inputs_at,
    load_step,
    no_sums,
    row_sums,
)
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.linear.products import counters, sum_of_splits
from megatron_hybrid.kernels.linear.rounding import rounded_numbers, rounding, scale_for
from megatron_hybrid.kernels.linear.triton import rows_for
from megatron_hybrid.kernels.protocols import Inputs


def can_mix(layer: ExpertWeights, tokens: int) -> bool:
    """Whether these kernels are for so many tokens and the layer's weights."""
    for weight in (layer.up, layer.down):
        if not isinstance(weight, QuantizedWeight) or not can_chunk(weight):
            return False
    return tokens <= FEW_TOKENS


def mix(x: Inputs, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """As in Experts, of `experts` and so on as triton.mix has them."""
    up, down = layer.up, layer.down
    assert isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight)
    (tokens, chosen), (num_experts, width, inner) = experts.shape, down.shape
    limit = num_experts if layer.elsewhere else 0
    rows, flat = rows_for(x, up), up.flat()
    hidden = torch.empty(tokens * chosen, inner, dtype=x.dtype, device=experts.device)
    kept = Kept.of(flat, hidden)
    _up_kernel[(cdiv(inner, ROWS), tokens * chosen)](
        *rows, experts, flat.words(), flat.scale, flat.zero, flat.row_scale, flat.scale.stride(0),
        hidden, width, inner, chosen, layer.activation, layer.gated, limit, kept,
        kept.group if kept.by_group else 0, ROWS, DEPTH, num_warps=4,
    )  # fmt: skip
    flat = down.flat()
    kind = None if flat.format.activations == "none" else rounding(flat.format)
    y = torch.empty(tokens, width, dtype=x.dtype, device=experts.device)
    parts = torch.empty(chosen, tokens, width, device=experts.device)
    _down_kernel[(cdiv(width, ROWS), tokens, chosen)](
        hidden, flat.input_scale, experts, weights, flat.words(), flat.scale, flat.zero,
        flat.row_scale, flat.scale.stride(0), y, parts, counters(y.device), tokens, inner, width,
        chosen, limit, Kept.of(flat, hidden), kind, next_power_of_2(inner), ROWS, DEPTH,
        num_warps=4,
    )  # fmt: skip
    return y


@launched
def _up_kernel(
    x, x_scale, x_scale_row, x_scale_group, experts, weight, scale, zero, row_scale, scale_row,
    hidden, width, inner, CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    EXPERTS: tl.constexpr, KEPT: tl.constexpr, X_GROUP: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """EXPERTS: 0, or how many there are: pairs with other ids are left out. X_GROUP: columns of x
    that share a scale, or 0."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + pair).to(tl.int64)
    if EXPERTS:  # noqa: SIM102 (decided when the kernel is compiled)
        if expert >= EXPERTS:
            return
    x += pair // CHOSEN * width
    if x_scale is not None:
        x_scale += pair // CHOSEN * x_scale_row
    row = expert * inner * (2 if GATED else 1) + tl.minimum(n, inner - 1)
    first = no_sums(KEPT, ROWS, DEPTH)
    second = no_sums(KEPT, ROWS, DEPTH)
    gate = load_step(weight, scale, zero, row, 0, width, width, scale_row, KEPT, DEPTH)
    if GATED:
        up = load_step(weight, scale, zero, row + inner, 0, width, width, scale_row, KEPT, DEPTH)
    for start in range(0, width, DEPTH):
        after = start + DEPTH
        next_gate = load_step(weight, scale, zero, row, after, width, width, scale_row, KEPT, DEPTH)
        if GATED:
            next_up = load_step(
                weight, scale, zero, row + inner, after, width, width, scale_row, KEPT, DEPTH
            )
        inputs = inputs_at(x, x_scale, x_scale_group, start, width, X_GROUP, DEPTH)
        first += chunk_sums(gate, inputs, KEPT)
        gate = next_gate
        if GATED:
            second += chunk_sums(up, inputs, KEPT)
            up = next_up
    value = activated(row_sums(first, scale, row_scale, row, scale_row, KEPT), ACTIVATION)
    if GATED:
        factor = row_sums(second, scale, row_scale, row + inner, scale_row, KEPT)
        value *= limited(factor, ACTIVATION)
    tl.store(hidden + pair * inner + n, value.to(hidden.dtype.element_ty), mask=n < inner)


@launched(do_not_specialize=["tokens"])
def _down_kernel(
    hidden, input_scale, experts, shares, weight, scale, zero, row_scale, scale_row, y, parts,
    counter, tokens, inner, width, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr,
    KEPT: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Of one pair; a token's last program adds them up. EXPERTS: as above; KIND: how hidden values
    are rounded first, or None; WHOLE: at least inner."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    pair = token * CHOSEN + tl.program_id(2)
    expert = tl.load(experts + pair).to(tl.int64)
    end = inner
    if EXPERTS:
        end = tl.where(expert < EXPERTS, inner, 0)
        expert = tl.where(expert < EXPERTS, expert, 0)
    row = expert * width + tl.minimum(n, width - 1)
    hidden += pair * inner
    loaded = load_step(weight, scale, zero, row, 0, end, inner, scale_row, KEPT, DEPTH)
    factor = 1.0
    if KIND is not None:
        if KIND.constant:
            factor = tl.load(input_scale)
        elif KIND.whole_row:
            k = tl.arange(0, WHOLE)
            values = tl.load(hidden + k, mask=k < end, other=0.0).to(tl.float32)
            factor = scale_for(tl.max(tl.abs(values), axis=0), KIND)
    total = no_sums(KEPT, ROWS, DEPTH)
    for start in range(0, end, DEPTH):
        following = load_step(
            weight, scale, zero, row, start + DEPTH, end, inner, scale_row, KEPT, DEPTH
        )
        inputs = inputs_at(hidden, None, 0, start, end, 0, DEPTH)
        if KIND is not None:
            inputs = rounded_numbers(inputs, factor, KIND)
        total += chunk_sums(loaded, inputs, KEPT)
        loaded = following
    value = row_sums(total, scale, row_scale, row, scale_row, KEPT) * tl.load(shares + pair)
    place = token * width + n
    last, value = sum_of_splits(value, parts, counter, place, n < width, tokens, width, CHOSEN)
    if last:
        tl.store(y + place, value.to(y.dtype.element_ty), mask=n < width)
