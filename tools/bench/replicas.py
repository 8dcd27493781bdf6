"""What several replicas behind one address skip, against one replica with all of their memory.

Chats of several turns, many of which begin with the same system message, are interleaved so that
their caches have to hold them meanwhile. The same chats go to servers that differ in how many
replicas share the memory, and how requests are placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.ports import free_port
from bench.serving_clients import Clients, ClientSettings
from bench.serving_conversations import Conversation, Turn
from bench.serving_http import HttpClient
from bench.serving_requests import OpenAIServer, Outcome
from reference_model import filler

START_SECONDS = 120.0
END_SECONDS = 30.0
JOINT = "one replica, joint memory"
ALONE = "one replica, its own memory"


@dataclass(frozen=True, slots=True)
class Workload:
    """requests: in all; a chat has `turns` of them. systems: different system messages, the k-th
    of which is 1/k as frequent as the first. Sizes are in words, about a token each."""

    requests: int = 1000
    turns: int = 5
    systems: int = 10
    system_words: int = 250
    turn_words: int = 50
    answer_tokens: int = 16
    clients: int = 16  # requests at the same time
    open_chats: int = 128
    seed: int = 0

    def conversations(self) -> list[Conversation]:
        """The chats, in the order in which they begin."""
        generator = np.random.default_rng(self.seed)
        write = random.Random(self.seed)
        systems = [_text(write, self.system_words) for _ in range(self.systems)]
        weights = 1 / np.arange(1, self.systems + 1)
        chats = []
        for number in range(-(-self.requests // self.turns)):
            chosen = generator.choice(self.systems, p=weights / weights.sum())
            turns = tuple(
                Turn(_text(write, self.turn_words), self.answer_tokens) for _ in range(self.turns)
            )
            chats.append(Conversation(f"chat-{number}", turns, systems[chosen]))
        return chats


@dataclass(frozen=True, slots=True)
class Memory:
    """Of each replica, in GB: for KV blocks and live states, and for cached states."""

    kv: float
    states: float

    def flags(self, share: float) -> list[str]:
        return [
            "--inference-dynamic-batching-buffer-size-gb",
            str(self.kv * share),
            "--inference-dynamic-batching-prefix-caching-mamba-gb",
            str(self.states * share),
        ]


class ReplicaServers:
    """A server whose replicas are launched one by one, so that each can be killed alone."""

    def __init__(
        self, replicas: int, flags: Sequence[str], environments: Sequence[dict[str, str]] = ()
    ) -> None:
        self._flags = [*flags, "--port", str(free_port()), "--data-parallel-size", str(replicas)]
        self._environments = environments
        self.processes: list[subprocess.Popen[str]] = []
        self._lines: list[str] = []
        for rank in range(replicas):
            self.processes.append(self.launch(rank))
        self.url = self._wait_for_url()
        self._wait_until_ready(replicas)

    def launch(self, rank: int) -> subprocess.Popen[str]:
        """Start this replica; it is not waited for."""
        own = self._environments[rank] if self._environments else {}
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron_hybrid.server.cli"),
                *(*self._flags, "--data-parallel-rank", str(rank)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own, "PYTHONUNBUFFERED": "1"},
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    def get(self, path: str) -> Any:
        """The JSON that this route answers."""
        return get_json(self.url + path)

    def engines(self) -> dict[str, dict[str, Any]]:
        """Each replica's figures, by its number."""
        figures = self.get("/stats")["engine"]
        return dict(figures.get("engines", {"0": figures}))

    def close(self) -> None:
        """End all replicas, in order if that is possible."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip("\n"))

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(r"serving \S+ on (http://\S+)", self.output):
                return found.group(1)
            if all(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.05)
        raise RuntimeError(f"The server did not start: {self.output}")

    def _wait_until_ready(self, replicas: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError):
                engines = self.get("/health").get("engines", {"0": {"status": "ok"}})
                if [one["status"] for one in engines.values()].count("ok") == replicas:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"Not every replica has started: {self.output}")


@contextlib.contextmanager
def started(
    replicas: int, flags: Sequence[str], environments: Sequence[dict[str, str]] = ()
) -> Iterator[ReplicaServers]:
    """A server of its own, ended at the end. environments: what each replica's has besides."""
    servers = ReplicaServers(replicas, flags, environments)
    try:
        yield servers
    finally:
        servers.close()


def drive(
    url: str,
    workload: Workload,
    model: str = "reference_model",
    on_finish: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Hold the workload's chats with the server; what became of each request."""

    async def run() -> list[Outcome]:
        client = HttpClient(url)
        server = OpenAIServer(
            client,
            "/v1/chat/completions",
            model,
            chat=True,
            fields={"temperature": 0, "ignore_eos": True},
        )
        settings = ClientSettings(
            num_clients=workload.clients,
            max_active_conversations=workload.open_chats,
            max_num_requests=workload.requests,
            early_stop=False,
        )
        clients = Clients(server, workload.conversations(), settings, workload.seed, on_finish)
        try:
            await clients.run()
        finally:
            client.close()
        return clients.outcomes

    return asyncio.run(run())


def figures(outcomes: Sequence[Outcome], engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the clients and the replicas saw."""
    good = [one for one in outcomes if one.failure is None]
    failures: dict[str, int] = {}
    for one in outcomes:
        if one.failure is not None:
            reason = f"{one.failure}: {one.error}"[:120]
            failures[reason] = failures.get(reason, 0) + 1
    seconds = max(one.finished for one in outcomes) - min(one.sent for one in outcomes)
    return {
        "requests": len(outcomes),
        "failures": failures,
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "skipped_tokens": sum(one.cached_tokens or 0 for one in good),
        "seconds": round(seconds, 2),
        "ttft_mean_ms": round(1000 * float(np.mean([one.time_to_first_token for one in good])), 1),
        "ttft_p95_ms": round(
            1000 * float(np.percentile([one.time_to_first_token for one in good], 95)), 1
        ),
        "by_replica": {
            name: {
                key: one[key]
                for key in ("requests_admitted", "prompt_tokens", "skipped_tokens", "kv_evictions")
            }
            for name, one in engines.items()
        },
    }


def measure(replicas: int, flags: Sequence[str], workload: Workload) -> dict[str, Any]:
    """One server, the whole workload."""
    with started(replicas, flags) as servers:
        outcomes = drive(servers.url, workload)
        return figures(outcomes, servers.engines())


def measure_router(url: str, servers: Sequence[str], workload: Workload) -> dict[str, Any]:
    """The whole workload through a router that runs already, in front of these servers, which have
    answered nobody else."""
    outcomes = drive(url, workload)
    return figures(
        outcomes, {str(k): get_json(f"{one}/stats")["engine"] for k, one in enumerate(servers)}
    )


def kill_midway(flags: Sequence[str], workload: Workload) -> dict[str, Any]:
    """Two replicas, of which the second is killed when half of the requests are answered: how many
    requests failed, and whether those were its own."""
    with started(2, flags) as servers:
        done = 0
        seen: dict[str, Any] = {}

        def on_finish(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            if done == workload.requests // 2:
                engines = servers.engines()
                seen["open_before"] = {
                    name: one["requests_running"] + one["requests_waiting"]
                    for name, one in engines.items()
                }
                seen["killed_after"] = done
                servers.processes[1].kill()

        outcomes = drive(servers.url, workload, on_finish=on_finish)
        after = outcomes[seen["killed_after"] :]
        return {
            **figures(outcomes, servers.engines()),
            **seen,
            "answered_after": sum(one.failure is None for one in after),
        }


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def _text(generator: random.Random, words: int) -> str:
    """English of about this many words."""
    text = filler.paragraphs(generator, filler.Draws(generator), 6 * words)
    return " ".join(text.split()[:words])
