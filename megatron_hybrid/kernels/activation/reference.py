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


_LIMITED = "silu_to_"


def limit_of(activation: str) -> float | None:
    """Of a gated "silu_to_LIMIT": gates are at most that before their silu, and what they are
    multiplied with is within as much of 0. None: of others."""
    return float(activation[len(_LIMITED) :]) if activation.startswith(_LIMITED) else None


def activate(x: Tensor, activation: str, gated: bool, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    limit = limit_of(activation) if gated else None
    function = ACTIVATIONS[activation] if limit is None else silu
    if not gated:
        return rounded(function(x), into)
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return rounded(function(gate).mul_(up), into)


def gate(x: Tensor, gate: Tensor, activation: str, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    return rounded(ACTIVATIONS[activation](gate).mul_(x), into)
