"""Other people's routers in front of servers, as docs/routing.md starts them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.ports import free_port
from tests.clients.environments import environment
from tests.server.running import wait_until
from tests.thorough import EVERYTHING

# By their packages; all three have the flags below.
COMMANDS = {
    "sglang_router": ("-m", "sglang_router.launch_router"),
    "smg": ("-m", "smg", "launch"),
    "vllm_router": ("-m", "vllm_router.launch_router"),
}


@functools.cache
def python_with(package: str) -> str:
    """An interpreter that has this package: our own, or with TESTS=all that of an environment made
    for routers. Else the test is skipped."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    if not EVERYTHING:
        pytest.skip(f"{package} is not installed: tests/clients/requirements-routers.txt")
    return str(environment("routers") / "python")


@contextlib.contextmanager
def router(package: str, servers: Sequence[str], folder: Path, *flags: str) -> Iterator[str]:
    """The address of a router in front of servers, once it takes all of them for healthy."""
    port = free_port()
    log = folder / f"{package}.log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [
                *(python_with(package), *COMMANDS[package], "--worker-urls", *servers),
                *("--policy", "cache_aware", "--cache-threshold", "0.5"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-port", str(free_port())),
                *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
                *("--cb-failure-threshold", "2"),  # then a retry goes to another replica
                *flags,
            ],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            workers = get(f"{url}/workers")["workers"]
            return sum(worker["is_healthy"] for worker in workers) == len(servers)
        return False

    try:
        wait_until(is_up, 60)
        yield url
    finally:
        process.kill()  # at a signal it would wait for its connections
        process.wait(10)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def asked(url: str, body: Any) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(url, json.dumps(body).encode(), headers)


def post(url: str, body: Any) -> Any:
    with urllib.request.urlopen(asked(url, body), timeout=60) as answer:
        return json.load(answer)


def refusal(url: str, body: Any) -> tuple[int, bytes]:
    """The status and the body of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url, body)
    with refused.value as error:
        return error.code, error.read()


def events(url: str, body: Any) -> list[str]:
    """The data of a stream's events, whose pieces may come with their names."""
    with urllib.request.urlopen(asked(url, {**body, "stream": True}), timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.decode().strip() for line in answer]
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
