"""Two processes under torchrun give the same tokens, and make the same decisions, as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mtp_models import make_mtp_model
from tests.parallel.engine_worker import (
    adjusted_answers,
    generate_all,
    with_drafts_of_its_head,
)
from tests.parallel.ranks import run_on_two_ranks
from tests.thorough import usually
from tests.tiny_models import make_tiny_model

# All of them: TESTS=all python -m pytest tests/parallel/test_lockstep.py
FAMILIES = usually(("granite_moe_hybrid",), ("nemotron_h", "granite_moe_hybrid", "llama"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_tiny_model(family, root / family)
    return [root / family for family in FAMILIES]


def test_two_ranks_decide_and_answer_like_one(folders, tmp_path, tmp_path_factory):
    head = str(tmp_path_factory.mktemp("head"))
    make_mtp_model("qwen3_next", Path(head), agrees=True)
    found = run_on_two_ranks("tests.parallel.engine_worker", tmp_path, head, *map(str, folders))
    alone = with_drafts_of_its_head(head, tensor_model_parallel_size=1)
    assert found["head"] == alone and alone["accepted"][0][0] > 10
    accepted = 0
    for folder in folders:
        alone = generate_all(str(folder), tensor_model_parallel_size=1)
        assert found[folder.name] == alone, folder.name
        assert any(cached for _, cached in alone["warm"])
        assert all(cached for _, cached in alone["unpacked"])
        assert alone["in flight"] == alone["cold"]
        assert any(cached for _, cached in alone["choices"])
        accepted += alone["accepted"][0][0]
    assert accepted > 5
    assert found["adjusted"] == adjusted_answers(tensor_model_parallel_size=1)
