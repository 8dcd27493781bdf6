"""Two processes under torchrun change their weights together: each its slice, or none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.parallel.update_worker import answers, make
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
FAMILIES = ("nemotron_h_moe", "falcon_h1", "qwen3_next")


def test_two_ranks_change_their_weights_and_answer_like_one(tmp_path: Path):
    folders = []
    for family in FAMILIES:
        for name, seed in ((family, 1), (f"{family}_b", 2)):
            make_tiny_model(family, tmp_path / name, seed=seed)
            folders.append(str(tmp_path / name))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.parallel.update_worker", str(tmp_path), *folders,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    for family in FAMILIES:
        found = ranks[0][family]
        for name, folder in (("a", family), ("b", f"{family}_b")):
            alone = answers(make(str(tmp_path / folder), 1))
            assert found[name] == alone, folder
            if name == "a":
                assert found["a again"] == alone
                assert found["stream"] == alone[0][0], "an open stream ended with the old weights"
            else:
                assert found["still b"] == [tokens for tokens, _ in alone]
        assert found["refused"] is True
