"""Heads of convolved attention in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_hybrid.kernels.convolved_heads.protocol import HeadTokens
from megatron_hybrid.kernels.linear.reference import multiply


def mix(
    tokens: HeadTokens,
    weight: Tensor,
    bias: Tensor,
    kv_heads: int,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] = multiply,
) -> Tensor:
    """As in ConvolvedHeads. `product`: x W^T + b."""
    heads, dim = bias.shape
    by_head = [tap.unflatten(1, (heads, dim)) for tap in tokens.taps]
    inputs = torch.stack(by_head, dim=2).flatten(2).unbind(1)
    convolved = [product(*head) for head in zip(inputs, weight, bias, strict=True)]
    means = _means(tokens.projected[:, : heads * dim].unflatten(1, (heads, dim)), kv_heads)
    value = tokens.value.unflatten(1, (kv_heads, dim))
    return torch.cat((torch.stack(convolved, dim=1) + means, value), dim=1)


def _means(projected: Tensor, kv_heads: int) -> Tensor:
    """[T, heads + kv_heads, D]"""
    queries, keys = projected.tensor_split([projected.shape[1] - kv_heads], dim=1)
    grouped = (queries.unflatten(1, (kv_heads, -1)) + keys[:, :, None]) * 0.5
    first, *others = grouped.unbind(2)
    for other in others:  # in this order, whoever else is in the step
        first = first + other
    return torch.cat((grouped.flatten(1, 2), first / grouped.shape[2]), dim=1)
