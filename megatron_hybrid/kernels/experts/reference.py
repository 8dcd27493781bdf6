"""Experts in plain torch: a loop over those that have any tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_hybrid.kernels.activation.reference import activate
from megatron_hybrid.kernels.elementwise import sigmoid
from megatron_hybrid.kernels.experts.protocol import (
    ExpertAdapters,
    ExpertWeights,
    Router,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.kernels.linear.formats import Weight
from megatron_hybrid.kernels.linear.reference import multiply, plain_rows
from megatron_hybrid.kernels.lora import reference as lora
from megatron_hybrid.kernels.protocols import Inputs

# As in Linear, without a bias.
Product = Callable[[Inputs, Weight], Tensor]


def route(x: Tensor, router: Router, product: Product = multiply) -> tuple[Tensor, Tensor]:
    """As in Experts."""
    return choose(scores(x, router, product), router)


def scores(x: Tensor, router: Router, product: Product = multiply) -> Tensor:
    """[tokens, width] -> logits [tokens, experts + sinks]; see Router."""
    if router.scoring == "softmax":
        return product(x, router.weight)
    return product(x.float(), router.weight.float())


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """`route` from the logits [tokens, experts + sinks] on."""
    if router.scoring == "softmax":
        if router.normalize:
            best, experts = logits.float().topk(router.chosen, dim=-1)
            weights = torch.softmax(best, dim=-1)
        else:
            weights, experts = torch.softmax(logits.float(), dim=-1).topk(router.chosen, dim=-1)
        return experts, weights if router.factor == 1.0 else weights * router.factor
    logits, of_sinks = logits.float().tensor_split([logits.shape[1] - router.sinks], dim=1)
    scores = sigmoid(logits)
    choice = scores if router.bias is None else scores + router.bias
    if router.num_groups > 1:
        by_group = choice.unflatten(1, (router.num_groups, -1))
        group_scores = by_group.topk(2, dim=-1).values.sum(dim=-1)
        groups = group_scores.topk(router.chosen_groups, dim=-1).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
        choice = by_group.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
    experts = choice.topk(router.chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if router.sinks:
        assert router.normalize
        weights = torch.cat((weights, sigmoid(of_sinks)), dim=1)
    if router.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + router.eps)
    weights = weights * router.factor
    return experts, weights if router.scale is None else weights * router.scale


def add_norm_route(*_: object) -> None:
    """One after the other."""


def takes_shared(x: Inputs, layer: ExpertWeights, shared: SharedExpert) -> bool:
    """Never."""
    return False


def mix(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: Shared | None = None,
    product: Product = multiply,
    adapters: ExpertAdapters | None = None,
    add: Callable[..., None] = lora.add,
) -> Tensor:
    """As in Experts; with `adapters` `mix_adapted`, and `add`: of Lora."""
    x, chosen = plain_rows(x), experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    tokens = order // chosen
    share = weights.flatten().index_select(0, order)[:, None].to(x.dtype)
    inputs = x.index_select(0, tokens)
    outputs = torch.zeros_like(inputs)
    for expert, begin, end in _ranges(flat, layer.up.shape[0]):
        up = product(inputs[begin:end], weight_of(layer.up, expert))
        if adapters is not None:
            slots = adapters.of_expert(tokens[begin:end], expert)
            add(up, inputs[begin:end], adapters.up, slots)
        hidden = plain_rows(activate(up, layer.activation, layer.gated))
        down = product(hidden, weight_of(layer.down, expert))
        if adapters is not None:
            add(down, hidden, adapters.down, slots)
        outputs[begin:end] = down
    routed = torch.zeros_like(x).index_add_(0, tokens, outputs.mul_(share))
    if shared is None:
        return routed
    assert isinstance(shared, SharedResult)
    return add_shared(routed, shared, x, product)


mix_parts = mix


def mix_adapted(
    x: Inputs,
    experts: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    adapters: ExpertAdapters,
) -> Tensor:
    """As in Experts."""
    return mix(x, experts, weights, layer, adapters=adapters)


def add_shared(
    routed: Tensor, shared: SharedResult, x: Tensor, product: Product = multiply
) -> Tensor:
    """As in Experts."""
    if shared.gate is None:
        return routed + shared.values
    return torch.addcmul(routed, shared.values, sigmoid(product(x, shared.gate)))


def weight_of(weights: Weight, expert: int) -> Weight:
    """One expert's of those of all."""
    return weights[expert] if isinstance(weights, Tensor) else weights.expert(expert)


def _ranges(flat: Tensor, num_experts: int) -> Iterator[tuple[int, int, int]]:
    """(expert, begin, end) of the sorted assignments, for experts that have any."""
    begin = 0
    counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            yield expert, begin, begin + count
            begin += count
