"""Experts in plain torch: a loop over those that have any tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import activate
from megatron_hybrid.kernels.linear.formats import Weight
from megatron_hybrid.kernels.linear.reference import multiply, plain_rows
from megatron_hybrid.kernels.protocols import ExpertWeights, Inputs


def route(logits: Tensor, chosen: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """As in Experts."""
    if not normalize:
        shares, experts = torch.softmax(logits.float(), dim=-1).topk(chosen, dim=-1)
        return experts, shares
    best, experts = logits.float().topk(chosen, dim=-1)
    return experts, torch.softmax(best, dim=-1)


def mix(x: Inputs, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """As in Experts."""
    x, chosen = plain_rows(x), experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    tokens = order // chosen
    share = weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    inputs = x.index_select(0, tokens)
    outputs = torch.zeros_like(inputs)
    for expert, begin, end in _ranges(flat, layer.up.shape[0]):
        up = _product(inputs[begin:end], layer.up, expert)
        hidden = plain_rows(activate(up, layer.activation, layer.gated))
        outputs[begin:end] = _product(hidden, layer.down, expert)
    return torch.zeros_like(x).index_add_(0, tokens, outputs.mul_(share))


def add_shared(routed: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """As in Experts."""
    return torch.addcmul(routed, shared, F.linear(x, gate).sigmoid())


def _product(x: Tensor, weights: Weight, expert: int) -> Tensor:
    if isinstance(weights, Tensor):
        return F.linear(x, weights[expert])
    return multiply(x, weights.expert(expert))


def _ranges(flat: Tensor, num_experts: int) -> Iterator[tuple[int, int, int]]:
    """(expert, begin, end) of the sorted assignments, for experts that have any."""
    begin = 0
    counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            yield expert, begin, begin + count
            begin += count
