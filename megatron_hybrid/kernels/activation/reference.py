"""Activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.elementwise import gelu, gelu_tanh, sigmoid, silu, soft_capped
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


_LIMITED, _CAPPED = "silu_to_", "silu_capped_"


def limit_of(activation: str) -> float | None:
    """Of a gated "silu_to_LIMIT": gates are at most that before their silu, and what they are
    multiplied with is within as much of 0. None: of others."""
    return float(activation[len(_LIMITED) :]) if activation.startswith(_LIMITED) else None


def caps_of(activation: str) -> tuple[float, float] | None:
    """Of a gated "silu_capped_GATE_UP": with c(x) = CAP tanh(x / CAP), gates are c(gate) *
    sigmoid(gate) by the first cap, and what they are multiplied with is c(up) by the second. None:
    of others."""
    if not activation.startswith(_CAPPED):
        return None
    gate, up = activation[len(_CAPPED) :].split("_")
    return float(gate), float(up)


def activate(x: Tensor, activation: str, gated: bool, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    limit, caps = (limit_of(activation), caps_of(activation)) if gated else (None, None)
    function = ACTIVATIONS[activation] if limit is None and caps is None else silu
    if not gated:
        return rounded(function(x), into)
    gate, up = x.chunk(2, dim=-1)
    if caps is not None:
        return rounded(_capped(gate, up, *caps), into)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return rounded(function(gate).mul_(up), into)


def _capped(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    kind = torch.promote_types(gate.dtype, torch.float32)
    wide = gate.to(kind)
    gates = soft_capped(wide, gate_cap).mul_(sigmoid(wide)).to(gate.dtype)
    return soft_capped(up.to(kind), up_cap).mul_(gates).to(gate.dtype)


def gate(x: Tensor, gate: Tensor, activation: str, into: Reader | None = None) -> Inputs:
    """As in Activation."""
    return rounded(ACTIVATIONS[activation](gate).mul_(x), into)
