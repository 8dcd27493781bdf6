"""Norms and routers in tools/benchmark_kernels.py: all calls of a case compute the same."""

from __future__ import annotations

import pytest
import torch

from bench.cases import Case
from bench.normed_router_cases import normed_router_cases
from tests.tools.bench.benches import bench_of


def cases_of(model: str, device: str) -> list[Case]:
    return list(normed_router_cases(bench_of(model, device)))


def test_models_with_experts_alone_have_routers() -> None:
    assert [case.shape for case in cases_of("granite-4.0-h-tiny", "cpu")] == [
        "1 tokens",
        "2 tokens",
        "4 tokens",
    ]
    assert cases_of("nemotron-h-8b", "cpu") == []


def test_without_a_kernel_for_both_there_are_two() -> None:
    (case, *_) = cases_of("granite-4.0-h-tiny", "cpu")
    calls = case.make()
    assert list(calls) == ["ours"]
    experts, weights = calls["ours"]()
    assert experts.shape == weights.shape == (1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["granite-4.0-h-tiny", "qwen3.5-35b-a3b"])
@torch.inference_mode()
def test_both_ways_choose_alike(model: str) -> None:
    (case, *_) = cases_of(model, "cuda:0")
    torch.manual_seed(0)
    together = case.make()["ours"]()
    torch.manual_seed(0)
    apart = case.make()["two kernels"]()
    for found, expected in zip(together.routes, apart, strict=True):
        assert torch.equal(found, expected)
