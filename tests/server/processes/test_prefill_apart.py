"""A server that computes prompts, one that answers, and the proxy before both, as docs/server.md
starts them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bench.ports import free_address, free_port
from tests.server.running import ROOT, ServerProcess, wait_until
from tests.thorough import thorough

pytest.importorskip("nixl_cu13", reason="needs NIXL")

HOST = "127.0.0.1"
BODY = {"temperature": 0, "max_tokens": 8, "stream_options": {"include_usage": True}}


def serve(*flags: str) -> ServerProcess:
    """With the reference model."""
    own = ("--device", "cpu", "--port", str(free_port()), "--prefix-caching-host-gb", "0.1")
    cli = ("-m", "megatron_hybrid.cli", "serve", *own, *flags)
    return ServerProcess(*cli, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def proxy() -> Iterator[tuple[str, ServerProcess]]:
    """Its URL, and the server that computes prompts."""
    address, port = free_address(), free_port()
    with (
        serve("--role", "prefill", "--disaggregation-listen", address) as prefill,
        serve("--role", "decode", "--disaggregation-peers", address) as decode,
    ):
        flags = ("--port", str(port), "--prefill", prefill.url, "--decode", decode.url)
        command = [sys.executable, "tools/disaggregation_proxy.py", *flags]
        log = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
            try:
                url = f"http://{HOST}:{port}"
                wait_until(lambda: _is_healthy(url))
                yield url, prefill
            finally:
                process.kill()


def _is_healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def ask(url: str, question: str) -> dict[str, Any]:
    """The usage at the end of a stream, which has come to its end."""
    chat = {"messages": [{"role": "user", "content": question}], "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(BODY | chat).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        *events, end = answer.read().decode().split("\n\n")[:-1]
    assert end == "data: [DONE]"
    usage: dict[str, Any] = json.loads(events[-1].removeprefix("data: "))["usage"]
    return usage


@thorough  # test_handing_over.py, test_disaggregation_proxy.py: with less than three servers
def test_nothing_of_a_prompt_is_computed_where_it_is_answered(
    proxy: tuple[str, ServerProcess],
) -> None:
    """And all of it, once nobody else does."""
    url, prefill = proxy
    usage = ask(url, "The cat is called Pixel. " * 40 + "What is the cat called?")
    assert usage["completion_tokens"] > 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] > 200
    assert prefill.stop() == 0
    usage = ask(url, "The dog is called Rex. " * 40 + "What is the dog called?")
    assert usage["completion_tokens"] > 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
