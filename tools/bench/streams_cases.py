"""Residual streams for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.cases import Bench, Calls, Case
from megatron_hybrid.layers.streams import BalancedStreamsConfig


def streams_cases(bench: Bench) -> Iterator[Case]:
    """Around a block of a model that has several."""
    config = bench.model.streams
    if config is None:
        return
    count, size = config.count, bench.model.hidden_size
    names = ("gated mean", "injected")
    if isinstance(config, BalancedStreamsConfig):
        names = ("balanced", "mixed")
    for rows in bench.rows():
        for name in names:
            moved = (2 * count + 1) * rows * size * bench.item
            if name == "balanced":
                moved = 2 * (2 + count) * count * rows * 4
            make = partial(_calls, bench, name, rows)
            yield Case(f"streams, {name}", f"{rows} x {count} x {size}", moved, make)


def _calls(bench: Bench, name: str, rows: int) -> Calls:
    config, kernels, size = bench.model.streams, bench.kernels.streams, bench.model.hidden_size
    assert config is not None
    count = config.count
    own, x = bench.normal(rows, count, size), bench.normal(rows, size)
    if name == "gated mean":
        gates = bench.normal(rows, count, size)
        return {"ours": lambda: kernels.gated_mean(gates, own)}
    if name == "injected":
        inject = bench.normal(rows, count)
        return {"ours": lambda: kernels.injected(own, x, inject)}
    assert isinstance(config, BalancedStreamsConfig)
    logits = bench.normal(rows, (2 + count) * count).float()
    balance = partial(kernels.balanced, logits, count, config.iterations, config.eps)
    weights = balance()
    return {"ours": balance if name == "balanced" else lambda: kernels.mixed(own, x, weights)}
