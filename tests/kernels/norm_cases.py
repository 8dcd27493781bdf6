"""The norms by hand, in float64, on any device. Inputs are columns of wider tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPS = 1e-3  # large enough to show


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Strided rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=dtype, device=device)
    wide[..., 8:-8] = torch.randn(shape, device=device)
    return wide[..., 8:-8]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the roundings of a norm in `dtype`; Triton's interpreter rounds to bfloat16 towards
    zero, by up to 2^-7."""
    assert actual.dtype == dtype
    tolerance = {"atol": 1e-6, "rtol": 2e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(actual.double(), expected, **tolerance)


def check_rms_norm(
    norm: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None, device: str = "cpu",
) -> None:  # fmt: skip
    weight_dtype = weight_dtype or dtype
    torch.manual_seed(0)
    x = draw(*shape, dtype=dtype, device=device)
    weight = draw(shape[-1], dtype=weight_dtype, device=device)
    close(norm.rms_norm(x, weight, EPS), normed(x.double(), weight), weight_dtype)


def check_add_rms_norm(
    norm: Any, tokens: int, size: int, dtype: torch.dtype = torch.float32,
    residual_dtype: torch.dtype | None = None, device: str = "cpu",
) -> None:  # fmt: skip
    residual_dtype = residual_dtype or dtype
    torch.manual_seed(0)
    x = draw(tokens, size, dtype=dtype, device=device)
    residual = draw(tokens, size, dtype=residual_dtype, device=device)
    weight = draw(size, dtype=dtype, device=device)
    expected = residual.double() + 0.22 * x.double()
    y, total = norm.add_rms_norm(x, residual, 0.22, weight, EPS)
    assert total.dtype == residual_dtype
    rounding = 4e-3 if residual_dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(total.double(), expected, atol=rounding, rtol=rounding)
    close(y, normed(total.double(), weight), dtype)  # of the sum as it is kept


def check_gated_rms_norm(
    norm: Any, tokens: int, groups: int, size: int, dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x = draw(tokens, groups * size, dtype=dtype, device=device)
    gate = 3 * draw(tokens, groups * size + 8, dtype=dtype, device=device)[:, :-8]
    weight = draw(groups * size, dtype=dtype, device=device)
    gated = x.double() * gate.double() * torch.sigmoid(gate.double())
    expected = normed(gated.view(tokens, groups, size), weight.view(groups, size)).flatten(1)
    close(norm.gated_rms_norm(x, gate, weight, size, EPS), expected, dtype)
