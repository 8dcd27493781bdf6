"""Activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., "Primer", 2021), as Nemotron has it."""
    return F.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu2": relu2,
    "gelu": F.gelu,  # the exact one, with erf
    "sigmoid": torch.sigmoid,
}


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """As in Activation."""
    function = ACTIVATIONS[activation]
    if not gated:
        return function(x)
    gate, up = x.chunk(2, dim=-1)
    return function(gate).mul_(up)


def gate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """As in Activation."""
    return ACTIVATIONS[activation](gate).mul_(x)
