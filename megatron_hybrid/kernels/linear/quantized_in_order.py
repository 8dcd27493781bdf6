"""Products with quantised weights of which an output's bits do not depend on how many rows there
are: of a GPU in batch-invariant mode.

By triton.py's kernels, without a cut of the columns. Steps are as deep for any number of rows, as
what a step gives is added up outside of products. All tiles have 64 rows of a weight or more, and
so are wgmma's: mma.sync adds up numbers of 8 bits otherwise, and takes those that become 16 bits
in registers in another order (tests/gpu/test_in_order_gpu.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.devices import processors
from megatron_hybrid.kernels.launching import cdiv
from megatron_hybrid.kernels.linear.formats import QuantizedWeight
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.kernels.linear.triton import (
    Tile,
    multiply_bytes,
    multiply_plain_inputs,
    quantize_rows,
)
from megatron_hybrid.kernels.protocols import Inputs

_DEPTH = 128  # columns, a step; other numbers give other bits
_ROWS = 64
# Products that are no tensor cores', whose order a tile may change: any number of rows has it.
_IN_FLOAT32 = Tile(16, _ROWS, 64, 4, 4)


def bytes_tile(tokens: int, rows: int, by_group: bool, programs: int) -> Tile:
    """Of inputs and weights in 8 bits. `programs`: that run at once."""
    if tokens <= 64:
        return Tile(_across(tokens), _ROWS, _DEPTH, 4, 6)
    # Sums of steps that have scales of their own take registers.
    if by_group or cdiv(tokens, 128) * cdiv(rows, 256) < programs:
        return Tile(128, _ROWS, _DEPTH, 4, 4)
    return Tile(128, 256, _DEPTH, 8, 3)


def plain_inputs_tile(tokens: int, dtype: torch.dtype) -> Tile:
    """Of weights alone that are quantised."""
    if dtype == torch.float32:
        return _IN_FLOAT32
    return Tile(
        _across(tokens) if tokens <= 64 else 128, _ROWS, _DEPTH, 4, 4 if tokens <= 64 else 3
    )


def _across(tokens: int) -> int:
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether these kernels are for a weight: in rows of 16 bytes, as tensor descriptors have them.
    Nothing that a model has is narrower."""
    format, columns = weight.format, weight.shape[-1]
    if format.activations == "none":
        return columns * format.bits % 128 == 0
    block = format.columns or 32
    return columns % 16 == 0 and block >= 32 and not block & (block - 1)


def multiply(x: Inputs, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As in Linear, of a weight that it can multiply."""
    format, tokens = weight.format, x.shape[0]
    if format.activations == "none":
        plain = plain_rows(x)
        tile = plain_inputs_tile(tokens, plain.dtype)
        return multiply_plain_inputs(plain, weight, bias, tile)
    if isinstance(x, Tensor):
        x = quantize_rows(x, format, weight.input_scale)
    at_once = processors(x.values.device)
    tile = bytes_tile(tokens, weight.shape[0], format.columns is not None, at_once)
    return multiply_bytes(x, weight, bias, tile)
