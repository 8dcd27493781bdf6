"""Experts in plain torch: a loop over those that have any tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import activate


def route(logits: Tensor, chosen: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """The `chosen` best experts of every token and the softmax over their logits; unless
    `normalize`, over those of all experts.

    logits [tokens, experts] -> experts (integers) and weights float32, [tokens, chosen] each, the
    best first.
    """
    if not normalize:
        shares, experts = torch.softmax(logits.float(), dim=-1).topk(chosen, dim=-1)
        return experts, shares
    best, experts = logits.float().topk(chosen, dim=-1)
    return experts, torch.softmax(best, dim=-1)


def mix(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    activation: str,
    gated: bool,
    elsewhere: int = 0,
) -> Tensor:
    """y[t] = sum over j of weights[t, j] * down[e] act(up[e] x[t]), with e = experts[t, j].

    Where other ranks hold so many more experts (`elsewhere`), an id past the last one here stands
    for any of them, and adds nothing.

    x [tokens, width], experts and weights [tokens, chosen] (weights float32), up_proj
    [experts, inner (twice that where gated: gate, then up), width], down_proj
    [experts, width, inner] -> [tokens, width] in x's dtype.
    """
    chosen = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    tokens = order // chosen
    share = weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    inputs = x.index_select(0, tokens)
    outputs = torch.zeros_like(inputs)
    for expert, begin, end in _ranges(flat, up_proj.shape[0]):
        up = activate(F.linear(inputs[begin:end], up_proj[expert]), activation, gated)
        outputs[begin:end] = F.linear(up, down_proj[expert])
    return torch.zeros_like(x).index_add_(0, tokens, outputs.mul_(share))


def _ranges(flat: Tensor, num_experts: int) -> Iterator[tuple[int, int, int]]:
    """(expert, begin, end) of the sorted assignments, for experts that have any."""
    begin = 0
    counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            yield expert, begin, begin + count
            begin += count
