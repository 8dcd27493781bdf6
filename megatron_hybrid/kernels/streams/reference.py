"""Residual streams in plain torch: the meaning, and what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.elementwise import sigmoid
from megatron_hybrid.kernels.norm.reference import inverse_rms
from megatron_hybrid.kernels.streams.protocol import StreamWeights


def gated_mean(gates: Tensor, streams: Tensor) -> Tensor:
    """As in Streams."""
    return sigmoid(gates.float()).mul_(streams).mean(dim=1).to(streams.dtype)


def weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """As in Streams."""
    return (streams * weights[:, :, None]).sum(dim=1).to(streams.dtype)


def injected(streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """As in Streams."""
    weights = 2 * sigmoid(gates.float())
    return (weights[:, :, None] * x[:, None]).add_(streams).to(streams.dtype)


def mixed(streams: Tensor, x: Tensor, weights: StreamWeights) -> Tensor:
    """As in Streams."""
    total = weights.after[:, :, None] * x[:, None]
    for i, row in enumerate(weights.mixing.unbind(dim=1)):  # in order, whatever the tokens are
        total.addcmul_(row[:, :, None], streams[:, i, None])
    return total.to(streams.dtype)


def attended(
    streams: Tensor, queries: Tensor, weights: Tensor, source_eps: float, eps: float
) -> Tensor:
    """As in Streams."""
    wide = streams.float()
    normed = wide * inverse_rms(wide, wide.shape[2], source_eps)
    out = []
    for query, weight in zip(queries, weights, strict=True):
        logits = (normed * query).sum(dim=2) * len(query) ** -0.5
        shares = (logits - logits.amax(dim=1, keepdim=True)).exp()
        total = torch.zeros_like(normed[:, 0])
        for i in range(normed.shape[1]):  # in order, whatever the tokens are
            total.addcmul_(shares[:, i, None], normed[:, i])
        total /= shares.sum(dim=1, keepdim=True)
        total *= inverse_rms(total, len(query), eps)
        out.append(total.mul_(weight).to(weight.dtype))
    return torch.stack(out, dim=1)


def keyed(key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    """As in Streams."""
    alike = (key.float() * query).sum(dim=2, keepdim=True) / key.shape[2] ** 0.5
    gates = sigmoid(alike.abs().clamp_min(1e-6).sqrt() * alike.sign())
    return (gates * value[:, None]).to(value.dtype)


def balanced(logits: Tensor, streams: int, iterations: int, eps: float) -> StreamWeights:
    """As in Streams."""
    before, after, mixing = logits.split([streams, streams, streams * streams], dim=1)
    rows = mixing.unflatten(1, (streams, streams))
    rows = (rows - rows.amax(dim=2, keepdim=True)).exp()
    rows = rows / rows.sum(dim=2, keepdim=True) + eps
    rows = rows / (rows.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        rows = rows / (rows.sum(dim=2, keepdim=True) + eps)
        rows = rows / (rows.sum(dim=1, keepdim=True) + eps)
    return StreamWeights(sigmoid(before) + eps, 2 * sigmoid(after), rows)
