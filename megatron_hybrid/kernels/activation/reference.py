"""Activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.elementwise import gelu, gelu_tanh, sigmoid, silu
from megatron_hybrid.kernels.linear.reference import rounded
from megatron_hybrid.kernels.protocols import Inputs, Reader


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., "Primer", 2021), as Nemotron has it."""
    return F.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu2": relu2,
    "gelu": gelu,  # the exact one, with erf
    "gelu_tanh": gelu_tanh,
    "sigmoid": sigmoid,
    "none": torch.clone,
}


def activate(x: Tensor, activation: str, gated: bool, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    function = ACTIVATIONS[activation]
    if not gated:
        return rounded(function(x), into)
    gate, up = x.chunk(2, dim=-1)
    return rounded(function(gate).mul_(up), into)


def gate(x: Tensor, gate: Tensor, activation: str, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    return rounded(ACTIVATIONS[activation](gate).mul_(x), into)
