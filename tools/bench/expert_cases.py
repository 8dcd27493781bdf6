"""Routers and experts for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.cases import Bench, Calls, Case
from megatron_hybrid.kernels.experts.protocol import (
    ExpertWeights,
    Router,
    Shared,
    SharedExpert,
    SharedResult,
)
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.moe import MoEConfig


def expert_cases(bench: Bench) -> Iterator[Case]:
    config = bench.model.moe
    if config is None:
        return
    for tokens in [*bench.batches(), bench.rows()[-1]]:
        yield _router(bench, tokens, config)
        yield _experts(bench, tokens, config)
        if _shared_is_like_experts(config):
            yield _experts(bench, tokens, config, config.shared)


def _router(bench: Bench, tokens: int, config: MoEConfig) -> Case:
    number, width = config.num_experts, bench.model.hidden_size

    def make() -> Calls:
        x, weight = bench.normal(tokens, width), bench.normal(number, width)
        to = Router(weight, config.experts_per_token, config.scoring, config.normalize_weights)
        return {"ours": lambda: bench.kernels.experts.route(x, to)}

    moved = (number + tokens) * width * bench.item
    return Case("router", f"{tokens} tokens", moved, make, 2 * tokens * number * width)


def _experts(bench: Bench, tokens: int, config: MoEConfig, beside: MLPConfig | None = None) -> Case:
    """`beside`: the MLP that all tokens share, as a layer computes it with its experts."""
    inner = config.expert.intermediate_size
    halves = 2 if config.expert.gated else 1
    rows, shared_inner = halves * inner, 0 if beside is None else beside.intermediate_size
    width, number = config.latent_size or bench.model.hidden_size, config.num_experts
    chosen = torch.rand(tokens, number, device=bench.device).topk(config.experts_per_token).indices

    def make() -> Calls:
        x = bench.normal(tokens, width)
        weights = torch.rand(chosen.shape, device=bench.device)
        up = bench.normal(number, rows, width).mul_(width**-0.5)
        down = bench.normal(number, width, inner).mul_(inner**-0.5)
        layer = ExpertWeights(up, down, config.expert.activation, config.expert.gated)
        shared = None
        if beside is not None:
            shared = SharedExpert(
                bench.normal(halves * shared_inner, width).mul_(width**-0.5),
                bench.normal(width, shared_inner).mul_(shared_inner**-0.5),
                bench.normal(1, width) if config.shared_gate else None,
            )
        return {"ours": lambda: _mix(bench, x, chosen, weights, layer, shared)}

    used = len(chosen.unique())  # experts whose weights are read
    moved = ((used * inner + shared_inner) * (halves + 1) + 2 * tokens) * width * bench.item
    products = config.experts_per_token * inner + shared_inner
    flops = 2 * tokens * products * width * (halves + 1)
    name = "experts" if beside is None else "experts and shared MLP"
    return Case(name, f"{tokens} tokens", moved, make, flops)


def _mix(
    bench: Bench,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    layer: ExpertWeights,
    shared: SharedExpert | None,
) -> Tensor:
    """As in a layer of experts."""
    kernels = bench.kernels
    beside: Shared | None = shared
    if shared is not None and not kernels.experts.takes_shared(len(x), layer, shared):
        up = kernels.linear.multiply(x, shared.up)
        hidden = kernels.activation.activate(up, layer.activation, layer.gated)
        beside = SharedResult(kernels.linear.multiply(hidden, shared.down), shared.gate)
    return kernels.experts.mix(x, chosen, weights, layer, beside)


def _shared_is_like_experts(config: MoEConfig) -> bool:
    """Whether all tokens share an MLP that is like the experts but for its size."""
    shared, expert = config.shared, config.expert
    if shared is None or config.latent_size is not None:
        return False
    return replace(shared, intermediate_size=expert.intermediate_size) == expert
