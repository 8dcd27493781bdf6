"""Replicas behind each way to reach them: what is started is ended, and what it cost is shown."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bench.ports import free_port
from bench.ways import ROOT, Deployment, Processes
from tests.thorough import EVERYTHING

TOOL = ROOT / "tools" / "benchmark_ways.py"


def test_a_process_that_is_up_is_waited_for_and_ends_with_the_block(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Processes(sys.executable, tmp_path) as processes:
        processes.start("page", "http.server", str(port), "--bind", "127.0.0.1")
        processes.wait(lambda: urllib.request.urlopen(url, timeout=5).status == 200)
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)


def test_one_that_has_ended_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Processes(sys.executable, tmp_path) as processes:
        processes.start("front end", "no_such_module")
        with pytest.raises(RuntimeError, match=r"front end has ended: .*no_such_module"):
            processes.wait(lambda: False)


def test_a_server_that_does_not_start_is_named() -> None:
    way = Deployment(python=sys.executable, flags=("--no-such-flag", "1"))
    with pytest.raises(RuntimeError, match="has ended"), way.behind("smg"):
        pass


def test_ways_are_named() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "nowhere"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Ways are server, coordinator, smg" in done.stderr


@pytest.mark.skipif(not EVERYTHING, reason="30 seconds")
def test_figures_of_two_ways_are_kept(tmp_path: Path) -> None:
    kept = tmp_path / "ways.json"
    few = ("--requests", "20", "--scale", "0.02", "--json", str(kept))
    command = [sys.executable, str(TOOL), "server", "coordinator", *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(kept.read_text())
    assert set(found) == {"server", "coordinator"}
    for (run,) in found.values():
        assert set(run) == {"one_token", "streams", "chats", "multi_turn"}
        assert 0 < run["chats"]["skipped"] < run["chats"]["of"]
        assert run["multi_turn"]["seconds"] > 0
    assert "coordinator, multi_turn, 1 runs: seconds" in done.stdout
