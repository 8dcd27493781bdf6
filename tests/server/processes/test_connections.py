"""Connections of clients that stall, hang up or send nonsense: an answer for them, a quiet log."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from gunicorn.http.body import Body
from gunicorn.http.errors import InvalidChunkSize

from megatron_hybrid.server.http import connection as http_connection
from megatron_hybrid.server.http.connection import (
    PAUSE_BYTES,
    BodyBroken,
    BodyReader,
    Pace,
    client_gone,
)
from megatron_hybrid.server.http.preparers import NICENESS
from megatron_hybrid.server.processes.connections import Connection
from tests.server.processes.test_processes import FAKE, JSON, engine_figure, open_stream, send
from tests.server.running import ServerProcess, children_of, wait_until

BODY = b'{"prompt": "Hello", "max_tokens": 2, "temperature": 0}'
ALWAYS = ("Host: localhost", "Content-Type: application/json")
CHUNKED = ("Transfer-Encoding: chunked",)


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """Gives up a client after a moment, and has 12 places; whatever the tests do to it, it logs no
    failure."""
    flags = ("--stalled-client-seconds", "0.3", "--http-connections", "4", "--log-format", "json")
    with ServerProcess(*FAKE, str(tokenizer_folder), *flags) as server:
        yield server
        assert server.stop() == 0
    assert [line for line in server.lines if "Traceback" in line] == []


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", *ALWAYS, *lines, "", "")).encode()


def ask(server: ServerProcess, data: bytes, *, ends: bool = False) -> tuple[int, dict[str, Any]]:
    """The answer to these bytes, after which the server must close the connection.

    ends: the client says that it sends no more.
    """
    with connect(server) as client:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        body = answer.read()
        assert answer.headers["Connection"] == "close"
        assert client.recv(1) == b""
        return answer.status, json.loads(body)


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 100") + BODY[:20],
        head("Content-Length: 100"),
        head(*CHUNKED) + b"64\r\n" + BODY[:20],
        head(*CHUNKED) + b"6",
    ],
)
def test_a_body_that_stalls_is_given_up_with_408(server: ServerProcess, data: bytes) -> None:
    status, answer = ask(server, data)
    assert status == 408
    assert answer["error"]["type"] == "timeout_error"
    assert answer["error"]["code"] == "request_timeout"
    assert "0.3 seconds" in answer["error"]["message"]


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 100") + BODY[:20],
        head(f"Content-Length: {len(BODY) + 1}") + BODY,  # valid JSON, but is it all?
        head("Content-Length: 100"),
        head(*CHUNKED) + b"64\r\n" + BODY[:20],
        head(*CHUNKED) + b"%x\r\n%s\r\n" % (len(BODY), BODY),  # the last chunk is missing
    ],
)
def test_a_body_that_ends_early_is_refused(server: ServerProcess, data: bytes) -> None:
    status, answer = ask(server, data, ends=True)
    assert (status, answer["error"]["code"]) == (400, "broken_body")


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n" + BODY,
        b"3\r\n" + BODY,
        b"3;\x01\r\n" + BODY,
        b"f" * 9000,
        b"2\r\n{}\r\n0\r\nno colon\r\n\r\n",
        b"2\r\n{}\r\n0\r\nHost: b\r\n\r\n",
    ],
)
def test_chunks_that_are_none_are_refused(server: ServerProcess, body: bytes) -> None:
    status, answer = ask(server, head(*CHUNKED) + body)
    assert (status, answer["error"]["code"]) == (400, "broken_body")


@pytest.mark.parametrize("rest", [b"", BODY[:20]])
def test_a_body_that_was_not_needed_may_end_early(server: ServerProcess, rest: bytes) -> None:
    """The answer comes before the body is looked at; there is no second one."""
    with connect(server) as client:
        client.sendall(head("Content-Length: 100", path="/nowhere") + rest)
        client.shutdown(socket.SHUT_WR)
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("rest", [b"", BODY[:20]])
@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_a_client_that_hangs_up_in_its_body_leaves_a_server_that_serves(
    server: ServerProcess, path: str, rest: bytes
) -> None:
    with connect(server) as client:
        client.sendall(head("Content-Length: 100", path=path) + rest)
    assert send(f"{server.url}/v1/completions", json.loads(BODY))[0] == 200


@pytest.mark.parametrize("header", ["SCRIPT_NAME: /v1", "PATH_INFO: /health", "REMOTE_USER: me"])
def test_no_header_changes_the_path(server: ServerProcess, header: str) -> None:
    lines = (f"Content-Length: {len(BODY)}", header, "Connection: close")
    status, answer = ask(server, head(*lines) + BODY)
    assert (status, answer["object"]) == (200, "text_completion")


def test_chunks_make_up_a_body_and_the_connection_stays(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    for _ in range(2):
        connection.request("POST", "/v1/completions", iter([BODY[:9], BODY[9:]]), JSON)
        answer = connection.getresponse()
        assert answer.status == 200
        assert not answer.will_close
        assert json.load(answer)["usage"]["completion_tokens"] == 2
    connection.close()


def test_connections_that_send_nothing_more_make_room(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        stalled = []
        for _ in range(100):
            stalled.append(stack.enter_context(connect(server)))
            stalled[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert send(f"{server.url}/health")[0] == 200
        assert stalled[0].recv(1) == b""
        stalled[-1].sendall(b"\r\n")
        assert stalled[-1].recv(12) == b"HTTP/1.1 200"
    server.wait_for_line("(that waited for their client were closed)", 20)


def test_too_many_bodies_at_once_are_refused_but_not_looks_at_the_server(
    server: ServerProcess,
) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(40)]
        for client in clients:
            with contextlib.suppress(OSError):  # it had to make room
                client.sendall(head("Content-Length: 100", "x-request-id: mine") + BODY[:20])
        assert send(f"{server.url}/health")[0] == 200
        answers = []
        for client in clients:
            with contextlib.suppress(OSError):
                answers.append(client.makefile("rb").read())
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 429")]
    assert refused
    for answer in refused:
        lines, _, body = answer.partition(b"\r\n\r\n")
        assert {b"Retry-After: 1", b"x-request-id: mine", b"Connection: close"} <= {
            *lines.split(b"\r\n")
        }
        assert json.loads(body)["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", 431),
        (head("Expect: miracles", "Content-Length: 2") + b"{}", 417),
        (head("Transfer-Encoding: gopher, chunked"), 501),
        # Two readers could find different ends of these.
        (head("Content-Length: 5", "Content-Length: 6") + BODY, 400),
        (head("Content-Length: 5", *CHUNKED) + b"0\r\n\r\n" + head(path="/abort"), 400),
        (head("Content-Length: +5") + BODY, 400),
        (head("Transfer-Encoding: chunked, identity") + BODY, 400),
        (head("Transfer-Encoding: gzip") + BODY, 400),
        (head(" Content-Length: 5") + BODY, 400),
    ],
)
def test_what_is_no_request_gets_one_answer_and_a_closed_connection(
    server: ServerProcess, data: bytes, status: int
) -> None:
    with connect(server) as client:
        client.sendall(data)
        answer = client.makefile("rb").read()
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nx-request-id: req-" in lines
    assert b"\r\nConnection: close" in lines
    assert json.loads(body)["error"]["type"] == "invalid_request_error"  # and nothing behind it


def test_requests_that_are_sent_at_once_are_answered_in_order(server: ServerProcess) -> None:
    get = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-request-id: {}\r\n\r\n"
    with connect(server) as client:
        client.sendall("".join(map(get.format, range(50))).encode())
        client.shutdown(socket.SHUT_WR)
        answers = client.makefile("rb").read().decode()
    assert re.findall("x-request-id: (.*)\r", answers) == list(map(str, range(50)))
    assert answers.count("HTTP/1.1 200 OK") == 50


def test_a_body_is_asked_for_when_the_client_expects_that(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(head(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert client.recv(12) == b"HTTP/1.1 200"
    with connect(server) as client:
        client.sendall(head("Content-Length: 9", "Expect: 100-continue", "Connection: close"))
        assert b"\r\n\r\nHTTP/1.1 408" in client.makefile("rb").read()


def test_requests_are_logged_as_objects(server: ServerProcess) -> None:
    lines = ('x-request-id: a "b"', "Connection: close")
    assert ask(server, head(*lines, f"Content-Length: {len(BODY)}") + BODY)[0] == 200
    server.wait_for_line(r"(a \\\"b\\\")", 20)
    found = [json.loads(line) for line in server.lines if '"a \\"b\\""' in line]
    assert [
        (one["process"], one["route"], one["status"], one["answer_tokens"]) for one in found
    ] == [("front end", "/v1/completions", 200, 2)]


def test_idle_connections_end_with_the_server_without_a_word(tokenizer_folder: Path) -> None:
    flags = ("--step-seconds", "0.02", "--no-access-log")
    with ServerProcess(*FAKE, str(tokenizer_folder), *flags) as server:
        used = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        used.request("GET", "/health")
        used.getresponse().read()
        with connect(server) as fresh, connect(server) as begun:
            begun.sendall(b"POST /v1/comp")
            wait_until(lambda: engine_figure(server, "num_requests_running") == 0)
            stream, answer = open_stream(server, max_tokens=10)
            assert server.stop() == 0
            assert answer.read().endswith(b"data: [DONE]\n\n")
            for client in (used.sock, fresh, begun):
                assert client.recv(100) == b""
        stream.close()
        used.close()
    assert "Traceback" not in server.output
    assert "route=" not in server.output


@pytest.mark.parametrize("sent", [b"", b"more"])
@pytest.mark.parametrize("end", ["close", "half-close", "reset"])
def test_what_is_unread_does_not_hide_that_the_client_has_gone(sent: bytes, end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
    with client, connection:
        client.sendall(sent)
        assert not client_gone({"gunicorn.socket": connection})()
        if end == "half-close":
            client.shutdown(socket.SHUT_WR)
        else:
            linger = struct.pack("ii", end == "reset", 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.close()
        wait_until(lambda: client_gone({"gunicorn.socket": connection})())


class _Request:
    """What a reader knows of gunicorn's request."""

    def __init__(self, reader: Any) -> None:
        self.body = Body(reader)
        self.closes = False

    def force_close(self) -> None:
        self.closes = True


class _Pieces(io.BytesIO):
    """Raises at the end, as the reader of chunks does."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if not data:
            raise InvalidChunkSize(b"?")
        return data


def test_a_reader_passes_on_what_came_and_closes_after_a_failure() -> None:
    request = _Request(_Pieces(b"abcdef"))
    pace = Pace(patience=1.0, seconds=1.0, bytes_a_second=1.0)
    reader = BodyReader(request, Connection(None, None), pace)
    assert (reader.read(4), reader.read(4)) == (b"abcd", b"ef")
    assert not request.closes
    with pytest.raises(BodyBroken, match="chunk size"):
        reader.read(4)
    assert request.closes


@pytest.mark.parametrize(
    "length, most_between, most_at_once", [(10**6, PAUSE_BYTES, 2**20), (None, 1024, 1024)]
)
def test_others_have_their_turn_while_a_body_is_read(
    monkeypatch: pytest.MonkeyPatch, length: int | None, most_between: int, most_at_once: int
) -> None:
    """Whoever reads it, and in whatever steps: 1,024 bytes are what gunicorn drains by."""
    events: list[int | None] = []
    monkeypatch.setattr(http_connection.time, "sleep", lambda seconds: events.append(None))

    class Noted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            events.append(len(data))
            return data

    parts = Noted(bytes(10**6))
    if length is not None:
        parts.length = length  # type: ignore[attr-defined]
    pace = Pace(patience=9.0, seconds=9.0, bytes_a_second=1.0)
    reader = BodyReader(_Request(parts), Connection(None, None), pace)
    while reader.read(1024):
        pass
    since = 0
    for event in events:
        since = 0 if event is None else since + event
        assert since <= most_between + 1024
    parts.seek(0)
    assert len(reader.read(2**20)) <= most_at_once


def test_large_requests_go_on_when_the_processes_that_read_them_are_killed(
    server: ServerProcess,
) -> None:
    def answer() -> int:
        return send(f"{server.url}/tokenize", {"prompt": "Hello " * 10_000})[0]

    assert answer() == 200
    everybody = server.descendants()
    # They are polite; the one that has forked them is not, and neither are the others.
    children = [pid for pid in everybody if os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS]
    (parent,) = {pid for pid in everybody if set(children) & set(children_of(pid))}
    assert children
    for pid in (parent, *children):
        os.kill(pid, signal.SIGKILL)
    assert answer() == 503
    wait_until(lambda: answer() == 200)
