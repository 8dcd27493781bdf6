"""The proxy before servers that compute prompts and servers that go on from there; here neither
computes anything."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest
from disaggregation_proxy import Proxy

from bench.ports import free_address
from tests.server.running import http_server, wait_until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer k", "x-request-id": "r-1"}
BODY: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stream": True},
    **{"stream_options": {"include_usage": True}, "max_completion_tokens": 9, "min_tokens": 2},
}


class Upstream:
    """A server that answers everything with `status` and `pieces`. arrived: method, path and body
    of each request; headers: of the last one. It goes on after its first piece when `may_go_on`,
    and is `cut_off` when its client hangs up before."""

    def __init__(self, answer: Any, status: int = 200, *more: bytes) -> None:
        first = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.pieces = [first, *more]
        self.status = status
        self.arrived: list[tuple[str, str, Any]] = []
        self.headers: dict[str, str] = {}
        self.may_go_on, self.cut_off = threading.Event(), threading.Event()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 0

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                upstream.arrived.append((self.command, self.path, json.loads(body or b"null")))
                upstream.headers = {name.lower(): value for name, value in self.headers.items()}
                self.send_response(upstream.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Retry-After", "7")
                self.send_header("Transfer-Encoding", "chunked")
                self.send_header("Connection", "close")  # as it was asked to
                self.end_headers()
                first, *others = upstream.pieces
                self.chunk(first)
                for piece in others:
                    while not upstream.may_go_on.wait(0.01):
                        if self.has_gone():
                            return upstream.cut_off.set()
                    self.chunk(piece)
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST

            def has_gone(self) -> bool:
                """Whether the client has; with a reset where it had not read what was sent."""
                try:
                    return not self.connection.recv(1, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                except ConnectionResetError:
                    return True

            def chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

            def log_message(self, *of: Any) -> None:
                """Say nothing."""

        self._serving = http_server(Handler)

    def __enter__(self) -> Upstream:
        self.url = self._serving.__enter__()
        return self

    def __exit__(self, *of: Any) -> None:
        self.may_go_on.set()
        self._serving.__exit__(*of)

    @property
    def bodies(self) -> list[Any]:
        return [body for _, _, body in self.arrived]


def event(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [], **fields}).encode()


PEER = {"peer": "10.0.0.1:7001"}
COMPUTES = {**PEER, "request": "r-0"}
FIRST, LAST = event(kv_transfer_params=COMPUTES), event(kv_transfer_params=PEER)


@pytest.fixture
def prefill() -> Iterator[Upstream]:
    """It goes on computing for as long as anybody listens."""
    with Upstream(FIRST, 200, LAST) as server:
        yield server


@pytest.fixture
def decode() -> Iterator[Upstream]:
    with Upstream({"from": "decode"}) as server:
        yield server


@contextlib.contextmanager
def proxy(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[HTTPConnection]:
    with Proxy(("127.0.0.1", 0), prefill, decode) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        finally:
            server.shutdown()


def ask(client: HTTPConnection, body: Any = BODY, path: str = CHAT) -> tuple[int, Any]:
    client.request("POST", path, json.dumps(body), HEADERS)
    answer = client.getresponse()
    return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def half_an_answer(prefill: Upstream) -> Iterator[tuple[Upstream, HTTPResponse]]:
    """It has two pieces, of which the decode server gives the second when it may go on."""
    with (
        Upstream("first", 200, b'"second"') as decode,
        proxy([prefill.url], [decode.url]) as client,
    ):
        client.request("POST", CHAT, json.dumps(BODY), HEADERS)
        yield decode, client.getresponse()


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_prompt_is_gone_on_from_while_it_is_computed(
    prefill: Upstream, decode: Upstream, path: str
) -> None:
    body = {**BODY, "kv_transfer_params": {"peer": "mine:1"}}
    with proxy([prefill.url], [decode.url]) as client:
        assert ask(client, body, path) == (200, {"from": "decode"})
    asked = {"messages": BODY["messages"], "max_tokens": 1, "stream": True}
    assert prefill.arrived == [("POST", path, asked)]
    assert decode.arrived == [("POST", path, {**BODY, "kv_transfer_params": COMPUTES})]
    for server in (prefill, decode):
        assert HEADERS.items() <= {**server.headers, **_as_sent(server.headers)}.items()


def test_where_no_request_is_named_the_end_is_waited_for(decode: Upstream) -> None:
    pieces = event(), event(kv_transfer_params={"peer": "one:1"}) + event()[:9], event()[9:] + LAST
    with Upstream(pieces[0], 200, *pieces[1:]) as prefill:
        prefill.may_go_on.set()
        with proxy([prefill.url], [decode.url]) as client:
            assert ask(client) == (200, {"from": "decode"})
    assert decode.bodies == [{**BODY, "kv_transfer_params": PEER}]


@pytest.mark.parametrize("said", [b"{}", b"data: [DONE]\n\n", event(error={}), b"data: {x\n\n"])
def test_who_does_not_say_where_the_prompt_is_is_done_without(
    decode: Upstream, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Upstream(said) as prefill, proxy([prefill.url], [decode.url]) as client:
        assert ask(client) == (200, {"from": "decode"})
    assert decode.bodies == [BODY] and "did not compute a prompt" in caplog.text


def test_the_prompt_is_computed_until_it_is_answered(prefill: Upstream) -> None:
    with half_an_answer(prefill) as (decode, answer):
        assert answer.read1() == b'"first"' and not prefill.cut_off.wait(0.2)
        decode.may_go_on.set()
        assert answer.read() == b'"second"'
        assert prefill.cut_off.wait(20)


def _as_sent(headers: dict[str, str]) -> dict[str, str]:
    return {name: headers[name.lower()] for name in HEADERS}


def test_servers_of_a_kind_take_turns(prefill: Upstream, decode: Upstream) -> None:
    second = event(kv_transfer_params={"peer": "second:1", "request": "r"})
    with Upstream(second) as other, Upstream({}) as last:
        with proxy([prefill.url, other.url], [decode.url, last.url]) as client:
            for _ in range(4):
                ask(client)
        assert [len(one.arrived) for one in (prefill, other, decode, last)] == [2, 2, 2, 2]
        assert {body["kv_transfer_params"]["peer"] for body in last.bodies} == {"second:1"}


def test_a_stream_is_passed_on_as_it_comes(prefill: Upstream) -> None:
    with half_an_answer(prefill) as (decode, answer):
        assert answer.getheader("Content-Type") == "application/json"
        assert answer.read1() == b'"first"'
        decode.may_go_on.set()
        assert answer.read() == b'"second"'


@pytest.mark.parametrize("status", [500, 503])
def test_without_a_prefill_server_the_decode_server_computes_the_prompt(
    prefill: Upstream, decode: Upstream, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.status, prefill.pieces = status, [b'{"error": {}}']
    gone = f"http://{free_address()}"
    with proxy([prefill.url, gone], [decode.url]) as client:
        for _ in range(2):
            assert ask(client) == (200, {"from": "decode"})
    assert decode.bodies == [BODY, BODY]
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [url in text for url, text in zip((prefill.url, gone), said, strict=True)] == [True] * 2


def test_what_the_client_did_wrong_it_is_told(prefill: Upstream, decode: Upstream) -> None:
    prefill.status, prefill.pieces = 429, [b'{"error": {"code": "queue_full"}}']
    with proxy([prefill.url], [decode.url]) as client:
        client.request("POST", CHAT, json.dumps(BODY), HEADERS)
        answer = client.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (429, "7")
        assert json.loads(answer.read()) == {"error": {"code": "queue_full"}}
        assert ask(client)[0] == 429  # on a new connection: it was told that the first one ends
    assert not decode.arrived


@pytest.mark.parametrize("body", ["[1]", '"text"', "7"])
def test_no_object_goes_to_a_decode_server_alone(
    prefill: Upstream, decode: Upstream, body: str
) -> None:
    with proxy([prefill.url], [decode.url]) as client:
        client.request("POST", CHAT, body, HEADERS)
        assert client.getresponse().status == 200
    assert decode.bodies == [json.loads(body)] and not prefill.arrived


def test_all_else_goes_to_the_first_decode_server(prefill: Upstream, decode: Upstream) -> None:
    with Upstream({}) as other, proxy([prefill.url], [decode.url, other.url]) as client:
        for method, path in (("GET", "/v1/models"), ("GET", CHAT), ("POST", "/tokenize?a=1")) * 2:
            client.request(method, path, "{}" if method == "POST" else None, HEADERS)
            assert json.loads(client.getresponse().read()) == {"from": "decode"}
        assert len(decode.arrived) == 6 and decode.arrived[2] == ("POST", "/tokenize?a=1", {})
        assert not prefill.arrived and not other.arrived


def test_without_a_decode_server_the_status_is_502(prefill: Upstream) -> None:
    with proxy([prefill.url], [f"http://{free_address()}"]) as client:
        status, answer = ask(client)
        assert status == 502 and "can not be reached" in answer["error"]["message"]


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_hangs_up_ends_its_request(prefill: Upstream, reads: bool) -> None:
    """Also while nothing comes, as of an answer that is not streamed."""
    with Upstream("first", 200, b'"second"') as decode, proxy([prefill.url], [decode.url]) as to:
        with socket.create_connection((to.host, to.port)) as client:
            body = json.dumps(BODY).encode()
            client.sendall(b"POST %b HTTP/1.1\r\n" % CHAT.encode())
            client.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            wait_until(lambda: bool(decode.arrived))
            if reads:
                assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(decode.cut_off.is_set, 30)


def test_a_path_before_the_servers_own_is_kept(prefill: Upstream, decode: Upstream) -> None:
    under = f"{decode.url}/llm/"
    assert urlsplit(under).path == "/llm/"
    with proxy([prefill.url], [under]) as client:
        ask(client)
    assert decode.arrived[0][1] == f"/llm{CHAT}"
