"""--kernels libraries with mamba-ssm and causal-conv1d themselves: each kernel against our
reference, and an engine's greedy tokens against those of the reference kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.kernels import kernel_set
from tests.kernels.library_cases import IN_PLACE, KINDS, MIXED, Case, check_decode, check_prefill
from tests.tiny_models import make_tiny_model

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# One tiling of each of mamba-ssm's kernels, which it would choose among many for minutes.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
if torch.cuda.is_available():
    pytest.importorskip("causal_conv1d")
    pytest.importorskip("mamba_ssm")

BF16, FP32 = torch.bfloat16, torch.float32
# inputs, states, tolerance relative to the largest value
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [(FP32, FP32, 1e-3), (BF16, FP32, 2e-2), (BF16, BF16, 2e-2)],
    ids=["fp32", "bf16", "bf16 states"],
)
LARGE = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.05,
    "inference_dynamic_batching_max_requests": 24,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.05,
    "dtype": "float32",
}


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    """Of float32 inputs, which mamba-ssm's kernels leave to Triton to round to TF32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


def kernel_of(kind: str) -> Any:
    kernels = kernel_set.select("libraries", torch.device("cuda"))
    return {"conv": kernels.conv, "mamba1": kernels.mamba1_scan}.get(kind, kernels.mamba2_scan)


@LARGE
@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
def test_prompts(
    kind: str, dtype: torch.dtype, state_dtype: torch.dtype, tolerance: float, large: bool
) -> None:
    check_prefill(kernel_of(kind), Case(kind, "cuda", dtype, large), state_dtype, tolerance)


@LARGE
@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", [IN_PLACE, MIXED], ids=["in place", "mixed"])
def test_decodes(
    kind: str, pairs: list[tuple[int, int]], dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float, large: bool,
) -> None:  # fmt: skip
    check_decode(kernel_of(kind), Case(kind, "cuda", dtype, large), pairs, state_dtype, tolerance)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_mamba", "lfm2"])
def test_greedy_tokens_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 160, (150,), generator=generator).tolist()
    prompts = [text[:n] for n in (1, 16, 33, 70, 150)] + [text[:64] + [5, 6, 7]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(prompts, params)]

    expected = answers(LLM(str(tmp_path), kernels="reference", **OPTIONS))
    llm = LLM(str(tmp_path), kernels="libraries", **OPTIONS)
    assert answers(llm) == expected
    assert answers(llm) == expected
    warm = llm.generate([prompts[4]], params)[0]
    assert warm.token_ids == expected[4] and warm.cached_tokens >= 128
    assert not any(llm.engine.runner.replayed.values())  # type: ignore[attr-defined]
