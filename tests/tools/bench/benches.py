"""What tools/benchmark_kernels.py times, for tests."""

from __future__ import annotations

import importlib.util
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
