"""Routers of few tokens that make the norm before them, for tools/benchmark_kernels.py: in one
kernel, and beside it by two.

    python tools/benchmark_kernels.py --model granite-4.0-h-tiny --only "norm and router"
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from bench.cases import EPS, Bench, Calls, Case
from megatron_hybrid.kernels.experts.protocol import Router
from megatron_hybrid.layers.moe import MoEConfig

NAME = "norm and router"


def normed_router_cases(bench: Bench) -> Iterator[Case]:
    if bench.model.moe is not None:
        for tokens in [1, 2, 4]:
            yield _normed_router(bench, bench.model.moe, tokens)


def _normed_router(bench: Bench, config: MoEConfig, tokens: int) -> Case:
    number, width, kernels = config.num_experts, bench.model.hidden_size, bench.kernels

    def make() -> Calls:
        x, residual = bench.normal(tokens, width), bench.normal(tokens, width)
        weight, norm = bench.normal(number, width), bench.normal(width)
        to = Router(weight, config.experts_per_token, config.scoring, config.normalize_weights)
        arguments = x, residual, 1.0, norm, EPS, x.dtype

        def apart() -> tuple[Tensor, Tensor]:
            normed, _ = kernels.norm.add_rms_norm(*arguments)
            assert isinstance(normed, Tensor)
            return kernels.experts.route(normed, to)

        if kernels.experts.add_norm_route(*arguments, to) is None:
            return {"ours": apart}
        return {
            "ours": lambda: kernels.experts.add_norm_route(*arguments, to),
            "two kernels": apart,
        }

    moved = (number + 4 * tokens) * width * bench.item
    return Case(NAME, f"{tokens} tokens", moved, make, 2 * tokens * number * width)
