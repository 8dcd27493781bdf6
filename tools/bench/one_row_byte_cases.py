"""Products of one row with weights in 8 bits, for tools/benchmark_kernels.py: of every linear layer
of a model but the experts' and the vocabulary's, by kernels/linear/one_row_bytes.py, by tensor
cores, and with the weight in 16 bits. Of FP8 other tiles follow, a row each: `ours` is the tile's
then.

    python tools/benchmark_kernels.py --model nemotron-h-8b --only "product of one row"
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.cases import Bench, Calls, Case
from bench.few_row_cases import linear_shapes
from bench.quantized_cases import FORMATS, weight_bytes

if TYPE_CHECKING:
    from megatron_hybrid.kernels.linear.one_row_bytes import Tile

NAME = "product of one row"


def one_row_byte_cases(bench: Bench) -> Iterator[Case]:
    shapes = [shape for shape in linear_shapes(bench.model) if shape[0] != bench.model.vocab_size]
    for name in ("FP8", "FP8 blocks", "INT8"):
        for shape in shapes:
            yield _product(bench, name, shape)
    if bench.tiny:
        return
    for shape in shapes:
        for tile in other_tiles(shape[1]):
            yield _product(bench, "FP8", shape, tile)


def other_tiles(columns: int) -> list[Tile]:
    """Than the chosen one."""
    from megatron_hybrid.kernels.linear.one_row_bytes import Tile, choose_tile  # of GPUs alone

    side_by_side = [Tile(rows, 2048, steps) for rows in (2, 4, 8) for steps in (1, 2, 4)]
    a_warp_each = [Tile(rows, 512, steps) for rows in (4, 8) for steps in (2, 4, 8)]
    two_warps_each = [Tile(4, 1024, steps) for steps in (1, 2, 4)]
    chosen = choose_tile(columns)
    return [
        tile
        for tile in (*side_by_side, *a_warp_each, *two_warps_each)
        # Of fewer columns all those with more steps are the same.
        if tile != chosen and (tile.steps == 1 or tile.steps * tile.depth < 2 * columns)
    ]


def _product(bench: Bench, name: str, shape: tuple[int, int], tile: Tile | None = None) -> Case:
    """`tile`: None: the chosen one."""
    rows, columns = shape
    format = FORMATS[name]

    def make() -> Calls:
        x, plain = bench.normal(1, columns), bench.normal(rows, columns)
        weight = format.quantize(plain)
        linear = bench.kernels.linear
        rounded = linear.quantize_rows(x, format, None)
        if bench.tiny:
            return {"ours": lambda: linear.multiply(rounded, weight)}
        from megatron_hybrid.kernels.linear import one_row_bytes
        from megatron_hybrid.kernels.linear.triton import multiply_bytes

        calls: Calls = {"ours": lambda: one_row_bytes.multiply(rounded, weight, tile=tile)}
        if tile is None:
            calls["tensor cores"] = lambda: multiply_bytes(rounded, weight)
            calls["16 bits"] = lambda: linear.multiply(x, plain)
        return calls

    moved = weight_bytes(format, rows, columns) + columns + rows * bench.item
    which = "" if tile is None else f": {tile}"
    size = f"{name}, 1 x {columns} to {rows}{which}"
    return Case(NAME, size, moved, make, rows * columns)
