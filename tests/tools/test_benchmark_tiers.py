"""tools/benchmark_tiers.py runs its loads, and what it shows is of the tier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.thorough import thorough, usually
from tests.tools.test_tools import run

CACHES = """
    --inference-dynamic-batching-buffer-size-gb 0.03
    --inference-dynamic-batching-prefix-caching-mamba-gb 0.012
    --inference-dynamic-batching-max-requests 8
""".split()
LOADS = usually("resume,replay,decodes", "resume,replay,decodes,chats")


@thorough
def test_loads_come_back_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--load-names", LOADS, "--scale", 0.02, "--prefix-caching-host-gb", 0.5, *CACHES
    path = tmp_path / "out.json"
    assert run("tools/benchmark_tiers.py", *flags, "--json", path, monkeypatch=monkeypatch) == 0
    found = json.loads(path.read_text())["loads"]
    resume, replay = found["resume"], found["replay"]
    assert resume["tokens_fetched"] >= 1311
    assert replay["hits"] == replay["replayed"] and replay["tokens_fetched"] > 0
    assert resume["host_ms"] < resume["computed_ms"]
    assert found["decodes"]["bytes_a_second_to_the_host"] > 0
    if "chats" in found:
        assert found["chats"]["skipped"] > 5 * found["chats without"]["skipped"]


def test_without_the_tier_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tools/benchmark_tiers.py", *CACHES, monkeypatch=monkeypatch) == 2
    assert "--prefix-caching-host-gb is 0" in capsys.readouterr().err
