"""Products of wide layers, whose adapters' A lies behind their own weight, in Triton and by cuBLAS.

    both = x [W; A of slot 1; A of slot 2; ..]^T
    y[t] = both[t, :N] + both[t, of its slot] B^T

Of few tokens there is one launch beside the layer's product. A program is of some tokens and some
outputs, and takes several slots at once: what a token has of another slot than its own counts as
zero, and the B of slots that nobody has is not loaded. Of many tokens cuBLAS does the same with two
products more. Zeros change no sum, so bits do not depend on who else is in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import activate, activated_product
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.lora.protocol import WideWeights
from megatron_hybrid.kernels.protocols import Inputs, Linear

_DEPTH = 128  # columns of slots at once
_FEW_TOKENS = 128  # for which a launch of ours is faster than two of cuBLAS and what masks


class Tile(NamedTuple):
    """Of a program."""

    tokens: int
    rows: int  # of the layer's outputs
    warps: int
    depth: int  # columns of slots at once, at most


def choose_tile(tokens: int, dtype: torch.dtype) -> Tile:
    """By what was fast on an H200. In types of 16 bits all tiles add up alike."""
    if dtype.itemsize != 2:
        return Tile(16, 64, 4, 16)
    if tokens == 1:
        return Tile(16, 32, 2, 16)
    return Tile(16 if tokens <= 16 else 32 if tokens <= 32 else 64, 64, 4, _DEPTH)


def multiply(
    x: Inputs,
    weights: WideWeights,
    slots: Tensor,
    linear: Linear,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """As in Lora."""
    if x.shape[0] <= _FEW_TOKENS:
        return multiply_in_order(x, weights, slots, linear, activation, gated)
    rows = len(weights.b)
    y = linear.multiply(x, weights.wide[:rows])
    low = linear.multiply(x, weights.wide[rows:])
    low.masked_fill_(slots[:, None] != weights.slot_of, 0)
    y.addmm_(low, weights.b.t())
    if activation == "none" and not gated:
        return y
    activated = activate(y, activation, gated)
    assert isinstance(activated, Tensor)
    return activated


def multiply_in_order(
    x: Inputs,
    weights: WideWeights,
    slots: Tensor,
    linear: Linear,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """The same, with the same bits for any number of tokens if `linear` has that."""
    return expand(linear.multiply(x, weights.wide), weights, slots, activation, gated)


def expand(
    both: Tensor,
    weights: WideWeights,
    slots: Tensor,
    activation: str = "none",
    gated: bool = False,
) -> Tensor:
    """What the product with `wide` [tokens, N + C] comes to."""
    tokens, (rows, across), rank = len(both), weights.b.shape, weights.rank
    parts = 2 if gated else 1
    columns = rows // parts
    y = torch.empty(tokens, columns, dtype=both.dtype, device=both.device)
    if not tokens:
        return y
    tile = choose_tile(tokens, both.dtype)
    width, count = next_power_of_2(rank), across // weights.low
    depth = max(16, width, min(tile.depth, width * next_power_of_2(count)))
    _expand_kernel[(cdiv(columns, tile.rows), cdiv(tokens, tile.tokens))](
        both, weights.b, weights.roles, slots, y, tokens, columns, across, weights.low, rank,
        count, both.stride(0), activation, parts, tile.tokens, tile.rows, width, depth,
        num_warps=tile.warps, **OPTIONS,
    )  # fmt: skip
    return y


@launched(do_not_specialize=["tokens"])
def _expand_kernel(
    both, b, roles, slots, y, tokens, columns, across, low, rank, count, both_row,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y [tokens, columns], of PARTS times as many outputs of the layer. RANK: a power of 2 from
    rank on; DEPTH: RANK for each of the slots that are taken at once."""
    at_once: tl.constexpr = DEPTH // RANK
    kind: tl.constexpr = y.dtype.element_ty
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = t < tokens
    first = tl.minimum(n, columns - 1)
    last = first + (PARTS - 1) * columns
    # Slots and weights are no results of the kernel before this one, which is the layer's product.
    slot = tl.load(slots + t, mask=there, other=0).to(tl.int32)
    least = tl.min(tl.where(slot > 0, slot, count), 0)
    some = (least - 1) // at_once * at_once
    place, own = _of_slots(slot, some, low, rank, RANK, DEPTH)
    role = tl.load(roles + last)
    weights = _weights(b, last, place, own, role, across, rank)
    if PARTS == 2:
        role_first = tl.load(roles + first)
        of_first = _weights(b, first, place, own, role_first, across, rank)
    wait_for_inputs()
    let_next_start()
    line = both + t.to(tl.int64)[:, None] * both_row
    behind = line + PARTS * columns
    mask = there[:, None] & (n < columns)[None, :]
    # Without `first` and `last`, so that it shows that they are next to each other.
    values = tl.load(line + (PARTS - 1) * columns + n[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    added = _added(behind + place[None, :], own, weights, role, rank)
    gates, of_gates = values, added
    if PARTS == 2:
        gates = tl.load(line + n[None, :], mask=mask, other=0.0).to(tl.float32)
        of_gates = _added(behind + place[None, :], own, of_first, role_first, rank)
    for more in tl.range(some + at_once, tl.max(slot, 0), at_once, num_stages=1):
        place, own = _of_slots(slot, more, low, rank, RANK, DEPTH)
        weights = _weights(b, last, place, own, role, across, rank)
        added += _added(behind + place[None, :], own, weights, role, rank)
        if PARTS == 2:
            weights = _weights(b, first, place, own, role_first, across, rank)
            of_gates += _added(behind + place[None, :], own, weights, role_first, rank)
    result = activated_product(gates + of_gates, values + added, kind, ACTIVATION, PARTS == 2)
    tl.store(y + t.to(tl.int64)[:, None] * columns + n[None, :], result, mask=mask)


@triton.jit
def _of_slots(slot, some, low, rank, RANK: tl.constexpr, DEPTH: tl.constexpr):
    """Of slots from number `some` on, the columns of their first role [DEPTH], and which of them
    are of a token's own slot [TOKENS, DEPTH]."""
    d = tl.arange(0, DEPTH)
    number = some + d // RANK
    own = (slot[:, None] == number[None, :] + 1) & (d % RANK < rank)[None, :]
    return number * low + d % RANK, own


@triton.jit
def _weights(b, row, place, own, role, across, rank):
    """B [ROWS, DEPTH] of these outputs, each of its role, and of slots that are somebody's own."""
    used = tl.max(own.to(tl.int32), 0) > 0
    begin = row.to(tl.int64) * across + role * rank
    return tl.load(b + begin[:, None] + place[None, :], mask=used[None, :], other=0.0)


@triton.jit
def _added(line, own, weights, role, rank):
    """[TOKENS, ROWS] float32. line: of each token the columns of the first role; role: of each of
    the outputs whose B `weights` has."""
    added = tl.zeros((own.shape[0], role.shape[0]), tl.float32)
    for one in tl.range(tl.min(role, 0), tl.max(role, 0) + 1, num_stages=1):
        sums = tl.load(line + one * rank, mask=own, other=0.0)
        product = tl.dot(sums, tl.trans(weights), input_precision="ieee")
        added += tl.where((role == one)[None, :], product, 0.0)
    return added
