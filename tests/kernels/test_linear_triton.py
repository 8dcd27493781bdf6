"""The Triton products with quantised weights in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
from itertools import product
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
    rounding_by_steps,
    some_weight,
)
from tests.thorough import A_THIRD, usually

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("for machines with triton and without CUDA", allow_module_level=True)
from triton.runtime.interpreter import interpreter_builder  # noqa: E402

from megatron_hybrid.kernels.linear import few_rows, one_row_bytes  # noqa: E402
from megatron_hybrid.kernels.linear import triton as linear  # noqa: E402
from megatron_hybrid.kernels.linear.formats import QuantizedWeight  # noqa: E402
from megatron_hybrid.kernels.linear.products import written_out  # noqa: E402
from megatron_hybrid.kernels.protocols import QuantizedRows  # noqa: E402


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


@pytest.mark.parametrize(
    ("size", "has_bias"),
    usually(  # of many rows only the programs are more
        [((3, 16), True), ((70, 1000), False), ((1030, 96), True)],
        list(product([(3, 16), (70, 1000), (1030, 96), (8200, 24)], [True, False])),
    ),
)
def test_one_row_in_16_bits(size: tuple[int, int], has_bias: bool) -> None:
    rows, columns = size
    check_one_row(linear, rows, columns, has_bias, torch.float16)


OF_ONE_ROW = [("silu_to_0.5", True, False), ("gelu", True, True), ("relu2", False, True)]
FEW_AND_MANY = [(6, 16), (70, 1000), (1030, 96), (8200, 24)]


@A_THIRD
@pytest.mark.parametrize(
    ("rows", "columns", "activation", "gated", "has_bias"),
    usually(
        [
            *((*shape, *kind) for kind in OF_ONE_ROW for shape in FEW_AND_MANY[:3]),
            (6, 16, "none", True, False),
        ],
        [
            (*shape, *kind)
            for kind in (*OF_ONE_ROW, ("none", True, False))
            for shape in FEW_AND_MANY
        ],
    ),
)
def test_activations_of_one_row(
    rows: int, columns: int, activation: str, gated: bool, has_bias: bool
) -> None:
    check_one_row_activated(linear, rows, columns, has_bias, activation, gated, torch.float16)


@A_THIRD
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize(
    ("rows", "columns"), [(3, 16), (300, 96), (140, 1000), (37, 2500), (9, 4112), (5, 9216)]
)
def test_one_row_in_8_bits(
    rows: int, columns: int, name: str, dtype: torch.dtype, has_bias: bool
) -> None:
    check_one_row_bytes(one_row_bytes, FORMATS[name], rows, columns, has_bias, dtype)


@A_THIRD
@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize(
    "tile",
    [
        one_row_bytes.Tile(1, 2048, 1),
        one_row_bytes.Tile(8, 2048, 3),
        one_row_bytes.Tile(4, 1024, 2),
        one_row_bytes.Tile(16, 512, 1),
        one_row_bytes.Tile(8, 256, 20),
    ],
    ids=str,
)
def test_one_row_in_8_bits_in_any_tile(tile: one_row_bytes.Tile, name: str) -> None:
    check_one_row_bytes(one_row_bytes, FORMATS[name], 150, 4900, True, torch.float32, tile=tile)


@pytest.mark.parametrize("name", QUANTIZE)
def test_rows_of_one_token_are_multiplied_without_tensor_cores(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    usual = one_row_bytes.multiply

    def spied(x: QuantizedRows, *arguments: Any) -> torch.Tensor:
        taken.append(len(x.values))
        return usual(x, *arguments)

    monkeypatch.setattr(one_row_bytes, "multiply", spied)
    for tokens in (1, 2):
        check_multiply(linear, FORMATS[name], tokens, 32, 128, torch.float32)
    monkeypatch.setattr(one_row_bytes, "_MOST_COLUMNS", 112)
    check_multiply(linear, FORMATS[name], 1, 32, 128, torch.float32)
    assert taken == [1]


def test_one_rows_sums_in_8_bits_do_not_depend_on_a_programs_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, values = (torch.randint(-4, 5, (count, 2048), generator=generator) / 64 for count in (1, 70))
    # Added to the first product, and to the last one, small ones lose bits.
    x[:, 0] = x[:, -1] = values[:, 0] = 448
    values[:, -1] = -448
    kind, ones = torch.float8_e4m3fn, torch.ones(70, 1)
    weight = QuantizedWeight(FORMATS["fp8 by row"], values.to(kind), ones)
    rows = QuantizedRows(x.to(kind), ones[:1], torch.float32)
    tile = one_row_bytes.choose_tile(2048)
    product = one_row_bytes.multiply(rows, weight)
    many = tile._replace(rows=2 * tile.rows)
    assert torch.equal(one_row_bytes.multiply(rows, weight, tile=many), product)
    otherwise = one_row_bytes.multiply(rows, weight, tile=tile._replace(depth=512))
    assert not torch.equal(otherwise, product)  # the case shows what is added to what


# By programs that fit on the device at once: fewer than tiles, which begin and end inside of them,
# and more; whole tiles and as many parts of each are the others'.
TILES = [
    (7, few_rows.Tile(16, 64, 3)),
    (7, few_rows.Tile(16, 64, 3, is_cut=False)),
    (5, few_rows.Tile(16, 128, 4, programs=2, weights_first=False)),
    (31, few_rows.Tile(32, 32, 2)),
    (132, few_rows.Tile(64, 128, 4)),
    (132, few_rows.Tile(128, 16, 4, programs=3)),
    (5, few_rows.Tile(16, 64, 3, is_chained=True)),
    (3, few_rows.Tile(32, 32, 2, programs=1, is_chained=True, weights_first=False)),
]


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "has_bias"),
    [(0, 3, 16, True), (1, 70, 1000, True), (2, 3, 16, False), (32, 70, 1536, False)],
)
def test_few_rows_in_16_bits(tokens: int, rows: int, columns: int, has_bias: bool) -> None:
    check_few_rows(few_rows, tokens, rows, columns, has_bias, torch.float16)


@A_THIRD
@pytest.mark.parametrize(("processors", "tile"), TILES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(2, 230, 328), (5, 100, 1040), (33, 33, 328), (64, 150, 501)]
)
def test_few_rows_in_any_tile(
    processors: int,
    tile: few_rows.Tile,
    tokens: int,
    rows: int,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(few_rows, "_PROCESSORS", processors)
    check_few_rows(few_rows, tokens, rows, columns, True, torch.float16, tile=tile)


@pytest.mark.parametrize("gated", [False, True])
def test_programs_of_few_rows_run_in_any_order(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one first: all but that keep their sums until others' are done."""
    monkeypatch.setattr(few_rows, "_PROCESSORS", 7)
    x, weight, bias = few_rows_case(5, 520, 328, True, torch.float16)
    tile = few_rows.Tile(32, 64, 4)
    product = few_rows.multiply(x, weight, bias, tile, gated=gated)
    numbers: list[int] = []

    def backwards(x: int, y: int, z: int) -> None:
        numbers.append(x)
        set_usually(6 - x, y, z)

    set_usually = interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    assert torch.equal(few_rows.multiply(x, weight, bias, tile, gated=gated), product)
    assert numbers == [*range(7)]


@A_THIRD
@pytest.mark.parametrize(
    ("activation", "gated", "has_bias"),
    [
        ("silu_to_0.5", True, False),
        ("gelu", False, True),
        ("relu2", True, True),
        ("none", True, False),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "processors"),
    [(2, 6, 16, 132), (17, 150, 1040, 132), (4, 700, 1040, 5), (33, 900, 328, 3)],
)
def test_activations_of_few_rows(
    tokens: int,
    rows: int,
    columns: int,
    processors: int,
    activation: str,
    gated: bool,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several programs' tiles each, too: they end in either half of the weight."""
    monkeypatch.setattr(few_rows, "_PROCESSORS", processors)
    check_few_rows_activated(
        few_rows, tokens, rows, columns, has_bias, activation, gated, torch.float16
    )


@pytest.mark.parametrize(("rows", "processors"), [(70, 132), (150, 5)])
def test_few_rows_do_not_depend_on_each_other(
    rows: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "_PROCESSORS", processors)
    x, weight = rounding_by_steps(few_rows.LARGEST, rows, 2560, step=256)
    check_few_rows_alone(few_rows, x, weight, None)
    whole = few_rows.multiply(x, weight)
    tile = few_rows.choose_tile(*weight.shape)._replace(is_cut=False)
    otherwise = few_rows.multiply(x, weight, tile=tile)
    assert not torch.equal(whole, otherwise)  # the case shows what is added to what


@pytest.mark.parametrize(("gated", "processors"), [(False, 5), (True, 3)])
def test_chained_tiles_have_the_bits_of_whole_ones(
    gated: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "_PROCESSORS", processors)
    x, weight = rounding_by_steps(few_rows.LARGEST, 300, 2560, step=256)
    tile = few_rows.Tile(16, 256, 4)
    chained, whole, cut = (
        few_rows.multiply(x, weight, tile=tile, gated=gated)
        for tile in (tile._replace(is_chained=True), tile._replace(is_cut=False), tile)
    )
    assert torch.equal(chained, whole)
    assert not torch.equal(cut, whole)  # the case shows what is added to what


def test_few_rows_are_limited() -> None:
    x, weight, _ = few_rows_case(65, 16, 16, False, torch.float16)
    with pytest.raises(ValueError, match="x has 65 rows; it must have at most 64"):
        few_rows.multiply(x, weight)


def test_few_rows_are_multiplied_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = few_rows_case(9, 16, 32, False, torch.float16)
    monkeypatch.setattr(few_rows, "MOST_ROWS", 8)
    assert not few_rows.can_multiply(x[:2], weight)  # of too few rows
    monkeypatch.setattr(few_rows, "FEWEST", len(weight))
    assert few_rows.can_multiply(x[:2], weight)
    assert few_rows.can_multiply(x[:8], weight)
    assert not few_rows.can_multiply(x[:9], weight)
    assert not few_rows.can_multiply(x[:1], weight)  # one_row's
    assert not few_rows.can_multiply(x[:2].float(), weight.float())
    assert not few_rows.can_multiply(x[:2].bfloat16(), weight)
    assert not few_rows.can_multiply(x[:2, 1:17], weight[:, :16])  # not at multiples of 16 bytes
    assert not few_rows.can_multiply(x[:2, :16], weight[:, 1:17])
    assert few_rows.can_multiply(x[:2, :25], weight[:, :25])
    assert not few_rows.can_multiply(x[:2, :25].contiguous(), weight[:, :25])
    assert not few_rows.can_multiply(x[:2], torch.zeros(16, 36).half()[:, :32])
    assert not few_rows.can_multiply(torch.zeros(2, 36).half()[:, :32], weight)
    taken: list[int] = []
    usual = few_rows.multiply

    def spied(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        taken.append(len(x))
        return usual(x, *arguments, **options)

    monkeypatch.setattr(few_rows, "multiply", spied)
    product = linear.multiply(x[:8], weight)
    torch.testing.assert_close(product, x[:8] @ weight.t(), rtol=1e-2, atol=1e-2)
    assert linear.multiply_activated(x[:8], weight, None, "silu", True) is not None
    assert taken == [8, 8]
    linear.multiply(x, weight)
    assert linear.multiply_activated(x, weight, None, "silu", True) is None
    assert taken == [8, 8]


# Rows and columns of models' weights, and how many programs these have.
SHAPES = {
    (4096, 4096): 128,  # tiles have as many parts
    (1536, 3072): 120,
    (4096, 8192): 128,
    (5120, 4096): 132,
    (288, 8192): 80,  # as many parts as a tile may have
    (6448, 1536): 101,  # whole tiles
    (12352, 2048): 193,
    (1536, 1024): 24,
    (131072, 2688): 128,  # several
    (64, 64): 1,
}


def test_programs_of_few_rows_fill_the_device() -> None:
    programs = {}
    for rows, columns in SHAPES:
        tile = few_rows.choose_tile(rows, columns)
        steps = -(-columns // tile.depth)
        programs[rows, columns] = few_rows.number_of_programs(tile, -(-rows // tile.rows), steps)
    assert programs == SHAPES


@pytest.mark.parametrize("programs", [1, 2, 3])
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_programs_of_few_rows_have_memory(programs: int, tokens: int) -> None:
    tile = few_rows.Tile(64, 64, 100, programs)
    stages = few_rows._stages(tile, 64, tokens)
    needed = 2 * stages * 64 * (64 + tokens) + 4 * 64 * tokens
    assert 0.75 * 232448 / programs < needed < 232448 / programs - 1024
