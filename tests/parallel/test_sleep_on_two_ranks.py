"""Two processes under torchrun sleep and wake up together, or neither does."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.ranks import run_on_two_ranks
from tests.parallel.sleep_worker import answers, make
from tests.tiny_models import make_tiny_model


def test_two_ranks_sleep_together_and_answer_like_one(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for seed, folder in enumerate(folders, 1):
        make_tiny_model("nemotron_h_moe", Path(folder), seed=seed)
    found = run_on_two_ranks("tests.parallel.sleep_worker", tmp_path, *folders)
    alone, other = (answers(make(folder, 1)) for folder in folders)
    assert found["before"] == found["level 1"] == alone
    assert found["stream"] == alone[0] and found["level 2"] == other
    assert found["refused"] is True, "each said where the memory is missing"
    assert found["asleep"] == ["weights", "kv_cache"]
    assert found["from the host"] >= 128
