"""Activations in Triton; the meaning and the roundings are reference.py's."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import ACTIVATIONS


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """As in Activation."""
    half = x.shape[1] // 2
    if gated:
        return _launch(x[:, :half], x[:, half:], activation)
    return _launch(x, None, activation)


def gate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """As in Activation."""
    return _launch(gate, x, activation)


def _launch(x: Tensor, factor: Tensor | None, activation: str) -> Tensor:
    """act(x) * factor."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    tokens, columns = x.shape
    # Few columns a program where there are few elements, so that the device is filled.
    block = min(1024 if x.numel() >= 2**20 else 256, triton.next_power_of_2(columns))
    out = x.new_empty((tokens, columns))
    if tokens:
        _activate_kernel[(tokens * triton.cdiv(columns, block),)](
            x, factor, out, columns, x.stride(0), 0 if factor is None else factor.stride(0),
            ACTIVATION=activation,
            BLOCK=block, num_warps=max(block // 256, 1),
        )  # fmt: skip
    return out


@triton.jit
def _activate_kernel(
    x, factor, out, columns, x_row, factor_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    inputs = tl.load(x + row * x_row + column, mask=mask, other=0)
    values = inputs.to(tl.float32)
    if ACTIVATION == "relu2":
        values = tl.where(values < 0, 0, values)  # not maximum: NaN stays NaN
        values = values * values
    elif ACTIVATION == "gelu":
        values = 0.5 * values * (1 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == "sigmoid":
        values = tl.sigmoid(values)
    else:
        tl.static_assert(ACTIVATION == "silu", "this activation has no Triton code yet")
        values = values * tl.sigmoid(values)
    if factor is not None:
        factors = tl.load(factor + row * factor_row + column, mask=mask, other=0)
        values = values.to(inputs.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + row * columns + column, values, mask=mask)
