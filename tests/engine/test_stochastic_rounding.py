"""States in float16 that are rounded by chance: always the same one, in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from tests.thorough import usually
from tests.tiny_models import make_tiny_model

FAMILIES = usually(["nemotron_h"], ["nemotron_h", "falcon_mamba", "qwen3_next", "zamba2", "lfm2"])
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_max_requests": 8,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
    "mamba_inference_ssm_states_dtype": "float16",
    "mamba_inference_stochastic_rounding": True,
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (1, 17, 40, 70)]


def logprobs(llm: LLM, *, together: bool = True) -> torch.Tensor:
    """Of all answers' tokens."""
    waves = [prompts()] if together else [[prompt] for prompt in prompts()]
    outputs = [output for wave in waves for output in llm.generate(wave, PARAMS, progress=False)]
    return torch.tensor([entry.logprob for output in outputs for entry in output.logprobs or []])


@pytest.mark.parametrize("family", FAMILIES)
def test_answers(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    cold = logprobs(llm)
    exact = logprobs(
        LLM(
            str(tmp_path),
            **OPTIONS
            | {
                "mamba_inference_ssm_states_dtype": "float32",
                "mamba_inference_stochastic_rounding": False,
            },
        )
    )
    assert (cold - exact).abs().max() < 5e-3
    llm.engine.reset()
    assert torch.equal(logprobs(llm), cold)
    # What float32 adds up in another order may lie on the other side of a threshold.
    llm.engine.reset()
    torch.testing.assert_close(logprobs(llm, together=False), cold, atol=5e-4, rtol=0)
    drafted = LLM(str(tmp_path), **OPTIONS, num_speculative_tokens=2)
    torch.testing.assert_close(logprobs(drafted), cold, atol=5e-4, rtol=0)
    if family != "lfm2":  # which has no such states
        assert not torch.equal(cold, exact)
        assert not torch.equal(logprobs(LLM(str(tmp_path), **OPTIONS, seed=5)), cold)


def test_states_of_other_types_are_not_rounded_so() -> None:
    with pytest.raises(ConfigurationError, match="--mamba-inference-ssm-states-dtype is bfloat16"):
        EngineConfig(
            mamba_inference_stochastic_rounding=True, mamba_inference_ssm_states_dtype="bfloat16"
        )
