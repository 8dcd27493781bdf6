"""Activations by hand, in float64, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.norm_cases import draw

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "none": lambda x: x,
    "silu_capped_1.5_2.5": lambda x: 1.5 * torch.tanh(x / 1.5) / (1 + torch.exp(-x)),
    "silu_to_1.5": lambda x: x.clamp(max=1.5) / (1 + torch.exp(-x.clamp(max=1.5))),
}
LIMITED, CAPPED = "silu_to_1.5", "silu_capped_1.5_2.5"  # with a gate alone
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    LIMITED: lambda x: x.clamp(-1.5, 1.5),
    CAPPED: lambda x: 2.5 * torch.tanh(x / 2.5),
}


def check_activate(
    activation: Any, name: str, gated: bool, tokens: int, columns: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> None:  # fmt: skip
    """`columns` of the result."""
    torch.manual_seed(0)
    wide = columns * 2 if gated else columns
    x = draw(tokens, wide, dtype=dtype, device=device, scale=3)
    expected = FORMULAS[name](x[:, :columns].double())
    if gated:
        factor = x[:, columns:].double()
        expected = expected * FACTORS.get(name, lambda x: x)(factor)
    close(activation.activate(x, name, gated), expected, name, dtype)


def check_gate(
    activation: Any, name: str, tokens: int, columns: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> None:  # fmt: skip
    """Both inputs are columns of wider tensors, which are of different widths."""
    torch.manual_seed(0)
    x = draw(tokens, columns, dtype=dtype, device=device, scale=3)
    gate = draw(tokens, columns + 8, dtype=dtype, device=device, scale=3)[:, :-8]
    expected = FORMULAS[name](gate.double()) * x.double()
    close(activation.gate(x, gate, name), expected, name, dtype)


def close(actual: Tensor, expected: Tensor, name: str, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    # Twice 2^-7: Triton's interpreter rounds to bfloat16 towards zero.
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    cancellation = 2e-5 if name == "gelu" else 1e-6  # 1 + erf(x), in float32
    torch.testing.assert_close(actual.double(), expected, atol=cancellation, rtol=rounding)
