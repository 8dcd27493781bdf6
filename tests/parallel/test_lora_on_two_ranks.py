"""Adapters on layers that two ranks have halves of, or half of the layers each: PEFT's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_lora import TWO
from tests.lora_adapters import Adapted, make_adapted
from tests.parallel.lora_worker import ADAPTERS, PROMPTS, make
from tests.parallel.lora_worker import answers as answers_of
from tests.parallel.ranks import run_on_two_ranks
from tests.thorough import usually

FAMILIES = usually(
    ("qwen3_next",),
    ("nemotron_h", "qwen3_next", "falcon_h1", "jamba", "zamba2", "lfm2", "granite_moe_hybrid"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapted]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_adapted(family, root / family, TWO) for family in FAMILIES}


@pytest.mark.parametrize("split", usually(["tensor"], ["tensor", "pipeline", "expert"]))
def test_two_ranks_answer_like_peft(models: dict[str, Adapted], tmp_path: Path, split: str) -> None:
    """Of experts: as two replicas that share them."""
    if split == "expert":
        models = {"qwen3_next": models["qwen3_next"]}
    folders = [str(model.folder.parent) for model in models.values()]
    flag = f"{split}_model_parallel_size"
    found = run_on_two_ranks("tests.parallel.lora_worker", tmp_path, flag, *folders)
    for family, model in models.items():
        both = found[family]
        assert both == answers_of(make(model.folder.parent))
        for (tokens, _), prompt, adapter in zip(both, PROMPTS * 2, ADAPTERS * 2, strict=True):
            assert tokens == model.answer(prompt, 5, adapter)
        for other in (" again", ", wide layers"):
            again = found[family + other]
            assert [tokens for tokens, _ in again] == [tokens for tokens, _ in both]
