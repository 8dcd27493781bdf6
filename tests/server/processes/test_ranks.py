"""`serve -tp 2` as one types it: the ranks are started on this machine, and end together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.ports import free_port
from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server import cli
from megatron_hybrid.server.processes.ranks import check_devices
from tests.server.processes.test_ready_to_run import COMMAND, ask
from tests.server.running import ROOT, ServerProcess, children_of, is_alive
from tests.thorough import thorough, usually

LAUNCHER = """
import logging, sys
from megatron_hybrid.server.processes.ranks import run_ranks
logging.basicConfig(format="%(message)s", level=logging.INFO)
sys.exit(run_ranks(2, "cpu", ("-c", sys.argv[1])))
"""
FAILING = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(60)
"""
WAITING = r"""
import os, signal, sys, time
got = []
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, lambda number, frame: got.append(number))
def say(words):  # in one piece, or two ranks' lines may mix
    os.write(1, f"rank {os.environ['RANK']} {words}\n".encode())
say("waits")
while len(got) < 2:
    time.sleep(0.01)
say(f"got {got[0]} {got[1]}")
"""


@contextmanager
def launched(code: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that run this."""
    command = [sys.executable, "-c", LAUNCHER, code]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, **streams) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for pid in (*children_of(process.pid), process.pid):
                    os.kill(pid, signal.SIGKILL)


ENDS = [
    ("os.kill(os.getpid(), 9)", 128 + 9, r"rank 1 \(process \d+\) ended with SIGKILL; so all "),
    ("print('Why it can\\'t.'); sys.exit(2)", 2, "Why it can't."),
    ("sys.exit(7)", 7, r"rank 1 \(process \d+\) ended with exit code 7; so all ranks"),
]


@pytest.mark.parametrize(("end", "code", "last"), usually(ENDS[:2], ENDS))
def test_a_rank_that_fails_ends_the_others_and_has_the_last_word(
    end: str, code: int, last: str
) -> None:
    with launched(FAILING + end) as process:
        output, _ = process.communicate(timeout=30)
    first, *_, final = output.splitlines()
    assert process.returncode == code and re.match(last, final), output
    assert first == "2 ranks are started on this machine, each in a process of its own"
    assert "Traceback" not in output


def test_signals_reach_every_rank() -> None:
    with launched(WAITING) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert sorted(said[1:]) == ["rank 0 waits\n", "rank 1 waits\n"]
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    # In any order: the second may come while the first is being handed on.
    got = {line.partition(" got ")[0]: line.split()[3:] for line in output.splitlines()}
    assert {rank: sorted(signals) for rank, signals in got.items()} == {
        "rank 0": ["15", "2"],
        "rank 1": ["15", "2"],
    }
    assert process.returncode == 0


def test_there_must_be_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(2, "auto")
    check_devices(3, "cpu")
    with pytest.raises(ConfigurationError, match="over 3 ranks .* torch finds 2 on this machine"):
        check_devices(3, "auto")


@pytest.mark.parametrize(
    ("config", "server", "launched", "ranks"),
    [
        ({}, {}, {}, 1),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}, {}, {}, 6),
        ({"expert_model_parallel_size": 4}, {}, {}, 4),
        ({"tensor_model_parallel_size": 2}, {"data_parallel_size": 3}, {}, 6),
        ({"expert_model_parallel_size": 4}, {"data_parallel_size": 2}, {}, 4),
        ({}, {"data_parallel_size": 2}, {"data_parallel_rank": 0}, 1),
    ],
)
def test_so_many_ranks_are_started(
    config: dict[str, Any], server: dict[str, int], launched: dict[str, int], ranks: int
) -> None:
    layout = cli.launch_layout(EngineConfig(**config), server, launched)
    assert (layout.world_size, layout.rank) == (ranks, 0)


def test_what_is_wrong_is_said_once_before_ranks_are_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["nowhere", "-tp", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--load names nowhere, and there is no such folder")


@thorough
@pytest.mark.parametrize("flag", ["-tp", "-pp", "-dp"])
def test_ranks_are_served_without_torchrun_and_end_in_order(flag: str) -> None:
    question = [{"role": "user", "content": "The code of the gate is 7315. What is its code?"}]
    (alone,) = LLM().chat(question, SamplingParams(temperature=0.0, max_tokens=12))
    command = (*COMMAND, "--port", str(free_port()), flag, "2")
    body = {"messages": question, "temperature": 0, "max_tokens": 12}
    with ServerProcess(*command, OMP_NUM_THREADS="1") as server:
        started = server.children()
        assert len(started) == 2
        if flag == "-dp":
            for replica in range(2):
                server.wait_for_line(rf"serving .*(replica {replica} of 2)", 60)
        answer = ask(f"{server.url}/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == alone.text
        long = {**body, "max_tokens": 300, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            json.dumps(long).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            server.process.send_signal(signal.SIGINT)
            *_, last, _ = stream.read().splitlines()
        assert last == b"data: [DONE]"
        assert server.process.wait(30) == 0
        assert not any(map(is_alive, started))


@thorough
def test_a_signal_while_they_load_ends_all_ranks() -> None:
    command = [sys.executable, *COMMAND, "--port", "0", "-tp", "2"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "2 ranks are started" in process.stderr.readline()
        process.stderr.readline()  # of a rank
        started = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 128 + signal.SIGTERM, rest
        assert started and not any(map(is_alive, started))
        assert "Traceback" not in rest and "so all ranks" not in rest
