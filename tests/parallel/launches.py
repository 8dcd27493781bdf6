"""Runs the scripts of examples/launch as a user does: on CPUs with gloo, if not told otherwise."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from bench.ports import free_port
from megatron_hybrid import LLM, SamplingParams
from tests.server.running import ROOT, is_alive, python_path
from tests.server.running import children_of as children
from tests.text.make_tokenizers import byte_level, save
from tests.tiny_models import make_tiny_model

SCRIPTS = ROOT / "examples" / "launch"
REFERENCE = ROOT / "configs" / "reference_model.yaml"
SECONDS = 240.0  # at most, for a machine with a lot to do
PROMPT = "The quick brown fox"
LENGTH = 24


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


class Node:
    """One run of a script: on a machine, as it were."""

    def __init__(
        self, script: str, log: Path, *flags: str, device: str = "cpu", **environment: str
    ) -> None:
        self._log = log
        values = {
            "PYTHON": sys.executable,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "CONFIG": str(REFERENCE),
        }
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [str(SCRIPTS / script), "--device", device, "--http-workers", "1", *flags],
                cwd=log.parent,  # not the checkout: the scripts find their files themselves
                env={**os.environ, **values, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ranks(self) -> list[int]:
        """torchrun's processes, in the order of their numbers."""
        return sorted(children(self.process.pid))

    def lose(self) -> None:
        """End the agent and its ranks, as if the machine had lost its power."""
        ranks = self.ranks()
        self.process.kill()
        self.process.wait(SECONDS)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log)
        if self.process.poll() is not None:
            return
        self.process.terminate()  # it ends its ranks then, but not when it is killed
        try:
            self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Client:
    """Asks the server on this port."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port

    def engine(self) -> int | None:
        """Its process, once requests are taken."""
        status, body = self.get("/health")
        return int(body["engine_pid"]) if status == 200 and "engine_pid" in body else None

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status (0: nobody listens) and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            body = json.load(error)
            body["Retry-After"] = error.headers.get("Retry-After")
            return error.code, body
        except OSError:
            return 0, {}

    def wait_for_service(self, *nodes: Node, after: int | None = None) -> int:
        """The engine's process; `after`: another one than this."""

        def serves() -> bool:
            assert all(node.process.poll() is None for node in nodes), "torchrun has ended"
            return self.engine() not in (None, after)

        wait_until(serves, lambda: "no service")
        engine = self.engine()
        assert engine is not None
        return engine

    def complete(self, prompt: str = PROMPT) -> str:
        """The greedy answer."""
        body = {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        return str(self._post("/v1/completions", body)["choices"][0]["text"])

    def chat(self) -> str:
        """The greedy answer to a chat."""
        messages = [{"role": "user", "content": "What is a cache?"}]
        body = {"messages": messages, "max_tokens": LENGTH, "temperature": 0}
        return str(self._post("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def open_stream(self) -> http.client.HTTPResponse:
        """An answer that goes on for long, of which the first piece has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        body = {"prompt": PROMPT, "max_tokens": 6000, "stream": True, "ignore_eos": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        return answer

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return dict(json.load(answer))


def front_end_of(pid: int) -> list[int]:
    """The processes of the front end that this engine process has started."""
    found = children(pid)
    for child in found:  # which grows meanwhile
        found += children(child)
    return found


def gone(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def assert_ended_in_order(node: Node, client: Client) -> None:
    """No rank had to be killed, and the front end did not stay to wait for other ones."""
    assert "forcefully exiting" not in node.log, node.log
    wait_until(lambda: client.get("/health")[0] == 0, lambda: node.log)


def make_chat_model(family: str, folder: Path) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    tokenizer = byte_level()
    make_tiny_model(family, folder, vocab_size=len(tokenizer))
    save(tokenizer, folder)
    return folder


def check_server(
    model: Path, folder: Path, *, tensor: int = 1, replicas: int = 1, device: str = "cpu"
) -> None:
    """A server of replicas of so many ranks, which share the model's experts, answers like one
    process, and ends in order."""
    config = folder / "options.yaml"
    options = {
        "load": str(model),
        "dtype": "float32",
        "inference_dynamic_batching_buffer_size_gb": 0.05,
        "inference_dynamic_batching_max_requests": 4,
    }
    config.write_text(yaml.safe_dump(options))
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    found = LLM(**options, device=device).generate(prompts, greedy, progress=False)
    port = free_port()
    flags = (
        "--tensor-model-parallel-size", str(tensor),
        "--expert-model-parallel-size", str(replicas), "--port", str(port),
    )  # fmt: skip
    environment = {"CONFIG": str(config), "GPUS_PER_NODE": str(tensor * replicas)}
    with Node("expert_parallel.sh", folder / "log", *flags, device=device, **environment) as node:
        client = Client(port)
        client.wait_for_service(node)
        if replicas > 1:
            last = f"(replica {replicas - 1} of {replicas})"
            wait_until(lambda: last in node.log, lambda: node.log)
        assert [client.complete(prompt) for prompt in prompts] == [each.text for each in found]
    assert_ended_in_order(node, client)
