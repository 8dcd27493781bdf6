"""Adapters' products in plain torch: the meaning, and what a CPU runs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.linear.reference import PlainProduct
from megatron_hybrid.kernels.lora.protocol import AdapterWeights


def add(
    y: Tensor,
    x: Tensor,
    weights: AdapterWeights,
    slots: Tensor,
    linear: PlainProduct = F.linear,
) -> None:
    """As in Lora. `linear`: x W^T + bias of numbers in one type."""
    for slot in slots.unique().tolist():
        if slot == 0:
            continue
        tokens = (slots == slot).nonzero().flatten()
        rows = x.index_select(0, tokens).float()
        low = linear(rows, weights.a[slot - 1].float(), None).to(x.dtype).float()
        added = y.index_select(0, tokens).float()
        for role, one in enumerate(low.split(weights.rank, dim=1)):
            outputs = (weights.roles == role).nonzero().flatten()
            b = weights.b[slot - 1].index_select(0, outputs).float()
            added[:, outputs] += linear(one.contiguous(), b, None)
        y.index_copy_(0, tokens, added.to(y.dtype))
