"""Products of batch-invariant mode: an output's bits are its row's, whatever the number of rows.
Tensor cores' own sums are in tests/gpu/test_in_order_gpu.py; here every product goes column by
column, so that what differs is the kernels' doing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)

from megatron_hybrid.kernels.linear import few_rows, quantized_in_order  # noqa: E402
from megatron_hybrid.kernels.linear import triton_in_order as in_order  # noqa: E402
from megatron_hybrid.kernels.linear.formats import QuantizedWeight  # noqa: E402
from megatron_hybrid.kernels.linear.triton import Tile  # noqa: E402
from tests.kernels.dots_in_order import dots_in_order as dots_in_order  # noqa: E402
from tests.kernels.linear_cases import FORMATS, check_multiply, some_inputs, some_weight  # noqa: E402
from tests.thorough import A_THIRD

pytestmark = pytest.mark.usefixtures("dots_in_order")
COUNTS = (1, 5, 17, 64)  # beside all of them, which are more than any tile of few rows has
MOST = 70


def cancelling(name: str, columns: int) -> tuple[QuantizedWeight, Tensor]:
    """A weight and inputs of which the second half of the columns takes away what the first one
    gives: what is left is what was rounded, in one order of sums or another."""
    torch.manual_seed(0)
    half, format = columns // 2, FORMATS[name]
    values, x = torch.randn(24, half), torch.randn(MOST, half) * torch.logspace(-2, 2, half)
    weight = format.quantize(torch.cat((values, -values), 1))
    if weight.input_scale is not None:
        weight.input_scale.fill_(0.5)
    return weight, torch.cat((x, x), 1).bfloat16()


def check_rows(multiply: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Some rows, from the beginning or the end on, have the bits that they have among all."""
    whole = multiply(x)
    for count in COUNTS:
        first = (len(x) - count) * (count % 2)
        assert torch.equal(multiply(x[first : first + count]), whole[first : first + count]), count


@A_THIRD
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_quantised_weights(name: str) -> None:
    weight, x = cancelling(name, 512)
    check_rows(lambda x: in_order.multiply(x, weight), x)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_products_with_quantised_weights(name: str, tokens: int) -> None:
    check_multiply(in_order, FORMATS[name], tokens, 40, 256, torch.float32, bias=tokens == 1)


def test_tiles_have_no_cut_and_one_depth() -> None:
    every = [
        quantized_in_order.bytes_tile(tokens, rows, by_group, 132)
        for tokens in (1, 16, 17, 64, 65, 300, 9000)
        for rows in (24, 4096, 131072)
        for by_group in (False, True)
    ]
    every += [quantized_in_order.plain_inputs_tile(n, torch.float16) for n in (1, 33, 64, 70, 9000)]
    assert {(tile.splits, tile.depth) for tile in every} == {(1, 128)}
    assert all(tile.rows % 64 == 0 and tile.warps >= 4 for tile in every)  # wgmma's


@pytest.mark.parametrize("name", ["fp8 by block", "fp4"])
def test_a_cut_of_the_columns_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Tile(64, 64, 128, 4, 2, splits=2)
    kinds = {
        kind: getattr(quantized_in_order, kind) for kind in ("bytes_tile", "plain_inputs_tile")
    }
    weight, x = cancelling(name, 512)
    for which, usual in kinds.items():

        def choose(tokens: int, *sizes: Any, usual: Callable[..., Tile] = usual) -> Tile:
            return cut if tokens < 9 else usual(tokens, *sizes)

        monkeypatch.setattr(quantized_in_order, which, choose)
    with pytest.raises(AssertionError):
        check_rows(lambda x: in_order.multiply(x, weight), x)


def test_rows_that_no_descriptor_can_load() -> None:
    for name, columns in (("int8", 24), ("4 bits with zero points", 32)):
        weight = some_weight(FORMATS[name], 9, columns)
        x = some_inputs(MOST, columns, torch.float32)
        check_rows(lambda x, weight=weight: in_order.multiply(x, weight), x)  # type: ignore[misc]
        check_multiply(in_order, FORMATS[name], 3, 9, columns, torch.float32)


@pytest.mark.parametrize("rows", [40, 37])
def test_bits_of_weights_in_16_bits(rows: int) -> None:
    weight, bias = torch.randn(rows, 200).bfloat16(), torch.randn(rows).bfloat16()
    x = some_inputs(MOST, 200, torch.bfloat16)
    check_rows(lambda x: in_order.multiply(x, weight, bias), x)
    exact = x[:, :200].double() @ weight.double().t() + bias.double()
    difference = (in_order.multiply(x, weight, bias).double() - exact).abs().max()
    assert difference <= 2**-7 * exact.abs().max()


def test_bits_of_what_no_tensor_core_multiplies() -> None:
    weight = torch.randn(20, 45)
    check_rows(lambda x: in_order.multiply(x, weight), some_inputs(MOST, 45, torch.float32))
    check_rows(
        lambda x: in_order.multiply(x, weight.bfloat16()), some_inputs(MOST, 45, torch.bfloat16)
    )


def test_few_rows_are_multiplied_in_order() -> None:
    tiles = [in_order.few_tile(rows, 132) for rows in (64, 4096, 6144, 10000, 21504, 131072)]
    assert all(tile.is_chained or not tile.is_cut for tile in tiles)
    assert few_rows.LARGEST < MOST
