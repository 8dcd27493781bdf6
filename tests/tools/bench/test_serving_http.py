from __future__ import annotations

import asyncio

import pytest

from bench.serving_http import Address, HttpClient, HttpError, ResponseParser
from tests.tools.bench.scripted_server import ScriptedServer

HEAD = b"HTTP/1.1 200 OK\r\nServer: x\r\n"
BODY = b"data: one\n\ndata: two\r\n\r\ndata: three\n\n"
CHUNKED = (
    HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"b\r\n" + BODY[:11] + b"\r\n"
    + b"1;extension=1\r\n" + BODY[11:12] + b"\r\n"
    + b"%X\r\n" % len(BODY[12:]) + BODY[12:] + b"\r\n0\r\nTrailer: x\r\n\r\n"
)  # fmt: skip
PLAIN = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN


@pytest.mark.parametrize("response", [CHUNKED, PLAIN, INTERIM], ids=["chunked", "plain", "interim"])
@pytest.mark.parametrize("size", [*range(1, 20), 10**6])
def test_a_body_is_the_same_however_its_bytes_are_cut(response: bytes, size: int) -> None:
    parser = ResponseParser()
    body = b""
    for start in range(0, len(response), size):
        assert not parser.complete
        body += parser.feed(response[start : start + size])
    assert (parser.status, parser.headers["server"], body) == (200, "x", BODY)
    assert parser.complete and parser.reusable


@pytest.mark.parametrize("response", [CHUNKED, PLAIN], ids=["chunked", "plain"])
def test_an_answer_that_is_cut_short_is_an_error(response: bytes) -> None:
    for length in range(1, len(response)):
        parser = ResponseParser()
        parser.feed(response[:length])
        with pytest.raises(HttpError, match="closed the connection"):
            parser.end()


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"\r\n" + BODY) == BODY
    assert not parser.complete
    parser.end()
    assert parser.complete and not parser.reusable


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        HEAD + b"Content-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70000,
    ],
    ids=["protocol", "chunk", "length", "endless"],
)
def test_what_is_not_http_is_an_error(response: bytes) -> None:
    with pytest.raises(HttpError):
        ResponseParser().feed(response)


def test_connection_close_is_not_used_again() -> None:
    parser = ResponseParser()
    parser.feed(HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n")
    assert parser.complete and not parser.reusable


def test_urls() -> None:
    assert Address.parse("http://a:5/v/") == Address("http", "a", 5, "/v")
    assert Address.parse("https://a") == Address("https", "a", 443, "")
    assert Address.parse("[::1]:80").host == "::1"
    for url in ("ftp://a", "http://", ""):
        with pytest.raises(ValueError, match="no URL"):
            Address.parse(url)


def test_a_header_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="line break"):
        HttpClient("http://a", {"X": "1\r\nY: 2"})


def test_connections_are_used_again() -> None:
    async def main() -> int:
        async with ScriptedServer().serve() as server:
            client = HttpClient(server.url)
            for _ in range(5):
                response, _ = await client.request("GET", "/v1/models")
                assert response.status == 200
            client.close()
            return server.connections

    assert asyncio.run(main()) == 1


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    """The server closes after each answer without saying so."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    served = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        served += 1
        writer.write(answer)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")  # the next request gets no answer
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(3):
            _, body = await client.request("GET", "/")
            assert body == b"ok"
        client.close()
        server.close()

    asyncio.run(main())
    assert served == 3
