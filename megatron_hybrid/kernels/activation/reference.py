"""Activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu2": relu2,
    "gelu": F.gelu,  # the exact one, with erf
    "sigmoid": torch.sigmoid,
}


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """act(x), or, where `gated`, act(first half of the columns) * second half.

    x [tokens, columns] -> [tokens, columns or columns / 2] in x's dtype; `activation` is a key of
    ACTIVATIONS.
    """
    function = ACTIVATIONS[activation]
    if not gated:
        return function(x)
    gate, up = x.chunk(2, dim=-1)
    return function(gate).mul_(up)


def gate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """act(gate) * x, both [tokens, columns] (rows may be strided) -> the same in x's dtype."""
    return ACTIVATIONS[activation](gate).mul_(x)
