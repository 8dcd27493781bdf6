"""Routers and experts for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from megatron_hybrid.kernels.experts.triton import Tiles

# Columns, depth, warps and stages; a gated product's columns are half of its weight's rows.
TILES = (
    "32.128.4.4", "32.256.4.3", "64.64.4.4", "64.64.4.6", "64.128.4.3", "64.128.4.4", "64.128.8.4",
    "64.256.4.3", "128.64.4.4", "128.64.8.4", "128.128.4.3", "128.128.8.3",
)  # fmt: skip


def expert_cases(bench: Bench) -> Iterator[Case]:
    config = bench.model.moe
    if config is None:
        return
    for tokens in [*bench.batches(), bench.rows()[-1]]:
        yield _router(bench, tokens, config)
        yield _experts(bench, tokens, config)
        if _shared_is_like_experts(config):
            yield _experts(bench, tokens, config, config.shared)
        if bench.kernels.name == "gpu" and 1 < tokens <= 512:  # others have no tiles
            yield _expert_tiles(bench, tokens, config)


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
    shared_inner = 0 if beside is None else beside.intermediate_size
    width, number = config.latent_size or bench.model.hidden_size, config.num_experts
    chosen = torch.rand(tokens, number, device=bench.device).topk(config.experts_per_token).indices

    def make() -> Calls:
        x = bench.normal(tokens, width)
        weights = torch.rand(chosen.shape, device=bench.device)
        layer = _weights(bench, config)
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


def _weights(bench: Bench, config: MoEConfig) -> ExpertWeights:
    expert, number = config.expert, config.num_experts
    inner, width = expert.intermediate_size, config.latent_size or bench.model.hidden_size
    up = bench.normal(number, (2 if expert.gated else 1) * inner, width).mul_(width**-0.5)
    down = bench.normal(number, width, inner).mul_(inner**-0.5)
    return ExpertWeights(up, down, expert.activation, expert.gated)


def _expert_tiles(bench: Bench, tokens: int, config: MoEConfig) -> Case:
    """The grouped products with other tiles than theirs, one of the two at a time."""
    from megatron_hybrid.kernels.experts.triton import Tile, choose_tiles, mix_grouped  # of GPUs

    number, gated = config.num_experts, config.expert.gated
    chosen = torch.rand(tokens, number, device=bench.device).topk(config.experts_per_token).indices
    ours = choose_tiles(chosen.numel(), number, gated, bench.dtype)
    others = {f"{rows} rows": ours._replace(rows=rows) for rows in (16, 32, 64)}
    for name in TILES:
        tile = Tile(*map(int, name.split(".")))
        up = tile._replace(columns=tile.columns // 2) if gated else tile  # and as many of the gate
        others |= {f"up {name}": ours._replace(up=up), f"down {name}": ours._replace(down=tile)}
    width = config.latent_size or bench.model.hidden_size

    def make() -> Calls:
        weights = torch.rand(chosen.shape, device=bench.device)
        inputs = bench.normal(tokens, width), chosen.int(), weights, _weights(bench, config)
        calls: Calls = {"ours": partial(mix_grouped, *inputs, ours)}
        return calls | {
            name: partial(mix_grouped, *inputs, tiles)
            for name, tiles in others.items()
            if tiles != ours
        }

    used = len(chosen.unique())
    moved = used * config.expert.intermediate_size * (3 if gated else 2) * width * bench.item
    return Case("expert tiles", f"{tokens} tokens, ours {_named(ours)}", moved, make)


def _named(tiles: Tiles) -> str:
    up, down = (".".join(map(str, tile)) for tile in (tiles.up, tiles.down))
    return f"{tiles.rows} rows, up {up}, down {down}"


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
    if shared is not None and not kernels.experts.takes_shared(x, layer, shared):
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
