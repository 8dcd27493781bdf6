"""Mamba1's decodes of few sequences from x_proj's result on, for tools/benchmark_kernels.py: in one
kernel, and beside it by a kernel a piece.

    python tools/benchmark_kernels.py --model falcon-mamba-7b --only "Mamba1 decode"
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import Bench, Calls, Case
from megatron_hybrid.kernels.projected import LowRank
from megatron_hybrid.kernels.protocols import Mamba1Constants, Mamba1Tokens
from megatron_hybrid.layers.mamba1 import Mamba1Config

NAME = "Mamba1 decode"


def projected_cases(bench: Bench) -> Iterator[Case]:
    if bench.model.mamba1 is None:
        return
    for batch in [1, 3] if bench.tiny else [1, 2, 3, 4, 8]:
        yield _decode(bench, bench.model.mamba1, batch)


def _decode(bench: Bench, config: Mamba1Config, batch: int) -> Case:
    inner, size, rank = config.inner_size, config.state_size, config.dt_rank
    sections, eps, kernels = (rank, size, size), config.norms_eps, bench.kernels
    constants = Mamba1Constants(
        torch.full((inner, size), -1.0, device=bench.device).cumsum(1),
        torch.ones(inner, device=bench.device),
        torch.full((inner,), -4.5, device=bench.device),
    )
    plan = kernels.plan_decode(bench.slots(batch))
    fused = kernels.projected_mamba1

    def make() -> Calls:
        x, z = bench.normal(batch, inner), bench.normal(batch, 2 * inner)[:, inner:]
        weight, projected = bench.normal(inner, rank), bench.normal(batch, sum(sections))
        norms = None if config.norms == "none" else bench.normal(sum(sections))
        low_rank = LowRank(projected, weight, norms, eps)
        state = torch.randn(batch + 1, inner, size, device=bench.device)
        # A layer's constants are its own, and come from memory as its weight does.
        own = constants._replace(A=constants.A.clone())

        def apart() -> Tensor:
            parts = projected
            if norms is not None:
                parts = kernels.norm.rms_norm_parts(projected, sections, norms, eps)
            low, b, c = parts.split(sections, dim=1)
            tokens = Mamba1Tokens(x, z, kernels.linear.multiply(low, weight), b, c)
            return kernels.mamba1_scan.decode(tokens, own, state, plan)

        if fused is None:
            return {"ours": apart}
        return {
            "ours": lambda: fused.decode(x, z, low_rank, own, state, plan),
            "a kernel a piece": apart,
        }

    moved = inner * rank * bench.item + inner * size * 4 * (2 * batch + 1)
    moved += batch * (3 * inner + sum(sections)) * bench.item
    normed = "" if config.norms == "none" else ", normed"
    return Case(NAME, f"B={batch} {rank} to {inner} x {size}{normed}", moved, make)
