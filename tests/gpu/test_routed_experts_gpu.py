"""Which experts tokens were sent to on a GPU, from CUDA graphs and without: those of transformers'
routers on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid import SamplingParams
from tests.routers import Routers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "inference_dynamic_batching_buffer_size_gb": 0.05,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.05,
}
GRAPHS = "inference_dynamic_batching_num_cuda_graphs"
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {GRAPHS: 6},
    "no graphs": {GRAPHS: 0},
    "chunked": {"inference_dynamic_batching_max_tokens": 48},
    "drafts": {"num_speculative_tokens": 3, "drafter": "prompt_lookup"},
    "host memory": {"prefix_caching_host_gb": 0.1},
    "sleep": {"enable_sleep_mode": True},
    "batch-invariant": {"batch_invariant": True, "inference_dynamic_batching_block_size": 64},
}
# Ended at their length, where the last step's own place is not read, and a step later by an id.
ENDS: list[dict[str, Any]] = [{"ignore_eos": True}, {"stop_token_ids": tuple(range(0, 160, 8))}]


# transformers 5.17 norms all groups of Granite's Mamba layers as one; real models have one.
OVERRIDES = {"granite_moe_hybrid": {"mamba_n_groups": 1}}


@pytest.fixture(scope="module", params=["nemotron_h_moe", "qwen3_next", "granite_moe_hybrid"])
def routers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Routers:
    folder = tmp_path_factory.mktemp(request.param)
    return Routers.of(request.param, folder, **OVERRIDES.get(request.param, {}))


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_transformers(routers: Routers, way: str) -> None:
    llm = routers.llm(**(OPTIONS | WAYS[way]))
    for end in ENDS:
        params = SamplingParams(temperature=0.0, max_tokens=24, return_routed_experts=True, **end)
        for _ in range(2):
            outputs = llm.generate(routers.prompts(1, 15, 16, 17, 48, 70), params, progress=False)
            for output in outputs:
                routers.check(output)
    assert sum(output.cached_tokens for output in outputs) > 0
    if way == "graphs":
        assert llm.engine.runner.replayed["decode"] > 0  # type: ignore[attr-defined]
    if way == "sleep":
        llm.sleep()
        llm.wake_up()
        routers.check(llm.generate(routers.prompts(30), params, progress=False)[0])


def test_more_experts_than_a_byte_counts(tmp_path: Path) -> None:
    many = Routers.of("qwen3_next", tmp_path, num_experts=300)
    params = SamplingParams(temperature=0.0, max_tokens=24, return_routed_experts=True)
    (output,) = many.llm(**OPTIONS).generate([many.text[:40]], params, progress=False)
    assert output.routed_experts is not None and output.routed_experts.dtype.name == "uint16"
    assert 255 < output.routed_experts.max() < 300
