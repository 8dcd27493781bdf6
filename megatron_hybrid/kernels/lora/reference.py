"""Adapters' products in plain torch: the meaning, and what a CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import activate
from megatron_hybrid.kernels.linear.reference import PlainProduct
from megatron_hybrid.kernels.lora.protocol import AdapterWeights, WideWeights
from megatron_hybrid.kernels.protocols import Inputs, Linear


def add(
    y: Tensor,
    x: Tensor,
    weights: AdapterWeights,
    slots: Tensor,
    linear: PlainProduct = F.linear,
) -> None:
    """As in Lora. `linear`: x W^T + bias of numbers in one type."""
    for slot in _used(slots):
        tokens = (slots == slot).nonzero().flatten()
        rows = x.index_select(0, tokens).float()
        low = linear(rows, weights.a[slot - 1].float(), None).to(x.dtype).float()
        added = y.index_select(0, tokens).float()
        for role, one in enumerate(low.split(weights.rank, dim=1)):
            outputs = (weights.roles == role).nonzero().flatten()
            b = weights.b[slot - 1].index_select(0, outputs).float()
            added[:, outputs] += linear(one.contiguous(), b, None)
        y.index_copy_(0, tokens, added.to(y.dtype))


def multiply(
    x: Inputs,
    weights: WideWeights,
    slots: Tensor,
    linear: Linear,
    activation: str = "none",
    gated: bool = False,
    product: PlainProduct = F.linear,
) -> Tensor:
    """As in Lora. `product`: as `linear` of `add`."""
    both = linear.multiply(x, weights.wide)
    y = both[:, : len(weights.b)].clone(memory_format=torch.contiguous_format)
    low = both[:, len(weights.b) :]
    for slot in _used(slots):
        tokens, own = (slots == slot).nonzero().flatten(), weights.slot_of == slot
        b, mine = weights.b[:, own].float(), low[tokens][:, own].float()
        added = y.index_select(0, tokens).float() + product(mine, b, None)
        y.index_copy_(0, tokens, added.to(y.dtype))
    activated = activate(y, activation, gated)
    assert isinstance(activated, Tensor)
    return activated


def _used(slots: Tensor) -> list[int]:
    used: list[int] = slots.unique().tolist()
    return [slot for slot in used if slot]
