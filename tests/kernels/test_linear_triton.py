"""The Triton products with quantised weights in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.kernels.linear_cases import (
    FORMATS,
    check_multiply,
    check_one_row,
    check_one_row_activated,
    check_quantize_rows,
    some_weight,
)

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from megatron_hybrid.kernels.linear import triton as linear  # noqa: E402
from megatron_hybrid.kernels.linear.products import written_out  # noqa: E402


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(0, 16, 256), (1, 48, 256), (3, 70, 160), (18, 33, 512)]
)
def test_every_format(name: str, tokens: int, rows: int, columns: int) -> None:
    check_multiply(linear, FORMATS[name], tokens, rows, columns, torch.float32, bias=tokens == 3)


QUANTIZE = [name for name, format in FORMATS.items() if format.activations != "none"]


@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "columns"), [(0, 64), (1, 160), (5, 300)])
def test_inputs_are_rounded_alike(name: str, dtype: torch.dtype, tokens: int, columns: int) -> None:
    # The interpreter does not carry from a mantissa of float8 that is rounded up to its exponent.
    differing = 0.1 if FORMATS[name].numbers == "float8_e4m3fn" else 0.001
    check_quantize_rows(linear, FORMATS[name], tokens, columns, dtype, differing=differing)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (70, 160)])
def test_written_out(name: str, rows: int, columns: int) -> None:
    weight = some_weight(FORMATS[name], rows, columns)
    expected = weight.dequantize()
    torch.testing.assert_close(written_out(weight, torch.float32), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(3, 16), (70, 1000), (1030, 96), (8200, 24)])
def test_one_row_in_16_bits(rows: int, columns: int, has_bias: bool) -> None:
    check_one_row(linear, rows, columns, has_bias, torch.float16)


@pytest.mark.parametrize(
    ("activation", "gated", "has_bias"),
    [("silu", True, False), ("gelu", True, True), ("relu2", False, True), ("none", True, False)],
)
@pytest.mark.parametrize(("rows", "columns"), [(6, 16), (70, 1000), (1030, 96), (8200, 24)])
def test_activations_of_one_row(
    rows: int, columns: int, activation: str, gated: bool, has_bias: bool
) -> None:
    check_one_row_activated(linear, rows, columns, has_bias, activation, gated, torch.float16)
