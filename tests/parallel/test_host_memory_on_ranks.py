"""Ranks that share a scheduler keep what the device forgets in memory of the host, each its part,
and go on from files after a restart: the tokens of one process without either."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_hybrid import LLM
from tests.parallel.host_memory_worker import CHATS, OPTIONS, TURNS, ask
from tests.parallel.ranks import run_on_ranks
from tests.thorough import usually
from tests.tiny_models import make_tiny_model

SPLITS = usually([(2, 1)], [(2, 1), (1, 2), (2, 2)])
FAMILIES = usually(("nemotron_h",), ("nemotron_h", "qwen3_next", "llama", "mamba"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tensor", "pipeline"), SPLITS)
def test_ranks_go_on_from_host_memory_and_files(
    family: str, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_tiny_model(family, folder)
    found = run_on_ranks(
        tensor * pipeline, "tests.parallel.host_memory_worker", tmp_path, str(tensor),
        str(pipeline), str(folder),
    )  # fmt: skip
    plain = {name: value for name, value in OPTIONS.items() if "_host_" not in name}
    llm = LLM(**plain | {"load": str(folder), "prefix_caching_disk_gb": 0.0})
    rng = random.Random(3)
    texts = [[rng.randrange(160) for _ in range(30 + 3 * i)] for i in range(CHATS)]
    assert found["chats"] == [ask(llm, texts, rng) for _ in range(TURNS)]
    assert found["restarted"] == ask(llm, texts, rng)
    fetched, read = found["fetched"]
    assert fetched >= CHATS and read >= CHATS // 2
