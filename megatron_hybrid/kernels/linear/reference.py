"""Products with quantised weights in plain torch: the meaning, and what a CPU runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.linear.formats import FP8_MAX, Weight, WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, QuantizedRows, Reader


def quantize_rows(x: Tensor, format: WeightFormat, input_scale: Tensor | None) -> QuantizedRows:
    """As in Linear."""
    values, largest = x.float(), FP8_MAX if format.numbers == "float8_e4m3fn" else 127.0
    group = x.shape[1]
    if format.activations == "group":
        assert format.columns is not None
        group = format.columns
    padded = F.pad(values, (0, -values.shape[1] % group)).unflatten(1, (-1, group))
    if format.activations == "tensor":
        assert input_scale is not None
        scale = input_scale.expand(len(x), 1)
    else:
        # By a tensor: GPUs multiply by the inverse of a number on the host, which rounds twice.
        scale = padded.abs().amax(-1) / values.new_full((), largest)
        scale = torch.where(scale > 0, scale, 1)
    numbers = (padded / scale[:, :, None]).flatten(1)[:, : x.shape[1]]
    if format.numbers == "int8":
        return QuantizedRows(numbers.round().clamp(-127, 127).to(torch.int8), scale, x.dtype)
    rounded = numbers.clamp(-largest, largest).to(torch.float8_e4m3fn)
    return QuantizedRows(rounded, scale, x.dtype)


def rounded(x: Tensor, into: Reader | None) -> Inputs:
    """A result as who reads it takes it."""
    if into is None:
        return x
    rows = quantize_rows(x, into.format, into.input_scale)
    return rows._replace(plain=x if into.plain else None)


def weights_changed() -> None:
    """Nothing is kept of weights."""


PlainProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def multiply(
    x: Inputs, weight: Weight, bias: Tensor | None = None, linear: PlainProduct = F.linear
) -> Tensor:
    """As in Linear. `linear`: x W^T + bias of numbers in one type."""
    if isinstance(weight, Tensor):
        return linear(plain_rows(x), weight, bias)
    format, dtype = weight.format, x.dtype
    if format.activations == "none":
        values = plain_rows(x)
    else:
        if isinstance(x, Tensor):
            x = quantize_rows(x, format, weight.input_scale)
        values, scale = x.values.float(), x.scale
        if format.activations == "group" and format.columns is not None:
            scale = scale.repeat_interleave(format.columns, 1)[:, : values.shape[1]]
        values = values * scale
    y = linear(values.float(), weight.dequantize(), None if bias is None else bias.float())
    return y.to(dtype)


def multiply_activated(
    x: Inputs, weight: Weight, bias: Tensor | None, activation: str, gated: bool
) -> None:
    """One after the other."""


def plain_rows(x: Inputs) -> Tensor:
    """Inputs before they were quantised."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None
    return x.plain
