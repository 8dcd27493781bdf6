"""Packing states on a GPU, at the shapes of real models, and an engine that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.kernels.packed_states import reference
from tests.kernels import packing_cases
from tests.kernels.packing_cases import FULL, Kind, fill, make_states, slots
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REAL = {
    "nemotron-h-8b": Kind((128, 64, 128), -2),
    "granite-4.0-h-tiny": Kind((48, 64, 128), -2),
    "qwen3-next-80b-a3b": Kind((32, 128, 128), -2),
    "falcon-mamba-7b": Kind((8192, 16), -1),
}


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("kind", [*REAL, *packing_cases.KINDS])
def test_both_round_alike_to_the_bit(
    kind: str, dtype: torch.dtype, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_hybrid.kernels.packed_states import triton

    monkeypatch.setattr(packing_cases, "KINDS", packing_cases.KINDS | REAL)
    both = [make_states(kind, dtype, state_dtype, "cuda") for _ in range(2)]
    fill(both[0])
    both[1].full_ssm.copy_(both[0].full_ssm)
    both[1].full_conv.copy_(both[0].full_conv)
    for states, packing in zip(both, (reference, triton), strict=True):
        move = slots(2, 1, device="cuda"), slots(FULL + 1, FULL + 3, device="cuda")
        packing.pack(states, *move)
        packing.unpack(states, move[1], slots(4, 3, device="cuda"))
    for name in ("values", "scales", "conv", "full_ssm", "full_conv"):
        one, other = (getattr(states, name) for states in both)
        assert (one is None and other is None) or torch.equal(one, other), name


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "jamba"])
def test_cold_answers_are_exact_and_warm_ones_differ_little(tmp_path: Path, family: str) -> None:
    make_tiny_model(family, tmp_path)
    text = torch.randint(0, 160, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [text[: 60 + 5 * n] for n in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=1)
    found = []
    for dtype in (None, "int8"):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            inference_dynamic_batching_block_size=16,
            inference_dynamic_batching_buffer_size_gb=0.05,
            inference_dynamic_batching_max_requests=8,
            inference_dynamic_batching_prefix_caching_mamba_gb=0.05,
            mamba_inference_cached_states_dtype=dtype,
        )
        cold = [llm.generate([prompt], params)[0] for prompt in prompts[-1:]]
        # Where prompts part is known once they have been there: then states are kept.
        llm.generate([prompt + [7, 8, 9] for prompt in prompts], params)
        warm = llm.generate([prompt + [9, 8, 7] for prompt in prompts], params)
        llm.engine.check_integrity()
        assert all(output.cached_tokens > 0 for output in warm)
        found.append([[o.logprobs[0].logprob for o in part if o.logprobs] for part in (cold, warm)])
    (cold, warm), (packed_cold, packed_warm) = found
    assert cold == packed_cold
    assert 0 < max(abs(a - b) for a, b in zip(warm, packed_warm, strict=True)) < 0.05
