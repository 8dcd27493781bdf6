"""Products with quantised weights on a GPU, against reference.py on the same device."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.linear_cases import (
    FORMATS,
    check_multiply,
    check_one_row,
    check_one_row_activated,
    check_quantize_rows,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.linear import triton as linear  # noqa: E402


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 65, 200, 300])
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (4096, 2048), (80, 160), (10304, 2688)])
def test_every_format(name: str, tokens: int, rows: int, columns: int) -> None:
    check_multiply(
        linear, FORMATS[name], tokens, rows, columns, torch.bfloat16, bias=tokens == 17,
        device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, format in FORMATS.items() if format.activations != "none"]
)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (5, 21504), (300, 300), (1000, 4096)])
def test_inputs_are_rounded_alike(name: str, tokens: int, columns: int) -> None:
    check_quantize_rows(
        linear, FORMATS[name], tokens, columns, torch.bfloat16, "cuda", differing=0.001
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (288, 8192),
        (6448, 1536),
        (1536, 3072),
        (18560, 4096),
        (4096, 8192),
        (131072, 2688),
        (77, 130),
    ],
)
def test_one_row_in_16_bits(rows: int, columns: int, has_bias: bool, dtype: torch.dtype) -> None:
    check_one_row(linear, rows, columns, has_bias, dtype, "cuda")


@pytest.mark.parametrize(
    ("activation", "gated", "has_bias"),
    [("silu", True, False), ("gelu", True, True), ("relu2", False, True), ("none", True, False)],
)
@pytest.mark.parametrize(("rows", "columns"), [(6, 16), (70, 1000), (1030, 96), (8200, 24)])
def test_activations_of_one_row(
    rows: int, columns: int, activation: str, gated: bool, has_bias: bool
) -> None:
    check_one_row_activated(
        linear, rows, columns, has_bias, activation, gated, torch.bfloat16, "cuda"
    )
