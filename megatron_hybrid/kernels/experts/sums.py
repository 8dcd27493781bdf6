"""What experts made of the pairs of a token and an expert, added up for each token: by a kernel of
its own, or by the norm that follows, which spares a kernel and what goes between the two."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.experts.protocol import SharedResult
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2, triton_type
from megatron_hybrid.kernels.linear.rounding import Results
from megatron_hybrid.kernels.norm.triton import store_normed_sum, warps_for
from megatron_hybrid.kernels.protocols import Inputs, Reader


class PairParts(NamedTuple):
    """Of each token the sum of its pairs' parts, and of what is `beside` them, times the sigmoid of
    x gate^T if there is a gate. An Unsummed."""

    parts: Tensor  # [tokens * chosen, width]
    experts: Tensor | None = None  # [tokens, chosen]; None: a token has one part
    num_experts: int = 0  # 0, or how many are here: parts of other ids are left out
    beside: Tensor | None = None  # [slices, tokens, width]
    x: Tensor | None = None  # [tokens, width]
    gate: Tensor | None = None  # [1, width]
    dtype: torch.dtype | None = None  # of the sum; None: as the parts

    def and_shared(self, shared: SharedResult, x: Tensor) -> PairParts:
        """With what an MLP has given that all tokens x [tokens, width], contiguous, go through."""
        return self._replace(beside=shared.values.contiguous()[None], x=x, gate=shared.gate)

    def sum(self) -> Tensor:
        """[tokens, width]"""
        tokens, chosen, width = self._sizes
        y = self.parts.new_empty(tokens, width, dtype=self.dtype)
        # Each program of a token computes the sigmoid: better there are few.
        block = min(next_power_of_2(width), 1024 if self.gate is None else 2048)
        if tokens:
            _sum_kernel[(tokens, cdiv(width, block))](
                *self._arguments, y, tokens, self._slices, chosen, width, self.num_experts, block,
                num_warps=4, **OPTIONS,
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
        tokens, chosen, width = self._sizes
        out = torch.empty(tokens, width, dtype=dtype or weight.dtype, device=weight.device)
        results = Results(out, into)
        block = results.block(next_power_of_2(width), width)
        if tokens:
            _add_rms_norm_kernel[(tokens,)](
                *self._arguments, residual, weight, *results.arguments, tokens,
                residual.stride(0), multiplier, eps, self._slices, chosen, width,
                self.num_experts, triton_type(self.dtype or self.parts.dtype), results.kind,
                block, num_warps=warps_for(block), **OPTIONS,
            )  # fmt: skip
        return results.inputs, residual

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Tokens, their parts, width."""
        tokens, chosen = (len(self.parts), 1) if self.experts is None else self.experts.shape
        return tokens, chosen, self.parts.shape[1]

    @property
    def _slices(self) -> int:
        return 0 if self.beside is None else len(self.beside)

    @property
    def _arguments(self) -> tuple[Tensor | None, ...]:
        return self.parts, self.experts, self.beside, self.x, self.gate


@triton.jit
def gate_of(x, gate, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The sigmoid of the product of two rows."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inputs = tl.load(x + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        sums += inputs * tl.load(gate + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    return tl.sigmoid(tl.sum(sums, axis=0))


# Sizes that vary from step to step are not specialised, or a new one might compile a kernel again.


@launched(do_not_specialize=["tokens"])
def _sum_kernel(
    parts, experts, beside, x, gate, y, tokens, SLICES: tl.constexpr, CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    share = 1.0
    if gate is not None:
        # x was there before the kernel that this one waits for.
        share = gate_of(x + token * WIDTH, gate, WIDTH, BLOCK)
    wait_for_inputs()
    total = _total(
        parts, experts, beside, share, token, tokens, column, SLICES, CHOSEN, WIDTH, EXPERTS
    )
    let_next_start()
    tl.store(y + token * WIDTH + column, total.to(y.dtype.element_ty), mask=column < WIDTH)


@launched(do_not_specialize=["tokens"])
def _add_rms_norm_kernel(
    parts, experts, beside, x, gate, residual, weight, out, codes, scale, scale_row, scale_group,
    tokens, residual_row, multiplier, eps, SLICES: tl.constexpr, CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm's add_rms_norm of the sums, which are of this TYPE."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (column < WIDTH)[None, :]
    weights = tl.load(weight + column[None, :], mask=mask, other=0)
    # What follows, too, was there before the kernel that this one waits for.
    carried = tl.load(residual + token * residual_row + column[None, :], mask=mask, other=0)
    share = 1.0
    if gate is not None:
        share = gate_of(x + token * WIDTH, gate, WIDTH, BLOCK)
    wait_for_inputs()
    let_next_start()
    total = _total(
        parts, experts, beside, share, token, tokens, column, SLICES, CHOSEN, WIDTH, EXPERTS
    )
    mixed = total.to(TYPE).to(tl.float32)[None, :]
    store_normed_sum(
        mixed, carried, weights, residual, out, codes, scale, scale_row, scale_group, token,
        column[None, :], WIDTH, residual_row, multiplier, eps, TYPE, KIND, BLOCK,
    )  # fmt: skip


@triton.jit
def _total(
    parts, experts, beside, share, token, tokens, column, SLICES: tl.constexpr,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """These columns of a token's sum, zeros past the end. EXPERTS: 0, or how many there are: other
    ids' parts hold anything."""
    total = tl.zeros(column.shape, tl.float32)
    for j in tl.static_range(CHOSEN):
        pair = token * CHOSEN + j
        end = WIDTH
        if EXPERTS:
            end = tl.where(tl.load(experts + pair) < EXPERTS, WIDTH, 0)
        part = tl.load(parts + pair * WIDTH + column, mask=column < end, other=0.0)
        total += part.to(tl.float32)
    if beside is not None:
        more = tl.zeros(column.shape, tl.float32)
        for j in tl.static_range(SLICES):
            row = token + j * tokens
            part = tl.load(beside + row * WIDTH + column, mask=column < WIDTH, other=0.0)
            more += part.to(tl.float32)
        total += more * share
    return total
