"""The norms by hand, in float64, on any device. Inputs are columns of wider tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPS = 1e-3  # large enough to show


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", scale: float = 1.0) -> Tensor:
    """Strided rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=dtype, device=device)
    wide[..., 8:-8] = scale * torch.randn(shape, device=device)
    return wide[..., 8:-8]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 0) -> None:
    """Within so many `roundings` to bfloat16: by up to 2^-8 each, but in Triton's interpreter,
    which rounds towards zero, by up to 2^-7."""
    assert actual.dtype == dtype
    unit = 2**-8 if actual.is_cuda else 2**-7
    torch.testing.assert_close(
        actual.double(), expected, atol=1e-6, rtol=1e-5 + 1.01 * roundings * unit
    )


def roundings(weight_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
    """To bfloat16: of the input, of the norm and of its product with the weights; of float32
    weights only of the output."""
    return 3 if weight_dtype == torch.bfloat16 else int(out_dtype == torch.bfloat16)


def check_rms_norm(
    norm: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None,
    device: str = "cpu", by_head: bool = False,
) -> None:  # fmt: skip
    weight_dtype = weight_dtype or dtype
    torch.manual_seed(0)
    x = draw(*shape, dtype=dtype, device=device)
    weight = draw(shape[-1], dtype=weight_dtype, device=device)
    if by_head:
        weight = draw(*shape[1:], dtype=weight_dtype, device=device).contiguous()
    given, out_dtype = out_dtype, out_dtype or weight_dtype
    y, expected = norm.rms_norm(x, weight, EPS, given), normed(x.double(), weight)
    close(y, expected, out_dtype, roundings(weight_dtype, out_dtype))


def check_l2_clip(
    norm: Any, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    """Of vectors that are too long, by little or by much, of others, and of one of zeros."""
    torch.manual_seed(0)
    x = draw(*shape, dtype=dtype, device=device)
    x *= torch.linspace(0, 3, shape[0], device=device)[:, None, None].to(dtype)
    scale = draw(*shape[1:], dtype=dtype, device=device).contiguous()
    most = float(shape[2]) ** 0.5
    for own in (scale, None):
        y = x.double() if own is None else x.double() * own.double()
        length = y.norm(dim=-1, keepdim=True)
        expected = torch.where(length > most, y * (most / (length + 1e-6)), y)
        found = norm.l2_clip(x, own, most)
        close(found, expected, dtype, int(dtype == torch.bfloat16))
        assert found.is_contiguous()
        if shape[0] > 1:
            assert torch.equal(norm.l2_clip(x[-1:], own, most), found[-1:])


def check_add_rms_norm(
    norm: Any, tokens: int, size: int, dtype: torch.dtype = torch.float32,
    residual_dtype: torch.dtype | None = None, weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None, device: str = "cpu",
) -> None:  # fmt: skip
    residual_dtype, weight_dtype = residual_dtype or dtype, weight_dtype or dtype
    torch.manual_seed(0)
    x = draw(tokens, size, dtype=dtype, device=device)
    residual = draw(tokens, size, dtype=residual_dtype, device=device)
    weight = draw(size, dtype=weight_dtype, device=device)
    expected = residual.double() + 0.22 * x.double()
    given, out_dtype = out_dtype, out_dtype or weight_dtype
    y, total = norm.add_rms_norm(x, residual, 0.22, weight, EPS, given)
    close(total, expected, residual_dtype, int(residual_dtype == torch.bfloat16))
    # Of the sum as it is kept.
    expected = normed(total.double(), weight)
    close(y, expected, out_dtype, roundings(weight_dtype, out_dtype))


def check_gated_rms_norm(
    norm: Any, tokens: int, groups: int, size: int, dtype: torch.dtype = torch.float32,
    norm_first: bool = False, device: str = "cpu", activation: str = "silu",
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x = draw(tokens, groups * size, dtype=dtype, device=device)
    gate = draw(tokens, groups * size + 8, dtype=dtype, device=device, scale=3)[:, :-8]
    weight = draw(groups * size, dtype=dtype, device=device)
    gates = torch.sigmoid(gate.double())
    if activation == "silu":
        gates *= gate.double()
    inputs = x.double() if norm_first else x.double() * gates
    expected = normed(inputs.view(tokens, groups, size), weight.view(groups, size)).flatten(1)
    if norm_first:
        expected *= gates
    y = norm.gated_rms_norm(x, gate, weight, size, EPS, norm_first, None, activation)
    close(y, expected, dtype, roundings(dtype, dtype))


def check_rms_norm_parts(
    norm: Any,
    tokens: int,
    sections: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    torch.manual_seed(0)
    x = draw(tokens, sum(sections), dtype=dtype, device=device)
    weight = torch.randn(sum(sections), device=device).to(dtype)
    y = norm.rms_norm_parts(x, sections, weight, EPS)
    parts = zip(x.double().split(sections, dim=1), weight.split(sections), strict=True)
    expected = torch.cat([normed(part, own) for part, own in parts], dim=1)
    close(y, expected, dtype, roundings(dtype, dtype))
    assert y.is_contiguous()
