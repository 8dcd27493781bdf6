"""Experts with adapters, in Triton: one product after the other, so that what adapters add can come
in between. Pairs of a token and an expert, sorted by expert: see triton.py."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.triton import activate
from megatron_hybrid.kernels.experts.pairs import Groups, group
from megatron_hybrid.kernels.experts.protocol import ExpertAdapters, ExpertWeights
from megatron_hybrid.kernels.experts.sums import PairParts
from megatron_hybrid.kernels.launching import cdiv, launched
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.lora.triton import add_to_pairs
from megatron_hybrid.kernels.protocols import Inputs

_ROWS, _COLUMNS, _DEPTH = 16, 64, 64  # of a tile: pairs, rows of the weight, what is added up


def mix(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    adapters: ExpertAdapters,
) -> Tensor:
    """Experts.mix_adapted of weights in 16 or 32 bits."""
    plain = plain_rows(x).contiguous()
    if not len(plain):
        return plain
    assert isinstance(layer.up, Tensor) and isinstance(layer.down, Tensor)
    experts, chosen = experts.contiguous(), experts.shape[1]
    groups = group(experts, layer.up.shape[0], _ROWS)
    inner = _products(plain, layer.up, groups, chosen)
    add_to_pairs(inner, plain, adapters.up, adapters.slots, groups, _ROWS, chosen, chosen)
    hidden = activate(inner, layer.activation, layer.gated)
    assert isinstance(hidden, Tensor)
    outer = _products(hidden, layer.down, groups, 1)
    add_to_pairs(outer, hidden, adapters.down, adapters.slots, groups, _ROWS, chosen, 1)
    parts = (outer.float() * weights.flatten()[:, None]).to(outer.dtype)
    return PairParts(parts, experts, layer.up.shape[0] if layer.elsewhere else 0).sum()


def _products(x: Tensor, weight: Tensor, groups: Groups, each: int) -> Tensor:
    """weight[e] x of every pair, in the order of pairs: x [pairs / each, K], weight
    [experts, N, K] -> [pairs, N]; nothing of pairs in no block."""
    pairs, (_, rows, columns) = len(groups.order), weight.shape
    y = x.new_empty(pairs, rows)
    blocks = groups.blocks.shape[1]
    _product_kernel[(cdiv(rows, _COLUMNS), blocks)](
        x, weight, y, groups.order, groups.blocks, blocks, rows, columns, each,
        _ROWS, _COLUMNS, _DEPTH, num_warps=4,
    )  # fmt: skip
    return y


@launched(do_not_specialize=["num_blocks"])
def _product_kernel(
    x, weight, y, order, blocks, num_blocks, rows, columns, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(blocks + block).to(tl.int64)
    begin = tl.load(blocks + num_blocks + block)
    end = tl.load(blocks + 2 * num_blocks + block)
    if begin < end:
        row = begin + tl.arange(0, ROWS)
        pair = tl.load(order + row, mask=row < end, other=0).to(tl.int64)
        valid = (row < end)[:, None]
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        below = weight + (expert * rows + tl.minimum(n, rows - 1))[:, None] * columns
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.range(0, columns, DEPTH, num_stages=3):
            k = start + tl.arange(0, DEPTH)
            there = (k < columns)[None, :]
            values = tl.load(
                x + (pair // each)[:, None] * columns + k[None, :], mask=valid & there, other=0.0
            )
            numbers = tl.load(below + k[None, :], mask=there, other=0.0)
            total = tl.dot(values, tl.trans(numbers), total, input_precision="ieee")
        target = y + pair[:, None] * rows + n[None, :]
        tl.store(target, total.to(y.dtype.element_ty), mask=valid & (n < rows)[None, :])
