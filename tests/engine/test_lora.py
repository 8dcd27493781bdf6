"""Requests with adapters against PEFT's full recompute: same greedy tokens, same log-probabilities,
however they are computed and whoever computes beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from tests.lora_adapters import TARGETS, Adapted, make_adapted
from tests.models.conftest import random_tokens
from tests.thorough import usually

OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.01,
    "inference_dynamic_batching_max_requests": 12,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 8,
}
ANSWER = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
# Of two adapters: of all targets, and with a rank and a scale of its own for some of them.
TWO: dict[str, dict[str, Any]] = {
    "wide": {"r": 8, "lora_alpha": 12, "use_rslora": True},
    "narrow": {"r": 3, "lora_alpha": 6},
}


# Of each kind of layer one; TESTS=all: all families. test_lora_wide.py has the other kinds.
FAMILIES = usually(("llama", "nemotron_h", "jamba", "lfm2"), TARGETS)


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory.mktemp(request.param), TWO)


def with_adapters(adapted: Adapted, **options: Any) -> LLM:
    llm = LLM(str(adapted.folder), **OPTIONS | options)
    for name, folder in adapted.adapters.items():
        llm.load_adapter(name, folder)
    return llm


def check(adapted: Adapted, llm: LLM, prompts: list[list[int]], adapters: list[str]) -> list[int]:
    """The answers are PEFT's; how many tokens of each prompt were cached."""
    outputs = llm.generate(prompts, PARAMS, adapter=adapters, progress=False)
    for output, prompt, adapter in zip(outputs, prompts, adapters, strict=True):
        expected = adapted.answer(prompt, ANSWER, adapter)
        assert output.token_ids == expected, adapter
        logits = adapted.logits([*prompt, *expected], adapter)[len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(ANSWER), expected]
        found = torch.tensor([one.logprob for one in output.logprobs])
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)
    llm.engine.check_integrity()
    return [output.cached_tokens for output in outputs]


def test_cold_warm_and_mixed(adapted: Adapted) -> None:
    """Two adapters and none in one batch, then the same again from the cache."""
    llm = with_adapters(adapted)
    prompts = [random_tokens(37, seed=1)] * 3 + [random_tokens(21, seed=2)]
    adapters = ["", "wide", "narrow", "narrow"]
    answers = {tuple(adapted.answer(prompts[0], ANSWER, name)) for name in adapters}
    assert len(answers) > 1, "the adapters change nothing"
    assert check(adapted, llm, prompts, adapters) == [0, 0, 0, 0]
    assert all(check(adapted, llm, prompts, adapters))
    longer = [[*prompt, 5, 6, 7] for prompt in prompts]
    assert all(check(adapted, llm, longer, adapters))
