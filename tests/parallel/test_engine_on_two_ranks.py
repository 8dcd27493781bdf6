"""Two processes under torchrun give the same tokens, and make the same decisions, as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.engine_worker import generate_all
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
FAMILIES = ("nemotron_h", "bamba", "granite_moe_hybrid", "llama", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_tiny_model(family, root / family)
    return [root / family for family in FAMILIES]


def test_two_ranks_decide_and_answer_like_one(folders, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.parallel.engine_worker", str(tmp_path), *map(str, folders),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    for folder in folders:
        alone = generate_all(str(folder), tensor_model_parallel_size=1)
        assert ranks[0][folder.name] == alone, folder.name
        assert any(cached for _, cached in alone["warm"])
        assert alone["in flight"] == alone["cold"]
        assert any(cached for _, cached in alone["choices"])
