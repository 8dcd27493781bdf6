"""What experts made of a token, added up in the order of their numbers: in float32, rounded once,
by a kernel of its own or by the norm that follows. A program has whole rows, or a part of one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts.protocol import SharedResult
from megatron_hybrid.kernels.experts.sums import gate_of
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2, triton_type
from megatron_hybrid.kernels.linear.rounding import Results
from megatron_hybrid.kernels.norm.triton import store_normed_sum, warps_for
from megatron_hybrid.kernels.protocols import Inputs, Reader

_LAST = tl.constexpr(2**31 - 1)  # behind all experts


class OrderedParts(NamedTuple):
    """Of each token the sum of its pairs' parts, the lowest expert's first, and at last of what is
    `beside` them, times the sigmoid of x gate^T if there is a gate. An Unsummed."""

    parts: Tensor  # [tokens * chosen, width], in the order of `experts`
    experts: Tensor  # [tokens, chosen]
    num_experts: int = 0  # 0, or how many are here: parts of other ids are left out
    beside: Tensor | None = None  # [tokens, width]
    x: Tensor | None = None  # [tokens, width]
    gate: Tensor | None = None  # [1, width]

    def and_shared(self, shared: SharedResult, x: Tensor) -> OrderedParts:
        """With what an MLP has given that all tokens x [tokens, width], contiguous, go through."""
        return self._replace(beside=shared.values.contiguous(), x=x, gate=shared.gate)

    def sum(self) -> Tensor:
        """[tokens, width]"""
        (tokens, chosen), width = self.experts.shape, self.parts.shape[1]
        y = self.parts.new_empty(tokens, width)
        # Each program of a token computes the sigmoid: better there are few.
        block = min(next_power_of_2(width), 1024 if self.gate is None else 2048)
        if tokens:
            _sum_kernel[(tokens, cdiv(width, block))](
                self.parts, self.experts, self.beside, self.x, self.gate, y, chosen, width,
                self.num_experts, next_power_of_2(chosen), block, num_warps=4, **OPTIONS,
            )  # fmt: skip
        return y

    def add_rms_norm(
        self,
        residual: Tensor,
        multiplier: float,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype | None = None,
        into: Reader | None = None,
    ) -> tuple[Inputs, Tensor]:
        """As in Unsummed; the sum with the residual is in its place."""
        (tokens, chosen), width = self.experts.shape, self.parts.shape[1]
        out = torch.empty(tokens, width, dtype=dtype or weight.dtype, device=weight.device)
        results = Results(out, into)
        block = results.block(next_power_of_2(width), width)
        if tokens:
            _add_rms_norm_kernel[(tokens,)](
                self.parts, self.experts, self.beside, self.x, self.gate, residual, weight,
                *results.arguments, residual.stride(0), multiplier, eps, chosen, width,
                self.num_experts, next_power_of_2(chosen), triton_type(self.parts.dtype),
                results.kind, block, num_warps=warps_for(block), **OPTIONS,
            )  # fmt: skip
        return results.inputs, residual


@launched
def _sum_kernel(
    parts, experts, beside, x, gate, y, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Experts and x were there before the kernel that this one waits for.
    key = _keys(experts, token, CHOSEN, BLOCK_C)
    share = 1.0
    if gate is not None:
        share = gate_of(x + token * WIDTH, gate, WIDTH, BLOCK)
    wait_for_inputs()
    total = _total(parts, key, beside, share, token, column, CHOSEN, WIDTH, EXPERTS, BLOCK_C)
    let_next_start()
    tl.store(y + token * WIDTH + column, total.to(y.dtype.element_ty), mask=column < WIDTH)


@launched
def _add_rms_norm_kernel(
    parts, experts, beside, x, gate, residual, weight, out, codes, scale, scale_row, scale_group,
    residual_row, multiplier, eps, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_C: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm's add_rms_norm of the sums, which are of this TYPE."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (column < WIDTH)[None, :]
    weights = tl.load(weight + column[None, :], mask=mask, other=0)
    # What follows, too, was there before the kernel that this one waits for.
    carried = tl.load(residual + token * residual_row + column[None, :], mask=mask, other=0)
    key = _keys(experts, token, CHOSEN, BLOCK_C)
    share = 1.0
    if gate is not None:
        share = gate_of(x + token * WIDTH, gate, WIDTH, BLOCK)
    wait_for_inputs()
    let_next_start()
    total = _total(parts, key, beside, share, token, column, CHOSEN, WIDTH, EXPERTS, BLOCK_C)
    mixed = total.to(TYPE).to(tl.float32)[None, :]
    store_normed_sum(
        mixed, carried, weights, residual, out, codes, scale, scale_row, scale_group, token,
        column[None, :], WIDTH, residual_row, multiplier, eps, TYPE, KIND, BLOCK,
    )  # fmt: skip


@triton.jit
def _keys(experts, token, CHOSEN: tl.constexpr, BLOCK_C: tl.constexpr):
    """[BLOCK_C] of a token's pairs, in the order of its experts and no two the same: an expert's
    number, and behind it the pair's place."""
    place = tl.arange(0, BLOCK_C)
    number = tl.load(experts + token * CHOSEN + place, mask=place < CHOSEN, other=0).to(tl.int32)
    return tl.where(place < CHOSEN, number * BLOCK_C + place, _LAST)


@triton.jit
def _total(
    parts, key, beside, share, token, column, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """These columns of a token's sum, zeros past the end. EXPERTS: 0, or how many there are: other
    ids' parts hold anything."""
    total = tl.zeros(column.shape, tl.float32)
    for _ in tl.static_range(CHOSEN):
        lowest = tl.min(key, axis=0)
        key = tl.where(key == lowest, _LAST, key)
        end = WIDTH
        if EXPERTS:
            end = tl.where(lowest // BLOCK_C < EXPERTS, WIDTH, 0)
        pair = token * CHOSEN + lowest % BLOCK_C
        part = tl.load(parts + pair * WIDTH + column, mask=column < end, other=0.0)
        total += part.to(tl.float32)
    if beside is not None:
        more = tl.load(beside + token * WIDTH + column, mask=column < WIDTH, other=0.0)
        total += more.to(tl.float32) * share
    return total
