"""Routers expert by expert, in float64, and inputs for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.experts.protocol import Router

# What the families have, and what only the kernels' limits allow.
KINDS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"normalize": False, "factor": 2.5},
    "sigmoid": {"scoring": "sigmoid", "eps": 1e-20},
    "sigmoid as it is": {"scoring": "sigmoid", "normalize": False, "factor": 1.5},
    "biased": {"scoring": "sigmoid", "bias": True, "factor": 2.5},
    "sinks": {"scoring": "sigmoid", "bias": True, "sinks": 3, "factor": 2.5, "scaled": True},
    "groups": {"scoring": "sigmoid", "bias": True, "num_groups": 4, "chosen_groups": 2},
}


def router(
    num_experts: int,
    chosen: int,
    width: int = 1,
    bias: bool = False,
    scaled: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Router:
    generator = torch.Generator(device).manual_seed(num_experts + width)
    weight = torch.randn(num_experts, width, generator=generator, device=device) * width**-0.5
    biases = None
    if bias:  # negative ones, too: the choice is by the sum, whatever its sign
        count = num_experts - more.get("sinks", 0)
        biases = torch.randn(count, generator=generator, device=device)
    scale = torch.full((1,), 0.7, device=device) if scaled else None
    return Router(weight.to(dtype), chosen, bias=biases, scale=scale, **more)


def normed_inputs(
    tokens: int,
    num_experts: int,
    norm_dtype: torch.dtype = torch.float16,
    residual_dtype: torch.dtype = torch.float16,
    kind: str = "sigmoid",
    width: int = 1100,
) -> tuple[Tensor, Tensor, Tensor, Router]:
    """x and residual, whose rows are strided, weight of the norm, router."""
    to = router(num_experts, 4, width, dtype=torch.float16, **KINDS[kind])
    generator = torch.Generator().manual_seed(tokens)
    x, residual = torch.randn(2, tokens, width, generator=generator)
    weight = torch.rand(width, generator=generator) + 0.5
    x, residual = in_longer_rows(x.half()), in_longer_rows(residual.to(residual_dtype))
    return x, residual, weight.to(norm_dtype), to


def in_longer_rows(values: Tensor) -> Tensor:
    """A copy."""
    tokens, width = values.shape
    return values.new_empty(tokens, width + 4)[:, :width].copy_(values)


def chosen_by_hand(logits: Tensor, router: Router) -> tuple[list[list[int]], Tensor]:
    """Experts and weights of logits [tokens, experts]: of equal ones the lower expert first. Behind
    them those of sinks."""
    experts, weights = [], []
    factor = router.factor if router.scale is None else router.factor * float(router.scale)
    count = logits.shape[1] - router.sinks
    bias = [0.0] * count if router.bias is None else router.bias.double().tolist()
    for every in logits.double().tolist():
        row, sinks = every[:count], [1 / (1 + math.exp(-logit)) for logit in every[count:]]
        scores = row
        if router.scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-logit)) for logit in row]
        choice = [score + more for score, more in zip(scores, bias, strict=True)]
        size = len(row) // router.num_groups
        groups = [
            sum(sorted(choice[first : first + size])[-2:]) for first in range(0, len(row), size)
        ]
        best = sorted(range(router.num_groups), key=lambda group: (-groups[group], group))
        open_to = [e for e in range(len(row)) if e // size in best[: router.chosen_groups]]
        order = sorted(open_to, key=lambda expert: (-choice[expert], expert))[: router.chosen]
        shares = [scores[expert] for expert in order] + sinks
        total = 1.0
        if router.scoring == "softmax":
            of_all = shares if router.normalize else scores
            total = sum(math.exp(score - max(row)) for score in of_all)
            shares = [math.exp(share - max(row)) for share in shares]
        elif router.normalize:
            total = sum(shares) + router.eps
        experts.append(order)
        weights.append([factor * share / total for share in shares])
    return experts, torch.tensor(weights, dtype=torch.float64)
