"""Norms and activations that leave their result rounded for the linear layers that read it: as if
it was rounded afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.linear import reference
from megatron_hybrid.kernels.linear.formats import WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, QuantizedRows, Reader

READERS = {
    "fp8, a scale a row": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8, a scale for 128 columns": WeightFormat("float8_e4m3fn", 128, 128, activations="group"),
    "fp8, a constant scale": WeightFormat("float8_e4m3fn", activations="tensor"),
    "int8, a scale a row": WeightFormat("int8", activations="token"),
}


def check_rounded(
    call: Callable[[Reader | None], Any],
    format: WeightFormat,
    *,
    plain: bool,
    device: str | torch.device = "cpu",
    differing: float = 0.0,
) -> None:
    """`call`: with a reader, and without, which gives what is to be rounded. `differing`: the share
    of the values that may differ.

    None has to: the kernels divide as torch does. Of values in bfloat16 that are divided by the
    largest / 448, half a percent are right between two of float8, in some rows several percent:
    where they go is decided by the last bits of quotients and scales."""
    into = Reader(format, torch.tensor(0.02, device=device), plain)
    unrounded = _result(call(None))
    assert isinstance(unrounded, Tensor)
    rows = _result(call(into))
    assert isinstance(rows, QuantizedRows)
    expected = reference.quantize_rows(unrounded, format, into.input_scale)
    torch.testing.assert_close(rows.scale, expected.scale, rtol=0, atol=0)
    found, wanted = rows.values.float(), expected.values.float()
    share, apart = float((found != wanted).float().mean()), float((found - wanted).abs().max())
    assert share <= differing, f"{share:.2%} of the values differ, by {apart} at most"
    assert rows.dtype == unrounded.dtype
    if plain:
        assert rows.plain is not None
        assert torch.equal(rows.plain, unrounded)
    else:
        assert rows.plain is None


def _result(found: Any) -> Inputs:
    result: Inputs = found[0] if isinstance(found, tuple) and len(found) == 2 else found
    return result


def calls(
    norm: Any, activation: Any, tokens: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Callable[[Reader | None], Any]]:
    """Everything that can leave its result rounded, on the same random inputs."""
    generator = torch.Generator().manual_seed(size)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, residual, weight = drawn(tokens, size), drawn(tokens, size), drawn(size)
    wide = drawn(tokens, 2 * size)
    return {
        "add_rms_norm": lambda into: norm.add_rms_norm(
            x, residual.clone(), 1.0, weight, 1e-5, dtype, into
        ),
        "gated_rms_norm": lambda into: norm.gated_rms_norm(
            x, residual, weight, size // 2, 1e-5, False, into
        ),
        "gated_rms_norm of a whole row": lambda into: norm.gated_rms_norm(
            x, residual, weight, size, 1e-5, True, into
        ),
        "activate": lambda into: activation.activate(x, "relu2", False, into),
        "activate with a gate": lambda into: activation.activate(wide, "silu", True, into),
        "gate": lambda into: activation.gate(x, residual, "sigmoid", into),
    }


CALLS = tuple(calls(None, None, 1, 2, torch.float32))
