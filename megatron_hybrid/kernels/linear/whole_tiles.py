"""Products in plain torch of which a row's bits do not depend on the rows beside it: what a CPU
runs in batch-invariant mode.

The library chooses how it sums by the product's shape. So all products with a weight are of one
shape: TILE_ROWS rows of inputs, the last ones filled up with zeros, and a multiple of COLUMNS long:
what is left of other lengths MKL adds up by a row's place, on CPUs without AVX-512. In it all rows
are computed alike; `places_matter` looks whether that is so.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.linear import reference
from megatron_hybrid.kernels.linear.formats import Weight
from megatron_hybrid.kernels.linear.reference import quantize_rows, weights_changed
from megatron_hybrid.kernels.protocols import Inputs

__all__ = ["multiply", "multiply_activated", "quantize_rows", "weights_changed"]

TILE_ROWS = 16
COLUMNS = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: x [T, K], weight [N, K] -> [T, N]."""
    count = len(x)
    if not count:
        return F.linear(x, weight, bias)
    more = -x.shape[1] % COLUMNS
    filled = F.pad(x, (0, more, 0, -count % TILE_ROWS)).contiguous()
    if more:  # hardly any model has such a weight
        weight = F.pad(weight, (0, more))
    tiles = [F.linear(tile, weight, bias) for tile in filled.split(TILE_ROWS)]
    return tiles[0][:count] if len(tiles) == 1 else torch.cat(tiles)[:count]


multiply = partial(reference.multiply, linear=linear)


def multiply_activated(
    x: Inputs, weight: Weight, bias: Tensor | None, activation: str, gated: bool
) -> None:
    """One after the other."""


def places_matter(weight: Tensor) -> bool:
    """Whether a row's product with a weight [N, K] depends on its place in a tile."""
    row = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).cos()
    first = linear(row[None], weight)
    every = torch.eye(TILE_ROWS, dtype=weight.dtype, device=weight.device)[:, :, None] * row
    return any(not torch.equal(linear(tile, weight)[i], first[0]) for i, tile in enumerate(every))
