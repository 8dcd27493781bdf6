"""Dynamo's front end and workers of ours, on this machine, found by files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.ports import free_port
from bench.ways import dynamo_environment
from tests.server.running import ROOT, wait_until

MODEL = "reference_model"
START_SECONDS = 90


class Worker:
    """One of ours; `metrics` reads its page."""

    def __init__(self, folder: Path, name: str, *flags: str, **environment: str) -> None:
        self.port = free_port()
        self.log = folder / f"{name}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_hybrid.dynamo", "--device", "cpu", *flags],
                cwd=ROOT,
                env=surroundings(folder) | {"DYN_SYSTEM_PORT": str(self.port)} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def figure(self, name: str) -> float:
        """Of a metric of ours, all labels together."""
        return figure(f"http://127.0.0.1:{self.port}", f"megatron_hybrid:{name}")

    def control(self, name: str, **body: str) -> Any:
        return post(f"http://127.0.0.1:{self.port}/engine/control/{name}", body)

    def engine_pids(self) -> list[int]:
        """Of its engine's process, and what that has started."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"megatron_hybrid.dynamo.process" in path.read_bytes():
                    found.append(int(path.parent.name))
        return [pid for pid in found if self.process.pid in ancestors(pid)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)


def figure(url: str, name: str) -> float:
    """Of a metric, all labels together."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith(name)]
    assert found, lines
    return sum(float(line.rpartition(" ")[2]) for line in found)


def ancestors(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.append(pid)
    return found


def surroundings(folder: Path) -> dict[str, str]:
    return {**os.environ, **dynamo_environment(folder), "OMP_NUM_THREADS": "1"}


class Deployment:
    """The front end, and the workers by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.workers: dict[str, Worker] = {}
        with open(folder / "front_end.log", "w") as log:
            self._front_end = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dynamo.frontend", "--router-mode", "kv"),
                    *("--http-host", "127.0.0.1", "--http-port", str(port)),
                    *("--migration-limit", "3"),
                ],
                env=surroundings(folder),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start(self, name: str, *flags: str) -> Worker:
        self.workers[name] = worker = Worker(self.folder, name, *flags)
        return worker

    def wait(self) -> None:
        """Until the front end sends requests to every worker."""
        for worker in self.workers.values():
            wait_until(lambda worker=worker: self._serves(worker), START_SECONDS)  # type: ignore[misc]
        wait_until(self._lists, START_SECONDS)

    def _serves(self, worker: Worker) -> bool:
        assert worker.process.poll() is None, worker.log.read_text()[-3000:]
        with contextlib.suppress(OSError, AssertionError):
            return worker.figure("up") == 1
        return False

    def _lists(self) -> bool:
        url = f"{self.url}/v1/models"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as page:
            return [one["id"] for one in json.load(page)["data"]] == [MODEL]
        return False

    def expected_hits(self) -> float:
        """What the router knew to be cached where it sent requests: shares of prompts, added up."""
        return figure(self.url, "dynamo_component_router_kv_hit_rate_sum")

    def chat(self, question: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return post(f"{self.url}/v1/chat/completions", body_of(question, **fields))

    def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        fields = {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}
        return post(f"{self.url}/v1/completions", fields)

    @contextlib.contextmanager
    def stream(self, question: str, **fields: Any) -> Iterator[Iterator[Any]]:
        """The chunks of a stream as they come; it is broken off at the end of the block."""
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        with _open(f"{self.url}/v1/chat/completions", body_of(question, **fields)) as answer:
            lines = (line.decode().strip() for line in answer)
            data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
            yield (json.loads(one) for one in data if one != "[DONE]")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.process.send_signal(signal.SIGTERM)
        for worker in self.workers.values():
            worker.end()
        self._front_end.kill()
        self._front_end.wait(10)


def body_of(question: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    messages = question
    if isinstance(question, str):
        messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


def _open(url: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def post(url: str, body: Any) -> Any:
    """The answer's JSON; of an error, that of its body."""
    try:
        with _open(url, body) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())}
