"""Activations in Triton; the meaning and the roundings are reference.py's."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import ACTIVATIONS, caps_of, limit_of
from megatron_hybrid.kernels.dependent_launch import OPTIONS, let_next_start, wait_for_inputs
from megatron_hybrid.kernels.launching import cdiv, launched, next_power_of_2
from megatron_hybrid.kernels.linear.rounding import Results, store_rounded
from megatron_hybrid.kernels.protocols import Inputs, Reader


def activate(x: Tensor, activation: str, gated: bool, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    half = x.shape[1] // 2
    if gated:
        return _launch(x[:, :half], x[:, half:], activation, into)
    return _launch(x, None, activation, into)


def gate(x: Tensor, gate: Tensor, activation: str, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    return _launch(gate, x, activation, into)


def _launch(x: Tensor, factor: Tensor | None, activation: str, into: Reader | None) -> Inputs:
    """act(x) * factor."""
    bounded = limit_of(activation) is not None or caps_of(activation) is not None
    if activation not in ACTIVATIONS and (factor is None or not bounded):
        raise ValueError(f"activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    tokens, columns = x.shape
    # Few columns a program where there are few elements, so that the device is filled.
    block = min(1024 if x.numel() >= 2**20 else 256, next_power_of_2(columns))
    results = Results(x.new_empty((tokens, columns)), into)
    block, warps = results.block(block, columns), max(block // 256, 1)
    if tokens:
        _activate_kernel[(tokens * cdiv(columns, block),)](
            x, factor, *results.arguments, columns,
            x.stride(0), 0 if factor is None else factor.stride(0), results.kind,
            ACTIVATION=activation,
            BLOCK=block, num_warps=min(max(block // 1024, warps), 32), **OPTIONS,
        )  # fmt: skip
    return results.inputs


@launched
def _activate_kernel(
    x, factor, out, codes, scale, scale_row, scale_group, columns, x_row, factor_row,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < columns
    inputs = tl.load(x + row * x_row + column, mask=mask, other=0)
    values = inputs.to(tl.float32)
    values = apply_activation(values, ACTIVATION)
    if factor is not None:
        factors = tl.load(factor + row * factor_row + column, mask=mask, other=0)
        factors = limited(factors.to(tl.float32), ACTIVATION)
        values = values.to(inputs.dtype).to(tl.float32) * factors
    if out is not None:
        tl.store(out + row * columns + column, values, mask=mask)
    if KIND is not None:
        values = values.to(inputs.dtype).to(tl.float32)
        store_rounded(
            values, codes + row * columns, scale + row * scale_row, scale_group, first, columns,
            KIND, BLOCK,
        )  # fmt: skip


@triton.constexpr_function
def _limit(activation):
    """As limit_of, which the compiler does not know; 0: none."""
    return float(activation[8:]) if activation.startswith("silu_to_") else 0.0


@triton.constexpr_function
def _cap(activation, which):
    """The first or second of caps_of; 0: none."""
    is_capped = activation.startswith("silu_capped_")
    return float(activation[12:].split("_")[which]) if is_capped else 0.0


@triton.jit
def soft_capped(values, CAP: tl.constexpr):
    """CAP tanh(values / CAP), of small ones by the first terms of its series: nothing is left of
    them in a difference to 1."""
    x = values * (1 / CAP)
    square, zeros = x * x, tl.zeros_like(x)
    series = tl.fma(square, zeros - 17 / 315, zeros + 2 / 15)
    series = tl.fma(square, tl.fma(square, series, zeros - 1 / 3), zeros + 1.0)
    large = 2 * tl.sigmoid(2 * x) - 1
    return CAP * tl.where(square < 0.04, x * series, large)


@triton.jit
def limited(values, ACTIVATION: tl.constexpr):
    """What gates are multiplied with, float32; see limit_of and caps_of."""
    LIMIT: tl.constexpr = _limit(ACTIVATION)
    CAP: tl.constexpr = _cap(ACTIVATION, 1)
    if CAP > 0:
        values = soft_capped(values, CAP)
    if LIMIT > 0:
        values = tl.clamp(values, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return values


@triton.jit
def apply_activation(values, ACTIVATION: tl.constexpr):
    """Of float32 values."""
    LIMIT: tl.constexpr = _limit(ACTIVATION)
    CAP: tl.constexpr = _cap(ACTIVATION, 0)
    if CAP > 0:
        values = soft_capped(values, CAP) * tl.sigmoid(values)
    elif LIMIT > 0:
        values = tl.minimum(values, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        values = values * tl.sigmoid(values)
    elif ACTIVATION == "relu2":
        values = tl.where(values < 0, 0, values)  # not maximum: NaN stays NaN
        values = values * values
    elif ACTIVATION == "gelu":
        values = 0.5 * values * (1 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (values + 0.044715 * values * values * values)
        values = values * tl.sigmoid(inner)
    elif ACTIVATION == "sigmoid":
        values = tl.sigmoid(values)
    elif ACTIVATION == "silu":
        values = values * tl.sigmoid(values)
    else:
        tl.static_assert(ACTIVATION == "none", "this activation has no Triton code yet")
    return values


@triton.jit
def activated_product(
    gates, values, kind: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr
):
    """Activation.activate in the kernel that made the product: of its sums in float32, rounded to
    `kind` where two kernels would round. gates: the first half's, if GATED."""
    if GATED:
        gates = apply_activation(gates.to(kind).to(tl.float32), ACTIVATION)
        values = limited(values.to(kind).to(tl.float32), ACTIVATION)
        values = gates.to(kind).to(tl.float32) * values
    elif ACTIVATION != "none":
        values = apply_activation(values.to(kind).to(tl.float32), ACTIVATION)
    return values.to(kind)
