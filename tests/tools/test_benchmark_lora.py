"""tools/benchmark_lora.py measures what it says, with the model that ships with us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.thorough import thorough
from tests.tools.test_tools import run


@thorough
def test_steps_and_prompts_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "--max-loras", 2, "--max-lora-rank", 4, "--steps", 2, "--prompt", 20, "--repeats", 1,
        "--device", "cpu", "--inference-dynamic-batching-max-requests", 4,
        "--inference-dynamic-batching-buffer-size-gb", 0.05, "--json", tmp_path / "out.json",
    )  # fmt: skip
    loads = ("decode_3", "prompts_2")
    assert run("tools/benchmark_lora.py", *flags, *loads, monkeypatch=monkeypatch) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == set(loads)
    for figures in found.values():
        assert list(figures) == ["without", "none", "one", "several"]
        assert all(milliseconds > 0 for milliseconds in figures.values())
