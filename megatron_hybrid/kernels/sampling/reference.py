"""Sampling in plain torch.

A token is drawn by inverting the cumulative distribution, taken in the order of token ids, at one
uniform number: whatever the batch, the same number draws the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.kernels.sampling.protocol import Filters


def log_softmax(logits: Tensor) -> Tensor:
    """As in Sampling."""
    return torch.log_softmax(logits.float(), dim=-1)


def argmax(logits: Tensor) -> Tensor:
    """As in Sampling."""
    return torch.argmax(logits, dim=-1)


def draw(logits: Tensor, filters: Filters, point: Tensor) -> Tensor:
    """As in Sampling."""
    temperature, top_k, top_p, min_p, uses_top_k, uses_top_p, uses_min_p = filters
    logits = logits.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-5)[:, None]
    weights = scaled.exp()  # the most likely token has 1
    if uses_min_p:
        weights = weights.masked_fill(weights < min_p[:, None], 0.0)
    if uses_top_k or uses_top_p:
        # stable: equal logits keep the order of their ids on every device
        ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        most = torch.where(top_k > 0, top_k, logits.shape[-1])[:, None]
        probability = torch.softmax(ordered.masked_fill(rank >= most, -torch.inf), dim=-1)
        before = probability.cumsum(-1) - probability  # mass of the more likely ones
        dropped = (rank >= most) | ((before >= top_p[:, None]) & (top_p < 1)[:, None])
        dropped[:, 0] = False
        weights = weights.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), 0.0)
    return invert(weights, point)


def invert(weights: Tensor, point: Tensor) -> Tensor:
    """weights [rows, vocabulary] not negative, with a positive sum; point [rows] in [0, 1) -> the
    token at that share of the cumulative sum, [rows] int64; never one of weight 0."""
    cumulative = weights.double().cumsum(-1)
    # scaled to the sum, so that rounding can't point past the last weight
    target = point[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)
    positive = weights > 0
    last = weights.shape[-1] - 1 - positive.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.minimum(found, last).squeeze(1)


def penalise(
    logits: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """As in Sampling."""
    written = counts > 0
    factor = torch.where(written | in_prompt, repetition[:, None], 1.0)
    logits = torch.where(logits < 0, logits * factor, logits / factor)
    logits -= frequency[:, None] * counts
    logits -= presence[:, None] * written
    return logits
