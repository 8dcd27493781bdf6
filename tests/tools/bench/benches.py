"""What tools/benchmark_kernels.py times, for tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from bench.cases import Bench, Case
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.config import HybridModelConfig

CONFIGS = Path(__file__).parents[3] / "configs" / "models"


def config(model: str) -> HybridModelConfig:
    return ModelFolder.open(CONFIGS / model).config


def bench_of(model: str, device: str = "cpu") -> Bench:
    return Bench(config(model), torch.device(device), "auto")


def triton_bench(model: str) -> Bench:
    """With the kernels that a GPU runs; without a GPU at tiny sizes in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return bench_of(model, "cuda:0")
    import tests.interpreter  # noqa: F401

    bench = bench_of(model)
    bench.kernels = kernel_set._gpu()
    return bench


def results(case: Case) -> dict[str, torch.Tensor]:
    """Of each call, on inputs that are the same for all."""
    found = {}
    torch.manual_seed(0)
    for label in case.make():
        torch.manual_seed(0)  # calls write what others read
        found[label] = case.make()[label]()
    return found


def check_calls(
    cases: Iterable[Case], expected_label: str, limits: Mapping[str, float] | None = None
) -> set[str]:
    """That all calls of a case compute what one label's do, in a norm of 0.01 or a label's limit;
    of a case with another tile, behind ": ", what those of its size do. The tiles."""
    expected: dict[str, torch.Tensor] = {}
    tiles = set()
    for case in cases:
        size, _, tile = case.shape.partition(": ")
        torch.manual_seed(0)  # cases of a size have the same inputs
        calls = case.make()
        if not tile:
            expected[size] = calls[expected_label]()
        for label, call in calls.items():
            limit = (limits or {}).get(label, 0.01)
            error = (call() - expected[size]).norm()
            assert error <= limit * expected[size].norm(), (case.shape, label)
        tiles.add(tile)
    return tiles
