"""Residual streams in plain torch: the meaning, and what a CPU runs."""

from __future__ import annotations

from torch import Tensor

from megatron_hybrid.kernels.elementwise import sigmoid
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
