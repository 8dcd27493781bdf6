"""Decodes from the convolution's inputs on in tools/benchmark_kernels.py: in one kernel and in
several."""

from __future__ import annotations

import pytest
import torch

from bench.cases import Case
from bench.convolved_cases import convolved_cases
from bench.recurrent_kinds import recurrent_kinds
from tests.tools.bench.benches import bench_of, results, triton_bench


def cases_of(bench) -> list[Case]:
    (kind,) = recurrent_kinds(bench.model, bench.kernels, bench.device, bench.dtype)
    return list(convolved_cases(bench, kind))


@torch.inference_mode()
def test_one_kernel_computes_what_several_do() -> None:
    bench = triton_bench("nemotron-h-8b")
    cases = cases_of(bench)
    assert len({case.shape for case in cases}) == len(cases) > 1
    for case in cases:
        found = results(case)
        ours, apart = found["ours"].flatten(1), found["a kernel a piece"]
        tolerance = 1e-5 if bench.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, apart.flatten(1), atol=tolerance, rtol=tolerance)


def test_without_such_a_kernel_there_are_several() -> None:
    for case in cases_of(bench_of("nemotron-h-8b")):
        assert list(results(case)) == ["ours"]


@pytest.mark.parametrize("model", ["falcon-mamba-7b", "lfm2-1.2b", "qwen3.5-35b-a3b"])
def test_other_layers_have_no_such_kernel(model: str) -> None:
    assert cases_of(bench_of(model)) == []
