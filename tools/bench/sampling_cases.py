"""The choice of tokens for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.cases import Bench, Calls, Case
from megatron_hybrid.kernels.sampling.protocol import Filters


def sampling_cases(bench: Bench) -> Iterator[Case]:
    for rows in bench.batches():
        yield _argmax(bench, rows)
        for top_k, top_p in ((0, 1.0), (50, 0.9), (0, 0.9)):
            yield _draw(bench, rows, top_k, top_p)


def _argmax(bench: Bench, rows: int) -> Case:
    sampling, vocabulary = bench.kernels.sampling, bench.model.vocab_size

    def make() -> Calls:
        logits = bench.normal(rows, vocabulary)
        return {"ours": lambda: sampling.argmax(logits), "torch": lambda: logits.argmax(1)}

    return Case("argmax", f"{rows} x {vocabulary}", rows * vocabulary * bench.item, make)


def _draw(bench: Bench, rows: int, top_k: int, top_p: float) -> Case:
    """Of a flat distribution: top-p alone keeps half of the vocabulary."""
    sampling, vocabulary = bench.kernels.sampling, bench.model.vocab_size

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=bench.device)

    def make() -> Calls:
        logits = bench.normal(rows, vocabulary)
        point = torch.rand(rows, dtype=torch.float64, device=bench.device)
        values = full(0.7), full(top_k, torch.int32), full(top_p), full(0.0)
        filters = Filters(*values, top_k > 0, top_p < 1, uses_min_p=False)
        return {"ours": lambda: sampling.draw(logits, filters, point)}

    used = [f"top-k {top_k}"] * (top_k > 0) + [f"top-p {top_p}"] * (top_p < 1)
    shape = f"{rows} x {vocabulary} {', '.join(used)}".rstrip()
    return Case("draw", shape, rows * vocabulary * bench.item, make)
