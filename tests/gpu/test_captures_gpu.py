"""Graphs that are captured while an engine serves: answers are those of one that has them from the
start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.execution.capture_schedule import AT_START, STEPS_BETWEEN
from tests.gpu.test_engine_gpu import GRAPHS, OPTIONS, prompts, serve
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPTURE = "inference_dynamic_batching_cuda_graph_capture"


def captured(llm: LLM) -> int:
    return len(llm.engine.runner._graphs._graphs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next", "llama", "falcon_mamba"])
def test_answers_are_the_same_while_graphs_are_captured(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=3 * STEPS_BETWEEN, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    waves = {0: prompts()[:6], 20: prompts()[6:8], 50: prompts()[8:20], 90: prompts()[20:]}
    found = {}
    for way in ("start", "serving"):
        llm = LLM(str(tmp_path), device="cuda", **(OPTIONS | {GRAPHS: 8, CAPTURE: way}))  # type: ignore[arg-type]
        at_start = captured(llm)
        found[way] = [serve(llm, waves, params)]
        while_busy = captured(llm)
        while llm.engine.use_idle_time():
            # a graph between any two steps, and steps that are in flight
            found[way].append(serve(llm, {0: prompts()[:3]}, short))
        assert captured(llm) == len(llm.engine.runner._uncaptured._sizes)  # type: ignore[attr-defined]
        found[way] = [found[way][0], serve(llm, waves, params)]
        if way == "serving":
            assert at_start == AT_START < while_busy < captured(llm)
        llm.engine.check_integrity()
    assert found["start"] == found["serving"]


def test_a_capture_takes_no_part_in_the_step_in_flight(tmp_path: Path) -> None:
    """Whatever is captured between two steps of one answer."""
    make_tiny_model("bamba", tmp_path)
    options = OPTIONS | {GRAPHS: 8, CAPTURE: "serving"}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = LLM(str(tmp_path), device="cuda", **OPTIONS).generate(prompts()[:1], params)  # type: ignore[arg-type]
    llm = LLM(str(tmp_path), device="cuda", **options)  # type: ignore[arg-type]
    tokens: list[int] = []
    llm.engine.add_request("a", prompts()[0], params)
    while llm.engine.has_work():
        for event in llm.engine.step():
            tokens += event.token_ids
        llm.engine.use_idle_time()  # although it is not
    assert tokens == expected[0].token_ids
