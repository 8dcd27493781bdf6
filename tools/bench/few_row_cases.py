"""Products of few rows with weights in 16 bits, for tools/benchmark_kernels.py: of every linear
layer of a model but the experts', by kernels/linear/few_rows.py and by cuBLAS. For each but the
vocabulary's other tiles follow, a row each: `ours` is the tile's then.

    python tools/benchmark_kernels.py --model granite-4.0-h-tiny --only "product of few rows"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from bench.cases import Bench, Calls, Case
from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.moe import MoE
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize

if TYPE_CHECKING:
    from megatron_hybrid.kernels.linear.few_rows import Tile

NAME = "product of few rows"
TILED = (4, 32)  # rows of inputs that all tiles are timed with


def few_row_cases(bench: Bench) -> Iterator[Case]:
    shapes = linear_shapes(bench.model)
    for shape in shapes:
        for tokens in [1, 3] if bench.tiny else [1, 2, 4, 8, 16, 32, 64]:
            yield _product(bench, tokens, shape)
    if bench.tiny:
        return
    from megatron_hybrid.kernels.linear.few_rows import choose_tile  # of GPUs alone

    for shape in shapes:
        if shape[0] == bench.model.vocab_size:
            continue
        for tokens in TILED:
            for tile in other_tiles(choose_tile(*shape)):
                yield _product(bench, tokens, shape, tile)


def linear_shapes(model: HybridModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the weights of all linear layers but the experts', each once."""
    once = replace(model, pattern="".join(dict.fromkeys(model.pattern)))
    with torch.device("meta"):
        dtype = torch.bfloat16
        built = HybridModel(once, initialize(device=torch.device("cpu")), dtype, dtype, dtype)
    modules = list(built.modules())
    experts = {
        layer for one in modules if isinstance(one, MoE) for layer in (one.up_proj, one.down_proj)
    }
    layers = [one for one in modules if isinstance(one, Linear) and one not in experts]
    return list(dict.fromkeys((layer.outputs, layer.inputs) for layer in layers))


def other_tiles(chosen: Tile) -> list[Tile]:
    """Than the chosen one: those that it differs from in one thing, and those of 64 and 128 rows
    with one to three programs a processor, and with as many as tiles."""
    from megatron_hybrid.kernels.linear.few_rows import Tile

    tiles = [
        chosen._replace(weights_first=False),
        chosen._replace(is_cut=False),
        Tile(128, 128, 5),
        Tile(128, 64, 8),
        Tile(128, 64, 4),  # leaves memory for a program of the next kernel
        Tile(128, 64, 5, programs=2),
        Tile(128, 64, 5, programs=2, is_cut=False),
        Tile(64, 256, 4),
        Tile(64, 128, 8),
        Tile(64, 128, 4, programs=2),
        Tile(64, 128, 4, programs=2, is_cut=False),
        Tile(64, 64, 5, programs=3),
    ]
    return [tile for tile in dict.fromkeys(tiles) if tile != chosen]


def _product(bench: Bench, tokens: int, shape: tuple[int, int], tile: Tile | None = None) -> Case:
    """`tile`: None: the chosen one."""
    rows, columns = shape

    def make() -> Calls:
        x, weight = bench.normal(tokens, columns), bench.normal(rows, columns)
        multiply = bench.kernels.linear.multiply
        if bench.tiny:
            return {"ours": lambda: multiply(x, weight)}
        from megatron_hybrid.kernels.linear import few_rows

        calls: Calls = {"ours": lambda: few_rows.multiply(x, weight, tile=tile)}
        if tile is None:
            calls["cuBLAS"] = lambda: F.linear(x, weight)
            if tokens == 1:
                calls["one row's kernel"] = lambda: multiply(x, weight)
        return calls

    moved = (rows * columns + tokens * (rows + columns)) * bench.item
    which = "" if tile is None else f": {tile}"
    size = f"{tokens} x {columns} to {rows}{which}"
    return Case(NAME, size, moved, make, 2 * tokens * rows * columns)
