"""The server as it runs: two processes, real sockets, signals, and deaths on either side."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from megatron_hybrid.server.ask import FirstQuestion
from tests.server.processes import ROOT, ServerProcess, is_alive, wait_until

FAKE = ("-m", "tests.server.fake_server", "--tokenizer")
LOADS_FOR_EVER = """
import sys, time
from megatron_hybrid.server import cli

def load(config):
    print("loading", flush=True)
    time.sleep(60)

cli._build = load
cli.main(["--load", sys.argv[1], "--port", "0"])
"""
LONG = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*FAKE, str(tokenizer_folder), "--step-seconds", "0.05") as server:
        yield server


@pytest.fixture
def own_server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """One that the test may kill."""
    with ServerProcess(*FAKE, str(tokenizer_folder), "--step-seconds", "0.05") as server:
        yield server


def send(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def open_stream(
    server: ServerProcess, max_tokens: int = 100
) -> tuple[http.client.HTTPConnection, Any]:
    """A connection on which an answer of 100 tokens begins to come, for 5 seconds."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": max_tokens}))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: ")
    return connection, answer


def engine_figure(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=20) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"megatron_hybrid:{name} "):
                return float(line.split()[1])
    raise AssertionError(f"no {name}")


def test_the_openai_client_works_unchanged(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        (model,) = client.models.list().data
        chat = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            max_completion_tokens=4,
            extra_body={"ignore_eos": True, "top_k": 5},
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 4
        stream = client.completions.create(
            model="fake", prompt="Hello", max_tokens=3, temperature=0, stream=True
        )
        assert "Hello".startswith("".join(chunk.choices[0].text for chunk in stream)[:5])
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="Hello", max_tokens=-1)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="Hello")


def test_a_first_question_prints_two_answers_and_says_when_it_is_done(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    question = FirstQuestion("Hello", "Be brief.", "fake", None, lambda: done.append("done"))
    question.ask(server.url)
    assert done == ["done"]
    assert not question.failed
    assert capsys.readouterr().out.count("prompt tokens from the cache") == 2
    wrong = FirstQuestion("Hello", None, "other", None, lambda: done.append("done"))
    wrong.ask(server.url)
    assert wrong.failed
    assert len(done) == 2
    assert "not served here" in capsys.readouterr().out


def test_tokens_arrive_one_by_one(server: ServerProcess) -> None:
    connection, answer = open_stream(server, max_tokens=40)
    arrivals = []
    while line := answer.readline():
        if line.startswith(b"data: {"):
            arrivals.append(time.monotonic())
    connection.close()
    assert len(arrivals) > 20
    assert arrivals[-1] - arrivals[0] > 1.0  # 40 steps of 0.05 s


def test_a_client_that_hangs_up_frees_the_engine(server: ServerProcess) -> None:
    connection, answer = open_stream(server)
    assert engine_figure(server, "num_requests_running") == 1
    answer.close()  # the socket closes with the last of both
    connection.close()
    wait_until(lambda: engine_figure(server, "num_requests_running") == 0, 3.0)


def test_a_client_that_hangs_up_before_its_whole_answer_frees_the_engine(
    server: ServerProcess,
) -> None:
    address = urlsplit(server.url)
    body = json.dumps({**LONG, "stream": False}).encode()
    with socket.create_connection((address.hostname, address.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: engine_figure(server, "num_requests_running") == 1)
    wait_until(lambda: engine_figure(server, "num_requests_running") == 0, 3.0)


def test_bad_requests_leave_the_connection_usable(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    for body, status in ((b"{", 400), (b'{"prompt": "\xff"}', 400), (b'{"prompt": "a"}', 200)):
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def test_the_front_end_does_not_import_torch() -> None:
    code = "import sys, megatron_hybrid.server.front_end; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_processes_and_leaves_nothing(
    tokenizer_folder: Path, tmp_path: Path, signum: int
) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        ServerProcess(*FAKE, str(tokenizer_folder), "--step-seconds", "0.05", TMPDIR=folder) as own,
    ):
        children = own.children()
        assert children
        connection, answer = open_stream(own)
        started = time.monotonic()
        assert own.stop(signum) == 0
        assert time.monotonic() - started < 6  # a second or so, on an idle machine
        assert b"shutting down" in answer.read()
        connection.close()
        assert not any(is_alive(child) for child in children)
        assert os.listdir(folder) == []


def test_a_killed_engine_is_told_to_clients_and_then_the_front_end_ends(
    tokenizer_folder: Path,
) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        ServerProcess(*FAKE, str(tokenizer_folder), "--step-seconds", "0.05", TMPDIR=folder) as own,
    ):
        children = own.children()
        connection, answer = open_stream(own)
        own.process.kill()
        assert b"engine process has ended" in answer.read()
        connection.close()
        status, body = send(f"{own.url}/health")
        assert status == 503
        assert "ended" in body["error"]["message"]
        assert send(f"{own.url}/v1/completions", {"prompt": "Hello"})[0] == 503
        wait_until(lambda: not any(is_alive(child) for child in children), 10)
        assert os.listdir(folder) == []


def test_an_engine_that_fails_for_good_ends_non_zero_after_503(tokenizer_folder: Path) -> None:
    with ServerProcess(*FAKE, str(tokenizer_folder), "--fails-again") as own:
        (child,) = own.children()
        assert send(f"{own.url}/v1/completions", {"prompt": "~"})[0] == 500
        assert own.process.wait(10) == 1
        status, body = send(f"{own.url}/health")
        assert status == 503
        assert "failed" in body["error"]["message"]
        os.kill(child, signal.SIGTERM)  # else it stays for its few seconds


def test_a_signal_while_the_model_loads_ends_both_processes_at_once(
    tokenizer_folder: Path,
) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        subprocess.Popen(
            [sys.executable, "-c", LOADS_FOR_EVER, str(tokenizer_folder)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
        ) as loading,
    ):
        assert loading.stdout is not None
        assert loading.stdout.readline() == b"loading\n"
        loading.send_signal(signal.SIGTERM)
        assert loading.wait(10) == -signal.SIGTERM
        assert loading.stdout.read() == b""  # the front end has closed it too
        assert os.listdir(folder) == []


def test_a_killed_front_end_ends_the_engine_process(own_server: ServerProcess) -> None:
    (child,) = own_server.children()
    os.kill(child, signal.SIGKILL)
    assert own_server.process.wait(10) == 1
    assert "front end process ended" in own_server.output
