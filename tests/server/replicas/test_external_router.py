"""Two replicas behind SGLang's router, installed from PyPI: what docs/routing.md says works."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys, Tokens, root_key
from megatron_hybrid.kv_events import KVEventSubscriber
from tests.server.running import ServerProcess, free_port, wait_until

pytest.importorskip("sglang_router")

QUESTIONS = ["Hello! Who are you?", "And what can you do?", "What did I ask you first?"]


class Deployment(NamedTuple):
    url: str  # of the router
    servers: list[ServerProcess]
    endpoints: list[tuple[str, str]]  # of each one's KV events, and their replay


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("events")
    endpoints = [(f"ipc://{folder}/e{k}", f"ipc://{folder}/r{k}") for k in range(2)]

    def start(endpoint: str, replay: str) -> ServerProcess:
        events = {
            "enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay
        }  # fmt: skip
        return ServerProcess(
            *("-m", "megatron_hybrid.cli", "serve", "--device", "cpu", "--port", "0"),
            *("--engine-restart-timeout", "1", "--shutdown-timeout", "1"),
            *("--kv-events-config", json.dumps(events)),
        )

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            servers = list(pool.map(lambda pair: start(*pair), endpoints))
        for server in servers:
            stack.enter_context(server)
        url = stack.enter_context(_router(servers, folder))
        yield Deployment(url, servers, endpoints)


@contextlib.contextmanager
def _router(servers: list[ServerProcess], folder: Path) -> Iterator[str]:
    port = free_port()
    with open(folder / "router.log", "w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_router.launch_router"),
                *("--worker-urls", *(server.url for server in servers)),
                *("--policy", "cache_aware", "--cache-threshold", "0.5"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-port", str(free_port())),
                *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
                *("--cb-failure-threshold", "2"),  # then a retry goes to another replica
            ],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, (folder / "router.log").read_text()[-3000:]
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


def post(url: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def chat(name: str) -> list[dict[str, str]]:
    """One whose text begins like no other's."""
    return [{"role": "system", "content": f"{name * 30} is your name. You answer kindly."}]


def ask(url: str, messages: list[dict[str, str]], question: str) -> dict[str, Any]:
    """One more turn; the usage."""
    messages.append({"role": "user", "content": question})
    body = {"model": "reference_model", "messages": messages, "max_tokens": 12, "temperature": 0}
    answer = post(f"{url}/v1/chat/completions", body)
    messages.append(answer["choices"][0]["message"])
    return answer["usage"]


def prompt_tokens(server: ServerProcess) -> int:
    return get(f"{server.url}/stats")["engine"]["prompt_tokens"]


def ask_and_see_who_takes_it(
    deployment: Deployment, messages: list[dict[str, str]], question: str
) -> tuple[dict[str, Any], int]:
    """The usage, and the replica."""
    before = [prompt_tokens(server) for server in deployment.servers]
    usage = ask(deployment.url, messages, question)
    after = [prompt_tokens(server) for server in deployment.servers]
    (replica,) = (k for k in range(len(before)) if after[k] > before[k])
    return usage, replica


def test_the_router_learns_the_models_name(deployment: Deployment) -> None:
    (model,) = get(f"{deployment.url}/v1/models")["data"]
    assert model["id"] == "reference_model"


def test_chats_stay_with_the_replicas_that_have_them_cached(deployment: Deployment) -> None:
    chats = [chat(name) for name in ("Anna", "Bert", "Carl", "Dora")]
    with ThreadPoolExecutor(4) as pool:  # an idle router gives everything to the first replica
        before = list(pool.map(lambda messages: ask(deployment.url, messages, "Hi!"), chats))
    assert all(prompt_tokens(server) > 0 for server in deployment.servers), "one had nothing to do"
    for question in QUESTIONS:
        for which, messages in enumerate(chats):
            usage = ask(deployment.url, messages, question)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            # all that was computed for the turn before it
            assert cached == before[which]["total_tokens"] - 1
            before[which] = usage


def test_kv_events_tell_a_router_what_each_replica_would_skip(deployment: Deployment) -> None:
    messages = chat("Emil")
    ask(deployment.url, messages, QUESTIONS[0])
    subscribers = [KVEventSubscriber(*endpoints) for endpoints in deployment.endpoints]
    following = [*messages, {"role": "user", "content": QUESTIONS[1]}]
    # Each knows the tokens of the answers that it gave itself.
    prompts = [
        np.array(post(f"{server.url}/tokenize", {"messages": following})["tokens"], dtype=np.int32)
        for server in deployment.servers
    ]

    def skippable() -> list[int]:
        found = []
        for subscriber, tokens in zip(subscribers, prompts, strict=True):
            contents = subscriber.contents

            def text(start: int, end: int, tokens: Tokens = tokens) -> Tokens:
                return tokens[start:end]

            root = root_key(contents.epoch, stored_as=contents.stored_as)
            keys = SequenceKeys(root, contents.block_size, text)
            found.append(contents.skippable(keys, len(tokens)))
        return found

    def know_it() -> bool:
        for subscriber in subscribers:
            subscriber.receive()
        return all(subscriber.is_current for subscriber in subscribers) and any(skippable())

    wait_until(know_it)
    there = skippable()
    usage, took = ask_and_see_who_takes_it(deployment, messages, QUESTIONS[1])
    assert there[took] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert there[1 - took] == 0
    for server in deployment.servers:
        post(f"{server.url}/reset_prefix_cache", {})
    wait_until(lambda: not know_it() and not any(skippable()))
    for subscriber in subscribers:
        subscriber.close()


def test_answers_stream_through_the_router(deployment: Deployment) -> None:
    body = {
        "model": "reference_model",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{deployment.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.decode().strip() for line in answer]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 200
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]]
    assert sum(bool(piece) for piece in pieces) > 1, "it came in one piece"


def test_a_wrong_request_gets_our_own_error(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "reference_model", "messages": messages, "max_tokens": 10**9}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(f"{deployment.url}/v1/chat/completions", body)
    assert refused.value.code == 400
    assert (
        json.load(refused.value)["error"]["param"] == "max_completion_tokens"
    )  # as the router says it


def test_when_one_replica_is_killed_the_other_serves(deployment: Deployment) -> None:
    """The last test: it takes one of the replicas away."""
    messages = chat("Fred")
    _, replica = ask_and_see_who_takes_it(deployment, messages, QUESTIONS[0])
    deployment.servers[replica].process.kill()
    for question in QUESTIONS[1:]:
        assert ask(deployment.url, messages, question)["completion_tokens"] > 0
    for name in ("Gina", "Hugo", "Ida"):
        ask(deployment.url, chat(name), QUESTIONS[0])
    assert get(f"{deployment.servers[1 - replica].url}/health")["status"] == "ok"
