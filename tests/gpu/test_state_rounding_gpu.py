"""Stochastic rounding of states on a GPU: the numbers of the reference, and its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from megatron_hybrid import LLM  # noqa: E402
from megatron_hybrid.kernels.state_rounding.reference import rounded  # noqa: E402
from megatron_hybrid.kernels.state_rounding.triton import as_stored  # noqa: E402
from tests.engine.test_stochastic_rounding import OPTIONS, logprobs  # noqa: E402
from tests.tiny_models import make_tiny_model  # noqa: E402


@triton.jit
def _round_kernel(values, stored, seed, position, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    numbers = as_stored(tl.load(values + place), tl.float16, seed, position, place)
    tl.store(stored + place, numbers)


@pytest.mark.parametrize("position", [1, 77, 100_003])
def test_numbers_are_those_of_the_reference(position: int) -> None:
    generator = torch.Generator().manual_seed(position)
    values = torch.randn(1 << 20, generator=generator)
    values *= torch.logspace(-9, 5, 1 << 20)
    values[:4] = torch.tensor([torch.inf, -0.0, 65504.0, 1e30])
    stored = torch.empty(1 << 20, dtype=torch.float16, device="cuda")
    _round_kernel[(1 << 10,)](values.cuda(), stored, 12345, position, SIZE=1 << 10)
    expected = rounded(values[None], 12345, torch.tensor([position]))[0]
    assert torch.equal(stored.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 2}], ids=["", "drafts"])
@pytest.mark.parametrize("family", ["nemotron_h", "falcon_mamba", "qwen3_next"])
def test_answers_are_those_of_a_cpu(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    expected = logprobs(LLM(str(tmp_path), **OPTIONS))
    ours = OPTIONS | {"device": "cuda", "dtype": "float32"} | options
    llm = LLM(str(tmp_path), **ours)
    cold = logprobs(llm)
    torch.testing.assert_close(cold, expected, atol=2e-3, rtol=0)
    if not options:
        assert llm.engine.runner.replayed["decode"] > 0  # type: ignore[attr-defined]
    llm.engine.reset()
    assert torch.equal(logprobs(llm), cold)
