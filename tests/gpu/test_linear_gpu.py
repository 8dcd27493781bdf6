"""Products with quantised weights on a GPU, against reference.py on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from tests.kernels.linear_cases import (
    FORMATS,
    check_few_rows,
    check_few_rows_activated,
    check_few_rows_alone,
    check_multiply,
    check_one_row,
    check_one_row_activated,
    check_one_row_bytes,
    check_quantize_rows,
    few_rows_case,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.linear import few_rows, one_row_bytes, reference  # noqa: E402
from megatron_hybrid.kernels.linear import triton as linear  # noqa: E402


def replayed_chain(
    first: torch.Tensor, weights: Iterable[Any], multiply: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Products of products, from a CUDA graph that ran twenty times, behind the first inputs."""

    def chain() -> list[torch.Tensor]:
        results = [first]
        for weight in weights:
            results.append(multiply(results[-1], weight))
        return results

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return [result.clone() for result in results]  # what the graph wrote is in its own memory


QUANTIZE = [name for name, format in FORMATS.items() if format.activations != "none"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 65, 200, 300])
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (4096, 2048), (80, 160), (10304, 2688)])
def test_every_format(name: str, tokens: int, rows: int, columns: int) -> None:
    check_multiply(
        linear, FORMATS[name], tokens, rows, columns, torch.bfloat16, bias=tokens == 17,
        device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZE)
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


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (18560, 4096),
        (4096, 8192),
        (21504, 4096),
        (4096, 21504),
        (12288, 2048),
        (2048, 4096),
        (10304, 2688),
        (6448, 1536),
        (130, 32768),
        (77, 1000),
        (300, 96),
        (3, 16),
    ],
)
def test_one_row_in_8_bits(
    rows: int, columns: int, name: str, dtype: torch.dtype, has_bias: bool
) -> None:
    check_one_row_bytes(one_row_bytes, FORMATS[name], rows, columns, has_bias, dtype, "cuda")


@pytest.mark.parametrize(
    "tile",
    [
        one_row_bytes.Tile(1, 2048, 1),
        one_row_bytes.Tile(8, 2048, 1),
        one_row_bytes.Tile(4, 1024, 2),
        one_row_bytes.Tile(16, 512, 2),
        one_row_bytes.Tile(8, 256, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", QUANTIZE)
def test_one_row_in_8_bits_in_any_tile(name: str, tile: one_row_bytes.Tile) -> None:
    case = FORMATS[name], 1030, 4912, True, torch.bfloat16, "cuda", tile
    check_one_row_bytes(one_row_bytes, *case)


@pytest.mark.parametrize("name", QUANTIZE)
def test_rounded_rows_wait_for_what_the_kernel_before_writes(name: str) -> None:
    """Products of products of one row, which is rounded before each: all kernels are launched one
    right behind the other."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (24, 2048, 2048)
    plain = torch.randn(shape, generator=generator, device="cuda") / 2048**0.5
    weights = [FORMATS[name].quantize(weight) for weight in plain]
    for weight in weights:
        if weight.input_scale is not None:
            weight.input_scale.fill_(0.01)
    first = torch.randn(1, 2048, generator=generator, device="cuda").bfloat16()

    results = replayed_chain(first, weights, linear.multiply)
    for x, y, weight in zip(results, results[1:], weights, strict=False):
        rows = linear.quantize_rows(x, weight.format, weight.input_scale)
        torch.cuda.synchronize()
        assert torch.equal(linear.multiply(rows, weight), y)
        expected = reference.multiply(rows, weight)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


FEW_SHAPES = [
    (6448, 1536),
    (1536, 3072),
    (12352, 2048),
    (2688, 4096),
    (21504, 4096),
    (4096, 21504),
    (77, 144),
    (33, 136),
]
FEW_TILES = [
    few_rows.Tile(128, 128, 5),
    few_rows.Tile(128, 64, 5, programs=2),
    few_rows.Tile(128, 64, 5, programs=2, is_cut=False),
    few_rows.Tile(64, 128, 8),
    few_rows.Tile(64, 128, 4, programs=2, weights_first=False),
    few_rows.Tile(64, 256, 4),
    few_rows.Tile(64, 64, 5, programs=3),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 32, 64])
@pytest.mark.parametrize(("rows", "columns"), FEW_SHAPES)
def test_few_rows_in_16_bits(rows: int, columns: int, tokens: int, dtype: torch.dtype) -> None:
    check_few_rows(few_rows, tokens, rows, columns, tokens % 2 == 0, dtype, "cuda")


@pytest.mark.parametrize("tile", FEW_TILES, ids=str)
@pytest.mark.parametrize("tokens", [8, 32, 64])
@pytest.mark.parametrize(("rows", "columns"), FEW_SHAPES)
def test_few_rows_in_any_tile(tile: few_rows.Tile, rows: int, columns: int, tokens: int) -> None:
    check_few_rows(few_rows, tokens, rows, columns, True, torch.bfloat16, "cuda", tile)


@pytest.mark.parametrize(
    ("activation", "gated", "has_bias"),
    [("silu", True, False), ("gelu", True, True), ("relu2", True, True), ("none", True, False)],
)
@pytest.mark.parametrize("tokens", [4, 20, 64])
@pytest.mark.parametrize(("rows", "columns"), [(6, 16), (1030, 96), (8200, 1040), (14336, 2048)])
def test_activations_of_few_rows(
    rows: int, columns: int, tokens: int, activation: str, gated: bool, has_bias: bool
) -> None:
    check_few_rows_activated(
        few_rows, tokens, rows, columns, has_bias, activation, gated, torch.bfloat16, "cuda"
    )


@pytest.mark.parametrize("tile", [None, *FEW_TILES], ids=str)
@pytest.mark.parametrize(("rows", "columns"), FEW_SHAPES)
def test_few_rows_do_not_depend_on_each_other(
    tile: few_rows.Tile | None, rows: int, columns: int
) -> None:
    case = few_rows_case(few_rows.LARGEST, rows, columns, True, torch.bfloat16, "cuda")
    check_few_rows_alone(few_rows, *case, tile)


@pytest.mark.parametrize("weights_first", [True, False])
def test_few_rows_wait_for_what_the_kernel_before_writes(weights_first: bool) -> None:
    """Products of products, launched one right behind the other: the inputs of each are what the
    one before wrote, and so are the counters and, in the same memory, the parts' sums."""
    tile = few_rows.Tile(64, 128, 4, programs=2, weights_first=weights_first)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (24, 2048, 2048)
    weights = torch.randn(shape, generator=generator, device="cuda").bfloat16() / 2048**0.5
    first = torch.randn(32, 2048, generator=generator, device="cuda").bfloat16()

    results = replayed_chain(first, weights, partial(few_rows.multiply, tile=tile))
    for x, y, weight in zip(results, results[1:], weights, strict=False):
        assert torch.equal(few_rows.multiply(x, weight, tile=tile), y)
        torch.testing.assert_close(y, x @ weight.t(), rtol=2e-2, atol=2e-2)
