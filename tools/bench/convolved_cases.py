"""Mamba2's decodes from the convolution's inputs on, for tools/benchmark_kernels.py: in one kernel,
also of more sequences than take it in a layer, and beside it by a kernel a piece.

    python tools/benchmark_kernels.py --model nemotron-h-8b --only "convolved decode"
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import WRITE_INTERVAL, Bench, Calls, Case, num_written
from bench.recurrent_cases import runs_bytes
from bench.recurrent_kinds import RecurrentKind
from megatron_hybrid.kernels.protocols import Mamba2Tokens
from megatron_hybrid.models.config import MAMBA

NAME = "convolved decode"


def convolved_cases(bench: Bench, kind: RecurrentKind) -> Iterator[Case]:
    if kind.letter == MAMBA:
        for batch in [1, 3] if bench.tiny else [1, 2, 4, 8, 16, 32]:
            yield _mamba2(bench, kind, batch)


def _mamba2(bench: Bench, kind: RecurrentKind, batch: int) -> Case:
    """The convolution and the scan, in a usual step without drafts."""
    assert bench.model.mamba is not None
    kernels, (heads, dim, size) = bench.kernels, kind.state
    inner, groups = heads * dim, bench.model.mamba.num_groups
    runs = bench.usual_runs(batch, WRITE_INTERVAL)
    conv_plan = kernels.conv.plan_runs(runs, kind.width, WRITE_INTERVAL)
    plan = kernels.plan_runs(runs, WRITE_INTERVAL)
    fused = kernels.convolved_mamba2

    def make() -> Calls:
        row = bench.normal(batch, inner + kind.channels + heads)
        _, x, dt = row.split([inner, kind.channels, heads], dim=1)
        conv, state = bench.conv_constants(kind), bench.states(kind, batch, torch.float32)
        conv_ring = bench.normal(batch, WRITE_INTERVAL, kind.channels)
        ring = bench.ring(kind, batch, WRITE_INTERVAL)

        def apart() -> Tensor:
            convolved = kernels.conv.decode_runs(x, conv, state.conv, conv_ring, conv_plan)
            values, b, c = convolved.split([inner, groups * size, groups * size], dim=1)
            b, c = (part.unflatten(1, (groups, size)) for part in (b, c))
            tokens = Mamba2Tokens(values.unflatten(1, (heads, dim)), b, c, dt)
            return kind.kernel.decode_runs(tokens, kind.constants, state.ssm, ring, plan)

        if fused is None:
            return {"ours": apart}
        layer = conv, kind.constants, state, (conv_ring, ring)
        return {
            "ours": lambda: fused.decode_runs(x, dt, *layer, plan),
            "a kernel a piece": apart,
        }

    moved = runs_bytes(bench, kind, runs) + _conv_bytes(bench, kind, batch + num_written(runs))
    return Case(NAME, f"B={batch} {heads} x {dim} x {size}", moved, make)


def _conv_bytes(bench: Bench, kind: RecurrentKind, windows: int) -> int:
    """Of the taps, and of so many windows that are read or written."""
    return kind.channels * (kind.width + windows * (kind.width - 1)) * bench.item
