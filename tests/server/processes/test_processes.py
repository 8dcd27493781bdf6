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

from bench.ports import free_port
from megatron_hybrid.server.ask import FirstQuestion
from megatron_hybrid.server.options import LaunchOptions, ServerOptions
from tests.server.running import ROOT, Hold, ServerProcess, is_alive, wait_until
from tests.thorough import thorough

JSON = {"Content-Type": "application/json"}
FAKE = ("-m", "tests.server.fake_server", "--tokenizer")
LOADS_FOR_EVER = """
import sys, time
from megatron_hybrid.server import cli

def load(*arguments):
    print("loading", flush=True)
    time.sleep(60)

cli.build = load
cli.main(["--tokenizer-model", sys.argv[1], "--port", "0"])
"""
LONG = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, hold: Hold) -> Iterator[ServerProcess]:
    with own(tokenizer_folder, *hold.flags) as server:
        yield server


def send(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def open_stream(
    server: ServerProcess, max_tokens: int = 100
) -> tuple[http.client.HTTPConnection, Any]:
    """A connection on which an answer begins to come."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    body = json.dumps({**LONG, "max_tokens": max_tokens})
    connection.request("POST", "/v1/completions", body, JSON)
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
    launch = LaunchOptions(ask="Hello", system="Be brief.", exit_after_answer=True)
    options = ServerOptions(tokenizer_folder="", model_name="fake")
    question = FirstQuestion(launch, options, lambda: done.append("done"))
    question.ask(server.url)
    assert done == ["done"]
    assert not question.failed
    assert capsys.readouterr().out.count("prompt tokens from the cache") == 2
    other = options.replace(model_name="other")
    wrong = FirstQuestion(launch, other, lambda: done.append("done"))
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


def test_a_client_that_hangs_up_frees_the_engine(server: ServerProcess, hold: Hold) -> None:
    with hold:
        connection, answer = open_stream(server)
        assert engine_figure(server, "num_requests_running") == 1
        answer.close()  # the socket closes with the last of both
        connection.close()
        wait_until(lambda: engine_figure(server, "num_requests_running") == 0)


def test_a_client_that_hangs_up_before_its_whole_answer_frees_the_engine(
    server: ServerProcess, hold: Hold
) -> None:
    address = urlsplit(server.url)
    body = json.dumps({**LONG, "stream": False}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with hold:
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: engine_figure(server, "num_requests_running") == 1)
        wait_until(lambda: engine_figure(server, "num_requests_running") == 0)


def test_bad_requests_leave_the_connection_usable(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    for body, status in ((b"{", 400), (b'{"prompt": "\xff"}', 400), (b'{"prompt": "a"}', 200)):
        connection.request("POST", "/v1/completions", body, JSON)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status
    connection.close()


def test_the_front_end_and_the_coordinator_do_not_import_torch() -> None:
    code = (
        "import sys, megatron_hybrid.server.processes.front_end; "
        "import megatron_hybrid.server.replicas.coordinator; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def own(folder: Path, *flags: str, **environment: str) -> ServerProcess:
    """A fake server that the test may kill; 20 tokens a second."""
    return ServerProcess(*FAKE, str(folder), "--step-seconds", "0.05", *flags, **environment)


def ends_together(server: ServerProcess, processes: list[int]) -> None:
    wait_until(lambda: not any(is_alive(process) for process in processes), 10)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{server.url}/health", timeout=5)


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[str]:
    """A folder for temporary files with a short path, empty at the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder
        assert os.listdir(folder) == []


@pytest.fixture
def port() -> str:
    return str(free_port())


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=thorough)])
def test_a_signal_lets_open_requests_finish_and_leaves_nothing(
    tokenizer_folder: Path, temporary: str, signum: int
) -> None:
    with own(tokenizer_folder, "--http-workers", "2", TMPDIR=temporary) as server:
        processes = server.descendants()
        assert len(processes) == 4  # the master, who prepares large requests, and the workers
        connection, answer = open_stream(server, max_tokens=40)
        idle = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        idle.request("GET", "/health")
        idle.getresponse().read()  # and the connection stays open
        assert server.stop(signum) == 0
        text = answer.read()
        assert b'"finish_reason":"length"' in text
        assert text.endswith(b"data: [DONE]\n\n")
        connection.close()
        idle.close()
        ends_together(server, processes)


def test_a_second_signal_ends_open_requests(
    tokenizer_folder: Path, temporary: str, hold: Hold
) -> None:
    with hold, own(tokenizer_folder, *hold.flags, TMPDIR=temporary) as server:
        processes = server.descendants()
        connection, answer = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(server))
        assert server.process.poll() is None
        assert server.stop(signal.SIGTERM) == 0
        text = answer.read()
        assert b"shutting down" in text
        assert b'"finish_reason":"length"' not in text
        connection.close()
        ends_together(server, processes)


def test_requests_that_outlast_the_shutdown_timeout_are_ended(
    tokenizer_folder: Path, temporary: str, hold: Hold
) -> None:
    flags = ("--shutdown-timeout", "0.5", *hold.flags)
    with hold, own(tokenizer_folder, *flags, TMPDIR=temporary) as server:
        connection, answer = open_stream(server)
        assert server.stop(signal.SIGTERM) == 0
        assert b"shutting down" in answer.read()
        connection.close()


def accepts(server: ServerProcess) -> bool:
    address = urlsplit(server.url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=5).close()
    except OSError:
        return False
    return True


def test_a_killed_engine_is_told_to_clients_and_a_restarted_one_is_joined(
    tokenizer_folder: Path, temporary: str, port: str, hold: Hold
) -> None:
    flags = ("--port", port, *hold.flags)
    with own(tokenizer_folder, *flags, TMPDIR=temporary) as first:
        front_end = first.descendants()
        with hold:
            connection, answer = open_stream(first)
            status, health = send(f"{first.url}/health")
            assert (status, health["engine_pid"]) == (200, first.process.pid)
            first.process.kill()
        assert b"engine process has ended" in answer.read()
        connection.close()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{first.url}/health", timeout=20)
        assert caught.value.code == 503
        assert int(caught.value.headers["Retry-After"]) > 0
        assert "ended" in json.load(caught.value)["error"]["message"]
        assert send(f"{first.url}/v1/completions", {"prompt": "Hello"})[0] == 503
        with own(tokenizer_folder, *flags, TMPDIR=temporary) as second:
            assert second.url == first.url
            status, health = send(f"{second.url}/health")
            assert (status, health["engine_pid"]) == (200, second.process.pid)
            connection, answer = open_stream(second, max_tokens=5)
            assert answer.read().endswith(b"data: [DONE]\n\n")
            connection.close()
            assert all(is_alive(process) for process in front_end)  # nothing was restarted
            assert second.stop() == 0
            ends_together(second, front_end)


def test_a_front_end_ends_when_no_engine_comes_back(
    tokenizer_folder: Path, temporary: str, port: str
) -> None:
    flags = ("--port", port, "--engine-restart-timeout", "1")
    with own(tokenizer_folder, *flags, TMPDIR=temporary) as server:
        front_end = server.descendants()
        server.process.kill()
        ends_together(server, front_end)
        wait_until(lambda: os.listdir(temporary) == [])


def test_a_front_end_with_other_settings_is_replaced(
    tokenizer_folder: Path, temporary: str, port: str
) -> None:
    with own(tokenizer_folder, "--port", port, TMPDIR=temporary) as first:
        front_end = first.descendants()
        first.process.kill()
        first.process.wait()
        flags = ("--port", port, "--http-connections", "100")
        with own(tokenizer_folder, *flags, TMPDIR=temporary) as second:
            assert not any(is_alive(process) for process in front_end)
            assert send(f"{second.url}/health")[0] == 200
            assert second.stop() == 0


def test_a_second_server_on_the_same_address_is_refused(
    tokenizer_folder: Path, temporary: str, port: str
) -> None:
    with own(tokenizer_folder, "--port", port, TMPDIR=temporary) as first:
        with pytest.raises(AssertionError, match=f"another one .* {first.process.pid}"):
            own(tokenizer_folder, "--port", port, TMPDIR=temporary)
        assert send(f"{first.url}/health")[0] == 200
        assert first.stop() == 0


def test_a_killed_worker_is_replaced_and_its_requests_are_aborted(
    tokenizer_folder: Path, temporary: str, hold: Hold
) -> None:
    with hold, own(tokenizer_folder, *hold.flags, TMPDIR=temporary) as server:
        master, _, worker = server.descendants()
        connection, answer = open_stream(server)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: len(server.descendants()) == 3 and worker not in server.descendants())
        wait_until(lambda: send(f"{server.url}/health")[0] == 200)
        wait_until(lambda: engine_figure(server, "num_requests_running") == 0)
        connection.close()
        assert is_alive(master)
        assert server.stop() == 0


def test_an_engine_that_fails_for_good_ends_non_zero_after_503(
    tokenizer_folder: Path, temporary: str, port: str
) -> None:
    flags = ("--fails-again", "--port", port, "--engine-restart-timeout", "2")
    with own(tokenizer_folder, *flags, TMPDIR=temporary) as server:
        front_end = server.descendants()
        assert send(f"{server.url}/v1/completions", {"prompt": "~"})[0] == 500
        assert server.process.wait(10) == 1
        status, body = send(f"{server.url}/health")
        assert status == 503
        assert "failed" in body["error"]["message"]
        ends_together(server, front_end)


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
        assert loading.wait(10) == 128 + signal.SIGTERM
        assert loading.stdout.read() == b""  # the front end has closed it too
        assert os.listdir(folder) == []


def test_a_killed_front_end_ends_the_engine_process(tokenizer_folder: Path) -> None:
    with own(tokenizer_folder) as server:
        master, *_ = server.descendants()
        os.kill(master, signal.SIGKILL)
        assert server.process.wait(10) == 1
        assert "front end process ended" in server.output
