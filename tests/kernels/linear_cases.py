"""Cases of products with quantised weights: an implementation against reference.py and, with
weights and inputs that a format holds exactly, against a plain product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.activation import reference as activations
from megatron_hybrid.kernels.linear import reference
from megatron_hybrid.kernels.linear.formats import QuantizedWeight, WeightFormat
from megatron_hybrid.kernels.protocols import Inputs, QuantizedRows

FORMATS = {
    "fp8 by row": WeightFormat("float8_e4m3fn", activations="token"),
    "fp8 by row, constant inputs": WeightFormat("float8_e4m3fn", activations="tensor"),
    "fp8 by block": WeightFormat("float8_e4m3fn", 128, 128, activations="group"),
    "fp8 by small block": WeightFormat("float8_e4m3fn", 32, 64, activations="group"),
    "fp8 by block, weights alone": WeightFormat("float8_e4m3fn", 128, 128),
    "int8": WeightFormat("int8", activations="token"),
    "4 bits": WeightFormat("uint4", 1, 128),
    "4 bits with zero points": WeightFormat("uint4", 1, 32, zero_points=True),
    "4 bits, a scale a row": WeightFormat("uint4"),
    "8 bits in groups": WeightFormat("uint8", 1, 32, zero_points=True),
    "fp4": WeightFormat("float4_e2m1", 1, 16),
}


def some_weight(
    format: WeightFormat, rows: int, columns: int, device: str | torch.device = "cpu"
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator)
    values[: rows // 3] *= 4  # scales that differ
    weight = format.quantize(values.to(device))
    if weight.row_scale is not None:  # Triton's interpreter reads float8 from 256 on as infinite
        halves = (weight.scale.float() / 2).to(weight.scale.dtype)
        weight = replace(weight, scale=halves, row_scale=weight.row_scale * 2)
    if weight.input_scale is not None:
        weight.input_scale.fill_(0.01)
    return weight


def some_inputs(
    tokens: int, columns: int, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + columns)
    x = torch.randn(tokens, columns + 16, generator=generator)[:, :columns]  # strided rows
    x *= torch.logspace(-2, 1, max(tokens, 1))[:tokens, None]
    return x.to(device, dtype)


def check_multiply(
    implementation: ModuleType,
    format: WeightFormat,
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    bias: bool = False,
    device: str | torch.device = "cpu",
) -> None:
    weight = some_weight(format, rows, columns, device)
    x = some_inputs(tokens, columns, dtype, device)
    added = torch.randn(rows).to(device, dtype) if bias else None
    inputs: Inputs = x
    if format.activations != "none":  # rounded once: a quotient between two codes may go to either
        inputs = reference.quantize_rows(x, format, weight.input_scale)
    expected = reference.multiply(inputs, weight, added)
    actual = implementation.multiply(inputs, weight, added)
    assert actual.dtype == dtype
    scale = max(float(expected.abs().max()), 1e-6) if expected.numel() else 1.0
    # in 16 bits weights of 4 bits are rounded once more, and so is the result
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


def check_quantize_rows(
    implementation: ModuleType,
    format: WeightFormat,
    tokens: int,
    columns: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    differing: float = 0.001,
) -> None:
    """`differing`: the share of codes that may be others: quotients between two of them."""
    x = some_inputs(tokens, columns, dtype, device)
    if tokens:
        x[-1] = 0  # a row without a largest value
    given = torch.tensor(0.01, device=device)
    expected = reference.quantize_rows(x, format, given)
    actual = implementation.quantize_rows(x, format, given)
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)
    differ = (actual.values.float() - expected.values.float()).abs()
    assert not differ.numel() or float((differ > 0).float().mean()) <= differing
    assert actual.dtype == expected.dtype == dtype


def check_one_row(
    kernels: ModuleType,
    rows: int,
    columns: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """A product with a weight in 16 bits, every second row of a larger one, against float64."""
    x, weight, bias = _one_row_case(rows, columns, has_bias, dtype, device)
    y = _on_poisoned_memory(lambda: kernels.multiply(x, weight, bias))
    _check_product(y, x, weight, bias)


def _check_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Against float64."""
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected = expected + bias.double()
    assert y.dtype == x.dtype
    limit = 2 * torch.finfo(x.dtype).eps
    assert ((y - expected).abs() <= limit * expected.abs() + 1e-4 * x.shape[1] ** 0.5).all()


def check_one_row_activated(
    kernels: ModuleType,
    rows: int,
    columns: int,
    has_bias: bool,
    activation: str,
    gated: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """The same with an activation behind it: bit for bit that of the rounded product."""
    x, weight, bias = _one_row_case(rows, columns, has_bias, dtype, device)
    y = _on_poisoned_memory(lambda: kernels.multiply_activated(x, weight, bias, activation, gated))
    _check_activated(y, kernels.multiply(x, weight, bias), activation, gated)


def _check_activated(y: Tensor, product: Tensor, activation: str, gated: bool) -> Tensor:
    """Against float64, which is returned."""
    dtype = product.dtype
    gate, up = product.chunk(2, dim=1) if gated else (product, None)
    if (most := activations.limit_of(activation)) is not None and up is not None:
        gate, up, activation = gate.clamp(max=most), up.clamp(-most, most), "silu"
    expected = reference.plain_rows(activations.activate(gate.double(), activation, False))
    if up is not None:  # the activation is rounded before the product
        expected = expected.to(dtype).double() * up
    assert y.shape == expected.shape
    assert y.dtype == dtype
    limit = torch.finfo(dtype).eps * (2 if gated else 1)  # exp is not the same everywhere
    assert ((y - expected).abs() <= limit * expected.abs() + 1e-4).all()
    return expected


def _one_row_case(
    rows: int, columns: int, has_bias: bool, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, weight = normal(1, columns), normal(2 * rows, columns)[::2]
    return x, weight, normal(rows) if has_bias else None


def check_one_row_bytes(
    one_row_bytes: ModuleType,
    format: WeightFormat,
    rows: int,
    columns: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    tile: Any = None,
) -> None:
    """one_row_bytes.multiply against float64; NaN, or int8's largest, lie around inputs, weight and
    scales, and NaN in memory that it writes."""
    x, weight, bias = _one_row_bytes_case(format, rows, columns, has_bias, dtype, device)
    y = _on_poisoned_memory(lambda: one_row_bytes.multiply(x, weight, bias, tile))
    scale = x.scale.double().repeat_interleave(format.columns or columns, 1)[:, :columns]
    inputs, numbers = x.values.double() * scale, weight.dequantize(torch.float64)
    expected, products = inputs @ numbers.t(), inputs.abs() @ numbers.abs().t()
    if bias is not None:
        expected = expected + bias.double()
    assert y.shape == (1, rows)
    assert y.dtype == dtype
    limit = torch.finfo(dtype).eps * expected.abs() + 1e-6 * products
    assert ((y - expected).abs() <= limit).all()


def _one_row_bytes_case(
    format: WeightFormat, rows: int, columns: int, has_bias: bool, dtype: torch.dtype, device: str
) -> tuple[QuantizedRows, QuantizedWeight, Tensor | None]:
    weight = some_weight(format, rows, columns, device)
    plain = some_inputs(1, columns, dtype, device)
    x = reference.quantize_rows(plain, format, weight.input_scale)
    scale = x.scale
    if format.activations == "group":  # groups are not side by side
        scale = _among_nan(scale.t().contiguous(), 1, 3).t()
    x = x._replace(values=_among_nan(x.values, 1, 16), scale=scale)
    weight = replace(
        weight, values=_among_nan(weight.values, 2, 16), scale=_among_nan(weight.scale, 1, 1)
    )
    generator = torch.Generator().manual_seed(rows + columns)
    bias = torch.randn(rows, generator=generator).to(device, dtype) if has_bias else None
    return x, weight, bias


def _among_nan(values: Tensor, every: int, more: int) -> Tensor:
    """A copy as every so-manieth row of a larger one, which has so many columns more."""
    count, columns = values.shape
    nan = 127 if values.dtype == torch.int8 else torch.nan
    wide = torch.full((every * count, columns + more), nan, device=values.device)
    view = wide.to(values.dtype)[::every, :columns]
    return view.copy_(values)


def check_few_rows(
    few_rows: ModuleType,
    tokens: int,
    rows: int,
    columns: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    tile: Any = None,
) -> None:
    """few_rows.multiply with a weight in 16 bits, every second row of a larger one, against
    float64; NaN lie around inputs and weight, and in memory that it writes."""
    x, weight, bias = few_rows_case(tokens, rows, columns, has_bias, dtype, device)
    y = _on_poisoned_memory(lambda: few_rows.multiply(x, weight, bias, tile))
    assert y.shape == (tokens, rows)
    _check_product(y, x, weight, bias)
    assert not few_rows.counters(y.device).any()


def check_few_rows_activated(
    few_rows: ModuleType,
    tokens: int,
    rows: int,
    columns: int,
    has_bias: bool,
    activation: str,
    gated: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """The same with an activation behind it: bit for bit that of the rounded product. Of numbers
    whose sums are exact in any order: what multiplies here does not keep to one."""
    x, weight, bias = few_rows_case(tokens, rows, columns, has_bias, dtype, device)
    x.round_()
    weight.mul_(4).round_().div_(64)
    y = _on_poisoned_memory(
        lambda: few_rows.multiply(x, weight, bias, activation=activation, gated=gated)
    )
    expected = _check_activated(y, few_rows.multiply(x, weight, bias), activation, gated)
    if activation in ("none", "relu2"):  # no exp
        assert torch.equal(y, expected.to(dtype))
    assert not few_rows.counters(y.device).any()


def check_few_rows_alone(
    few_rows: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Any = None
) -> None:
    """A token's bits are the same in any row and among any number of others."""
    whole = few_rows.multiply(x, weight, bias, tile)
    generator = torch.Generator().manual_seed(weight.shape[1])
    for count in (2, 3, 16, 17, 32, 33):
        some = torch.randperm(len(x), generator=generator)[:count].to(x.device)
        assert torch.equal(few_rows.multiply(x[some], weight, bias, tile), whole[some])


def rounding_by_steps(tokens: int, rows: int, columns: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and a weight in float16, whose products' sums are integers: those of so many columns
    are exact in any order, but where they are added to what the first step gives, and the last one
    takes away, bits are lost."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randint(-4, 5, (count, columns), generator=generator).half()
        for count in (tokens, rows)
    )
    x[:, :step] = x[:, -step:] = 0
    x[:, 0] = x[:, -1] = weight[:, 0] = 2.0**14
    weight[:, -1] = -(2.0**14)
    return x, weight


def few_rows_case(
    tokens: int, rows: int, columns: int, has_bias: bool, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, weight and bias."""
    generator = torch.Generator(device).manual_seed(rows + tokens)

    def among_nan(count: int, every: int) -> Tensor:
        width = columns + 16 + -columns % 8  # rows begin at multiples of 16 bytes
        wide = torch.full((every * count, width), torch.nan, dtype=dtype, device=device)
        values = wide[::every, :columns]
        return values.copy_(torch.randn(values.shape, generator=generator, device=device))

    bias = torch.randn(rows, generator=generator, device=device).to(dtype) if has_bias else None
    return among_nan(tokens, 1), among_nan(rows, 2), bias


def _on_poisoned_memory(compute: Callable[[], Tensor]) -> Tensor:
    torch.set_deterministic_debug_mode("error")  # torch.empty gives NaN
    try:
        return compute()
    finally:
        torch.set_deterministic_debug_mode("default")
