"""Libraries' products beside ours in tools/benchmark_kernels.py: of the same weights and inputs."""

from __future__ import annotations

import pytest
import torch

from bench.quantized_cases import FORMATS, _expert_libraries, _linear_libraries
from megatron_hybrid.kernels.experts.protocol import ExpertWeights
from tests.tools.bench.benches import bench_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def bench():
    return bench_of("nemotron-h-8b", "cuda:0")


def close(found, expected):
    return (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


@pytest.mark.parametrize("tokens", [1, 32, 50])
@pytest.mark.parametrize("name", ["FP8", "FP8 blocks", "INT8", "NVFP4"])
def test_dense_products(bench, name, tokens):
    format, x = FORMATS[name], bench.normal(tokens, 1024)
    weight = format.quantize(bench.normal(512, 1024))
    inputs = x
    if format.activations != "none":
        inputs = bench.kernels.linear.quantize_rows(x, format, None)
    expected = bench.kernels.linear.multiply(inputs, weight)
    calls = _linear_libraries(x, inputs, weight)
    if not calls and (name != "INT8" or tokens > 16):
        pytest.skip("needs humming-kernels")
    for label, call in calls.items():
        found = call()[0] if label == "humming" else call()[:tokens]
        if "no scales" in label:
            found = found * inputs.scale * weight.scale.t()
        assert close(found, expected), label


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_products_of_experts(bench, name, tokens):
    format, x = FORMATS[name], bench.normal(tokens, 512)
    up = format.quantize(bench.normal(8 * 512, 512)).stacked(8)
    down = format.quantize(bench.normal(8 * 512, 256)).stacked(8)
    chosen = torch.rand(tokens, 8, device=DEVICE).topk(2).indices.int()
    calls = _expert_libraries(bench, x, chosen, ExpertWeights(up, down, "silu", True))
    if not calls:
        pytest.skip("needs humming-kernels")
    pairs = chosen.flatten().long()
    order = pairs.argsort(stable=True) if name == "FP8" else torch.arange(len(pairs))
    rows = x.repeat_interleave(2, 0)[order]
    if name == "FP8":
        rounded = bench.kernels.linear.quantize_rows(rows, format, None)
        rows = rounded.values.float() * rounded.scale
    expected = torch.einsum("pk,pnk->pn", rows.float(), up.dequantize()[pairs[order]])
    for label, call in calls.items():
        found = call()
        assert close(found[0], expected), label
        assert found[1].shape == (len(pairs), 512)
