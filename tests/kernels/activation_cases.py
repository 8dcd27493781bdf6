"""Activations by hand, in float64, on any device."""

from __future__ import annotations

from typing import Any

import torch

from tests.kernels.norm_cases import draw


def check_activate(
    activation: Any, name: str, gated: bool, tokens: int, columns: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> None:  # fmt: skip
    """`columns` of the result."""
    torch.manual_seed(0)
    x = 3 * draw(tokens, columns * 2 if gated else columns, dtype=dtype, device=device)
    gate = x[:, :columns].double()
    expected = gate.relu().square() if name == "relu2" else gate * torch.sigmoid(gate)
    if gated:
        expected = expected * x[:, columns:].double()
    y = activation.activate(x, name, gated)
    assert y.dtype == dtype
    # Twice 2^-7: Triton's interpreter rounds to bfloat16 towards zero.
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y.double(), expected, atol=1e-6, rtol=rounding)
