"""Norms and activations for tools/benchmark_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.cases import EPS, Bench, Calls, Case
from bench.recurrent_kinds import library
from megatron_hybrid.layers.mlp import MLPConfig


def gated_norm_cases(bench: Bench) -> Iterator[Case]:
    """Of recurrent layers."""
    mamba, net = bench.model.mamba, bench.model.gated_delta_net
    if mamba is not None and mamba.norm == "gate_first":
        size, groups = mamba.inner_size, mamba.num_groups
        for rows in bench.rows():
            yield _gated_rms_norm(bench, rows, size, size // groups)
    if net is not None:
        for rows in bench.rows():
            size = net.value_heads * net.value_dim
            yield _gated_rms_norm(bench, rows, size, net.value_dim, norm_first=True)


def norm_cases(bench: Bench) -> Iterator[Case]:
    """Between layers."""
    for rows in bench.rows():
        yield _add_rms_norm(bench, rows)


def activation_cases(bench: Bench) -> Iterator[Case]:
    """Of an MLP, or of the one that all tokens share beside experts."""
    model = bench.model
    mlp = model.mlp or (model.moe.shared if model.moe is not None else None)
    if mlp is not None:
        for rows in bench.rows():
            yield _activation(bench, rows, mlp)


def _add_rms_norm(bench: Bench, rows: int) -> Case:
    norm, size = bench.kernels.norm, bench.model.hidden_size
    kind = torch.float32 if bench.model.residual_in_fp32 else bench.dtype
    weight = bench.normal(size)

    def make() -> Calls:
        x, residual = bench.normal(rows, size), bench.normal(rows, size, dtype=kind)
        calls: Calls = {"ours": lambda: norm.add_rms_norm(x, residual, 1.0, weight, EPS)}
        if (fast := library("flashinfer")) and kind == bench.dtype:
            calls["flashinfer"] = lambda: fast.fused_add_rmsnorm(x, residual, weight, EPS)
        return calls

    moved = rows * size * (2 * bench.item + 2 * kind.itemsize)
    return Case("add_rms_norm", f"{rows} x {size}", moved, make)


def _gated_rms_norm(
    bench: Bench, rows: int, size: int, group: int, norm_first: bool = False
) -> Case:
    norm = bench.kernels.norm
    weight = bench.normal(size)

    def make() -> Calls:
        x, gate = bench.normal(rows, size), bench.normal(rows, 2 * size)[:, :size]
        return {"ours": lambda: norm.gated_rms_norm(x, gate, weight, group, EPS, norm_first)}

    moved = 3 * rows * size * bench.item
    return Case("gated_rms_norm", f"{rows} x {size}, groups of {group}", moved, make)


def _activation(bench: Bench, rows: int, config: MLPConfig) -> Case:
    activate, size = bench.kernels.activation.activate, config.intermediate_size
    columns = 2 * size if config.gated else size

    def make() -> Calls:
        x = bench.normal(rows, columns)
        return {"ours": lambda: activate(x, config.activation, config.gated)}

    shape = f"{rows} x {columns} {config.activation}{' gated' if config.gated else ''}"
    return Case("activation", shape, rows * (columns + size) * bench.item, make)
