"""Two processes under torchrun change their weights together: each its slice, or none of them."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.ranks import run_on_two_ranks
from tests.parallel.update_worker import answers, make
from tests.tiny_models import make_tiny_model

FAMILIES = ("nemotron_h_moe", "falcon_h1", "qwen3_next")


def test_two_ranks_change_their_weights_and_answer_like_one(tmp_path: Path):
    folders = []
    for family in FAMILIES:
        for name, seed in ((family, 1), (f"{family}_b", 2)):
            make_tiny_model(family, tmp_path / name, seed=seed)
            folders.append(str(tmp_path / name))
    found = run_on_two_ranks("tests.parallel.update_worker", tmp_path, *folders)
    for family in FAMILIES:
        both = found[family]
        for name, folder in (("a", family), ("b", f"{family}_b")):
            alone = answers(make(str(tmp_path / folder), 1))
            assert both[name] == alone, folder
            if name == "a":
                assert both["a again"] == alone
                assert both["stream"] == alone[0][0], "an open stream ended with the old weights"
            else:
                assert both["still b"] == [tokens for tokens, _ in alone]
        assert both["refused"] is True
        a, b, again = both["fingerprints"]  # the same on both ranks, as all that is found
        assert a == again != b and a != make(str(tmp_path / family), 1).system_fingerprint
