"""Activations in Triton; the call, its meaning and its roundings are those of reference.py."""

# Kernels are typed by their launches: only constexpr arguments are annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import ACTIVATIONS


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """act(x), or, where `gated`, act(first half of the columns) * second half.

    x [tokens, columns] (rows may be strided) -> [tokens, columns or columns / 2] in x's dtype;
    `activation` is a key of ACTIVATIONS.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    # Small blocks where there are few elements, so that the device is filled.
    return _launch(x, activation, gated, block=1024 if x.numel() >= 2**20 else 256)


def _launch(x: Tensor, activation: str, gated: bool, block: int, per_thread: int = 8) -> Tensor:
    tokens, columns = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    block = min(block, triton.next_power_of_2(columns))
    out = x.new_empty((tokens, columns))
    if tokens:
        _activate_kernel[(tokens * triton.cdiv(columns, block),)](
            x, out, columns, x.stride(0), ACTIVATION=activation, GATED=gated,
            BLOCK=block, num_warps=max(block // (32 * per_thread), 1),
        )  # fmt: skip
    return out


@triton.jit
def _activate_kernel(
    x, out, columns, x_row,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
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
    else:
        tl.static_assert(ACTIVATION == "silu", "this activation has no Triton code yet")
        values = values * tl.sigmoid(values)
    if GATED:
        up = tl.load(x + row * x_row + columns + column, mask=mask, other=0)
        values = values.to(inputs.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * columns + column, values, mask=mask)
