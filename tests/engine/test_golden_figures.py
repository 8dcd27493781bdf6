"""The golden figures of the design, computed by a real model: block = grid = 256."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("golden")
    make_tiny_model("nemotron_h", path, chunk_size=256)
    return str(path)


@pytest.mark.parametrize("mode", ["extract", "break"])
@pytest.mark.parametrize("budget", [8192, 300])
def test_golden_figures(folder: str, mode: str, budget: int):
    def engine(caching: bool) -> LLM:
        return LLM(
            folder,
            inference_dynamic_batching_block_size=256,
            inference_dynamic_batching_buffer_size_gb=0.1,
            inference_dynamic_batching_max_requests=4,
            inference_dynamic_batching_max_tokens=budget,
            inference_dynamic_batching_prefix_caching=caching,
            prefill_checkpoint_mode=mode,
        )

    generator = torch.Generator().manual_seed(0)
    t, u = torch.randint(0, 160, (2, 1000), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)

    llm, plain = engine(True), engine(False)
    assert llm.engine.context.geometry.grid == 256
    computed = []
    for prompt in (t[:300], t[:800], t[:800], t[:800], t[:800] + u[:300]):
        (output,) = llm.generate([prompt], params)
        computed.append(len(prompt) - output.cached_tokens)
        assert output.token_ids == plain.generate([prompt], params)[0].token_ids
    assert computed == [300, 544, 32, 32, 332]
    stats = llm.stats()
    assert (stats["prompt_tokens"], stats["computed_tokens"]) == (3800, 1240)
    assert stats["skipped_tokens"] == 2560

    llm = engine(True)
    computed = []
    for prompt in (t[:256], t[:256], t[:512], t[:512]):
        (output,) = llm.generate([prompt], params)
        computed.append(len(prompt) - output.cached_tokens)
    assert computed == [256, 256, 256, 256] and llm.stats()["computed_tokens"] == 1024
