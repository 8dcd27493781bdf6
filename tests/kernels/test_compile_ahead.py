"""Kernels are compiled side by side and not launched. Triton's compiler needs no GPU for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import thorough, usually
from tests.tiny_models import make_tiny_model

pytest.importorskip("triton")


def run(caches: Path, *arguments: str) -> Any:
    """What a worker prints: Triton's kernels are interpreted in this process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_ahead_worker", *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(caches)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_compiled_by_threads_and_not_launched(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found["compiled"], found["for launches"], found["read"]) == (4, 0, 0)
    # Threads have launchers compiled; those that are kept are loaded by one of them alone, and the
    # last one to be launched.
    assert found["loaded"] == 4 * [["double", False]] + 5 * [["double", True]]
    no_gpu, unknown = found["said"]
    assert "no GPU" in no_gpu and "NOBODY_KNOWS" in unknown
    again = run(tmp_path)  # from Triton's cache
    assert (again["compiled"], again["read"]) == (0, 4)


@thorough  # all that an engine asks for, below, is compiled in the same way
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h_moe"])
def test_a_step_is_gone_through_whose_kernels_write_nothing(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path / "model")
    first, more, *again = run(tmp_path / "caches", "steps", str(tmp_path / "model"))
    assert 8 < first < more and again == [more, more]


@pytest.mark.parametrize(
    "family",
    usually(
        ["qwen3_5_moe"],
        [
            "qwen3_5_moe",
            "nemotron_h_moe",
            "falcon_mamba",
            "bamba",
            "lfm2",
            "bailing_hybrid",
            "glm5_next",
        ],
    ),
)
def test_an_engine_asks_for_all_kernels_when_it_starts(family: str, tmp_path: Path) -> None:
    """Nobody waits for a compiler later: whatever the number of tokens, prompts and decodes, and
    however tokens are drawn."""
    make_tiny_model(family, tmp_path / "model")
    found = run(tmp_path / "caches", "serving", str(tmp_path / "model"))
    assert found["at start"] > 8
    assert found["serving"] == []
