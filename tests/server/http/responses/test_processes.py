"""/v1/responses of a server's own processes: workers share what is stored, large bodies are read
elsewhere, and a client that breaks off anywhere frees its request."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.http.responses.responding import PATH, events_in
from tests.server.running import ServerProcess, wait_until
from tests.thorough import usually

FAKE = ("-m", "tests.server.fake_server", "--tokenizer")
FLAGS = ("--http-workers", "2", "--max-seq-length", "60000", "--step-seconds", "0.001")
WORDS = "The quick brown fox. " * 1200  # more than a worker reads by itself
CUTS = usually(40, 1000)
CUT_UP_TO = 6000  # bytes: headers, the first events, and some of each kind that there are many of


@pytest.fixture(scope="module")
def address(tokenizer_folder: Path) -> Iterator[tuple[str, int]]:
    with ServerProcess(*FAKE, str(tokenizer_folder), *FLAGS) as server:
        parts = urlsplit(server.url)
        assert parts.hostname is not None and parts.port is not None
        yield parts.hostname, parts.port


def ask(
    address: tuple[str, int], method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """On a connection of its own, which whichever worker takes."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def test_every_worker_finds_what_another_has_stored(address: tuple[str, int]) -> None:
    body = {"input": "Hello", "max_output_tokens": 3, "temperature": 0}
    for _ in range(10):
        status, response = ask(address, "POST", PATH, body)
        assert status == 200
        for _ in range(4):
            assert ask(address, "GET", f"{PATH}/{response['id']}") == (200, response)
        body = {**body, "previous_response_id": response["id"]}
    status, found = ask(address, "GET", f"{PATH}/{response['id']}/input_items?limit=100")
    assert (status, len(found["data"])) == (200, 10 + 9)
    assert ask(address, "DELETE", f"{PATH}/{response['id']}")[0] == 200
    assert ask(address, "GET", f"{PATH}/{response['id']}")[0] == 404


def test_large_inputs_are_read_and_stored_like_others(address: tuple[str, int]) -> None:
    body = {"input": WORDS, "max_output_tokens": 3, "temperature": 0}
    status, response = ask(address, "POST", PATH, body)
    assert (status, response["status"]) == (200, "incomplete")
    more = {**body, "previous_response_id": response["id"], "input": [message(WORDS)]}
    status, second = ask(address, "POST", PATH, more)
    assert status == 200
    assert second["usage"]["input_tokens"] > 2 * response["usage"]["input_tokens"]
    status, found = ask(address, "GET", f"{PATH}/{second['id']}/input_items?order=asc")
    assert [one["content"][0]["text"] for one in found["data"]][::2] == [WORDS, WORDS]
    for name, value, field in (
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("input", [message(WORDS), {"type": "item_reference", "id": "msg_1"}], "input[1].id"),
    ):
        status, found = ask(address, "POST", PATH, {**more, name: value})
        assert (status, found["error"]["param"]) == (404, field)


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_stream_that_is_cut_at_any_byte_frees_its_request(address: tuple[str, int]) -> None:
    body = {"input": "Hello", "stream": True, "temperature": 0, "ignore_eos": True}
    body["max_output_tokens"] = 30_000
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data

    def read(most: int) -> bytes:
        received = b""
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(request)
            while len(received) < most and (piece := connection.recv(most - len(received))):
                received += piece
        return received

    # By itself an answer goes on for half a minute.
    for cut in range(0, CUT_UP_TO, CUT_UP_TO // CUTS):
        assert len(read(cut)) == cut
    wait_until(lambda: ask(address, "GET", "/load") == (200, {"server_load": 0}), 5.0)
    status, response = ask(address, "POST", PATH, {"input": "Hello", "max_output_tokens": 2})
    assert (status, response["status"]) == (200, "incomplete")


def test_events_come_one_by_one(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=30)
    # So many that a reader who is held up for a moment still sees several pieces.
    body = {"input": "Hello " * 9, "max_output_tokens": 400, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.getheader("Content-Type", "").startswith("text/event-stream")
    pieces = []
    while piece := answer.read1(65536):
        pieces.append(piece)
    connection.close()
    assert len(pieces) > 5, len(pieces)
    *_, last = events_in(b"".join(pieces).decode())
    assert last["type"] == "response.incomplete"
