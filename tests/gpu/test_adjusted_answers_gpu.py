"""Penalties, biases, grammars and new weights on a GPU, from CUDA graphs and without: the tokens of
the same engine on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_hybrid import LLM, RequestOutput, SamplingParams
from tests.engine.adjusted_cases import CASES, CHAT
from tests.gpu.test_engine_gpu import GRAPHS
from tests.gpu.test_engine_gpu import OPTIONS as ENGINE_OPTIONS
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = ENGINE_OPTIONS | {"inference_dynamic_batching_max_requests": 12}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(3 + i, 60 + 7 * i)) for i in range(3)]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Each answer with nothing beside it, on a CPU."""
    llm = LLM(device="cpu", **OPTIONS)  # type: ignore[arg-type]
    outputs = []
    for params in CASES.values():
        llm.engine.reset()
        outputs += llm.chat(CHAT, params)
    return outputs


@pytest.mark.parametrize("graphs", [6, 0])
def test_adjusted_answers_are_those_of_a_cpu(expected: list[RequestOutput], graphs: int) -> None:
    llm = LLM(device="cuda", **(OPTIONS | {GRAPHS: graphs}))  # type: ignore[arg-type]
    for asked in range(3):  # cold; then the whole prompt is cached
        outputs = llm.chat([CHAT] * len(CASES), list(CASES.values()), progress=False)
        for name, found, wanted in zip(CASES, outputs, expected, strict=True):
            assert found.token_ids == wanted.token_ids, f"{name}, {asked}"
            assert found.finish_reason is wanted.finish_reason, f"{name}, {asked}"
    replayed = llm.engine.runner.replayed  # type: ignore[attr-defined]
    assert (replayed["decode"] > 0) == (graphs > 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_graphs_compute_with_new_weights(family: str, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        make_tiny_model(family, tmp_path / name, seed=seed)

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]

    old, new = (
        tokens(LLM(str(tmp_path / name), device="cpu", **OPTIONS))  # type: ignore[arg-type]
        for name in ("a", "b")
    )
    llm = LLM(str(tmp_path / "a"), device="cuda", **(OPTIONS | {GRAPHS: 6}))  # type: ignore[arg-type]
    assert tokens(llm) == old
    before = dict(llm.engine.runner.replayed)  # type: ignore[attr-defined]
    assert llm.update_weights(str(tmp_path / "b")) == 1
    assert tokens(llm) == new
    after = llm.engine.runner.replayed  # type: ignore[attr-defined]
    assert after["decode"] > before["decode"] > 0, "the graphs of before were replayed"
    assert llm.update_weights(load_file(tmp_path / "a" / "model.safetensors", device="cuda")) == 2
    assert tokens(llm) == old
