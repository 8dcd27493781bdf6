"""The golden figures of the design, computed by a real model: block = grid = 256."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from tests.thorough import A_THIRD, usually
from tests.tiny_models import make_tiny_model

Engine = Callable[..., LLM]

MODES = pytest.mark.parametrize("mode", ["extract", "break"])
BUDGETS = pytest.mark.parametrize("budget", [8192, 300])
AT_ONCE = pytest.mark.parametrize("at_once", [True, False])

_GENERATOR = torch.Generator().manual_seed(0)
T, U = torch.randint(0, 160, (2, 1000), generator=_GENERATOR).tolist()
FIVE = [T[:300], T[:800], T[:800], T[:800], T[:800] + U[:300]]
# With either, no answer comes to a position on the grid.
PARAMS = SamplingParams(temperature=0.0, max_tokens=usually(16, 64), ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("golden")
    make_tiny_model("nemotron_h", path, chunk_size=256)

    def build(
        mode: str,
        budget: int,
        *,
        exact_ends: bool,
        max_requests: int = 5,
        asynchronous: bool = False,
    ) -> LLM:
        llm = LLM(
            str(path),
            inference_dynamic_batching_block_size=256,
            inference_dynamic_batching_buffer_size_gb=0.1,
            inference_dynamic_batching_max_requests=max_requests,
            inference_dynamic_batching_max_tokens=budget,
            inference_dynamic_batching_prefix_caching_exact_ends=exact_ends,
            prefill_checkpoint_mode=mode,
        )
        assert llm.engine.context.geometry.grid == 256
        llm.engine.runner.asynchronous = asynchronous
        return llm

    return build


@pytest.fixture(scope="module")
def answers(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    """What an engine that keeps nothing answers, one prompt after another."""
    llm = engine("extract", 8192, exact_ends=False)
    found = {}
    for prompt in FIVE:
        llm.engine.reset()
        (output,) = llm.generate([prompt], PARAMS, progress=False)
        assert output.cached_tokens == 0
        found[tuple(prompt)] = output.token_ids
    return found


def run(llm: LLM, prompts: list[list[int]], at_once: bool) -> tuple[list[int], list[list[int]]]:
    """(computed tokens, answers) of each prompt."""
    if at_once:
        outputs = llm.generate(prompts, PARAMS, progress=False)
    else:
        outputs = [llm.generate([prompt], PARAMS, progress=False)[0] for prompt in prompts]
    llm.engine.check_integrity()
    computed = [len(p) - o.cached_tokens for p, o in zip(prompts, outputs, strict=True)]
    assert llm.stats()["computed_tokens"] == sum(computed)
    return computed, [output.token_ids for output in outputs]


def is_thorough(test: str, mode: str = "", at_once: bool | None = None, **others: object) -> bool:
    """Whether CI leaves this case out: half of them."""
    return at_once is not None and (mode == "break") == at_once


@A_THIRD
@MODES
@BUDGETS
@AT_ONCE
def test_without_exact_ends_the_five_compute_1240_of_3800(
    engine: Engine, answers, mode: str, budget: int, at_once: bool
):
    llm = engine(mode, budget, exact_ends=False)
    computed, tokens = run(llm, FIVE, at_once)
    assert tokens == [answers[tuple(prompt)] for prompt in FIVE]
    assert computed == [300, 544, 32, 32, 332]
    stats = llm.stats()
    assert (stats["prompt_tokens"], stats["computed_tokens"]) == (3800, 1240)
    assert stats["skipped_tokens"] == 2560


@A_THIRD
@MODES
@BUDGETS
@AT_ONCE
def test_with_exact_ends_the_five_compute_300_500_0_0_and_300(
    engine: Engine, answers, mode: str, budget: int, at_once: bool
):
    llm = engine(mode, budget, exact_ends=True)
    computed, tokens = run(llm, FIVE, at_once)
    assert tokens == [answers[tuple(prompt)] for prompt in FIVE]
    assert computed == [300, 500, 0, 0, 300]
    assert llm.stats()["skipped_tokens"] == 2700


@AT_ONCE
@pytest.mark.parametrize(
    ("exact_ends", "expected"),
    [(False, [300, 544, 32, 32, 332]), (True, [300, 500, 0, 0, 300])],
)
def test_with_a_step_in_flight_the_five_compute_the_same(
    engine: Engine, answers, at_once: bool, exact_ends: bool, expected: list[int]
):
    llm = engine("extract", 300, exact_ends=exact_ends, asynchronous=True)
    computed, tokens = run(llm, FIVE, at_once)
    assert tokens == [answers[tuple(prompt)] for prompt in FIVE]
    assert computed == expected


@A_THIRD
@MODES
@pytest.mark.parametrize(
    ("exact_ends", "expected"), [(False, [256, 256, 256, 256]), (True, [256, 0, 256, 0])]
)
def test_prompts_that_end_on_the_grid_resume_from_each_others_end(
    engine: Engine, mode: str, exact_ends: bool, expected: list[int]
):
    llm = engine(mode, 8192, exact_ends=exact_ends)
    computed, tokens = run(llm, [T[:256], T[:256], T[:512], T[:512]], at_once=False)
    assert computed == expected
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3]


@A_THIRD
@MODES
@BUDGETS
def test_sixteen_samples_of_40_tokens_compute_40(engine: Engine, mode: str, budget: int):
    llm = engine(mode, budget, exact_ends=True, max_requests=16)
    (output,) = llm.generate(
        [T[:40]], SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=16),
        progress=False,
    )  # fmt: skip
    llm.engine.check_integrity()
    assert llm.stats()["computed_tokens"] == 40
    assert len({tuple(choice.token_ids) for choice in output.choices}) > 1
    llm.engine.reset()
    again = llm.generate([T[:40]] * 16, PARAMS, progress=False)
    assert llm.stats()["computed_tokens"] == 80
    assert len({tuple(output.token_ids) for output in again}) == 1
