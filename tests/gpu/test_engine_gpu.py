"""The engine on a GPU against the same engine on plain torch kernels and a CPU: the same greedy
tokens, in every way that a prompt can be computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.05,
    "inference_dynamic_batching_max_requests": 24,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.05,
    "dtype": "float32",
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WAYS = {
    "graphs": {"inference_dynamic_batching_num_cuda_graphs": 6},
    "no graphs": {"inference_dynamic_batching_num_cuda_graphs": 0},
    "chunked": {"inference_dynamic_batching_max_tokens": 48},
    "break": {"prefill_checkpoint_mode": "break"},
    "reference kernels": {"kernels": "reference"},
    "preempted": {
        "inference_dynamic_batching_max_requests": 8,
        "inference_dynamic_batching_buffer_size_gb": 0.0012,
    },
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 160, (150,), generator=generator).tolist()
    own = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (1, 15, 16, 33, 70)]
    # every length modulo the grid, much in common, and twins
    return own + [text[: 60 + n] for n in range(17)] + [text, text, text[:64] + own[4]]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    outputs = LLM(str(tiny), device="cpu", **OPTIONS).generate(prompts(), PARAMS)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_reference(tiny: Path, expected: list[list[int]], way: str) -> None:
    llm = LLM(str(tiny), device="cuda", **(OPTIONS | WAYS[way]))  # type: ignore[arg-type]
    together = [output.token_ids for output in llm.generate(prompts(), PARAMS)]
    warm = llm.generate(prompts(), PARAMS)
    alone = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in prompts()[::4]]
    assert together == expected
    assert [output.token_ids for output in warm] == expected
    assert alone == expected[::4]
    assert sum(output.cached_tokens for output in warm) > 0
    llm.engine.check_integrity()


def test_idle_steps_change_nothing(tiny: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(tiny), device="cuda", **OPTIONS)  # type: ignore[arg-type]
    llm.generate(prompts(), PARAMS)
    for _ in range(20):
        llm.engine.dummy_forward()
    warm = llm.generate(prompts(), PARAMS)
    assert [output.token_ids for output in warm] == expected


def test_seeds_give_the_same_tokens_in_any_batch(tiny: Path) -> None:
    llm = LLM(str(tiny), device="cuda", **OPTIONS)  # type: ignore[arg-type]
    drawn = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=k, max_tokens=8, seed=k, ignore_eos=True)
        for k in (0, 5, 20)
    ]
    prompt = prompts()[4]
    alone = [llm.generate([prompt], params)[0].token_ids for params in drawn]
    mixed = llm.generate([prompt] * 6, [PARAMS, *drawn, PARAMS, drawn[0]])
    assert [output.token_ids for output in mixed[1:4]] == alone
    assert mixed[5].token_ids == alone[0]
