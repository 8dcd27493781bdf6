#!/usr/bin/env python
r"""Stands before servers that compute prompts and servers that go on from there: for small set-ups.

    python tools/disaggregation_proxy.py --port 5000 \
        --prefill http://10.0.0.1:5001 --decode http://10.0.0.2:5002 http://10.0.0.3:5002

Chats and completions go to a prefill server, then, with the `kv_transfer_params` that it answers
when it has taken them, to a decode server, whose answer is passed on as it comes; of each kind to
one after the other. So the latter reads what the former computes while it does.
Where a prefill server fails, the decode server computes the prompt itself, and the log says so. All
else goes to the first decode server. docs/server.md has the servers' flags.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PREFILLED = ("/v1/chat/completions", "/v1/completions")
FIELD = "kv_transfer_params"
NOT_OF_A_PROMPT = {"stream_options", "max_completion_tokens", "min_tokens"}
# Of one connection alone, or written anew for the next.
OWN_HEADERS = {"connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding"}
CONNECT_SECONDS, PREFILL_SECONDS = 10.0, 600.0
PIECE = 2**16  # at least a record of TLS, so that no part of one stays where poll does not see it

logger = logging.getLogger("disaggregation_proxy")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Proxy(ThreadingHTTPServer):
    """Listens from the beginning. prefill, decode: URLs, at least one of each."""

    request_queue_size = 512

    def __init__(self, address: tuple[str, int], prefill: Sequence[str], decode: Sequence[str]):
        self.prefill, self.decode = itertools.cycle(prefill), itertools.cycle(decode)
        self.first_decode = decode[0]
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """One request; its connection is closed behind the answer, as the server's headers say."""

    server: Proxy
    protocol_version = "HTTP/1.1"  # so that who asks first may send its body
    error_content_type = "application/json"
    error_message_format = '{"error": {"message": "%(message)s", "type": "server_error"}}'

    def answer(self) -> None:
        """What came without its body, which is read here."""
        self.close_connection = True
        if "Transfer-Encoding" in self.headers:
            return self.send_error(411, "The body must come with its Content-Length.")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            with ExitStack() as prefilling:
                self._answer(body, prefilling)
        except (ClientGone, OSError):
            logger.info("A client has hung up.")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = answer

    def _answer(self, body: bytes, prefilling: ExitStack) -> None:
        url = self.server.first_decode
        if self.command == "POST" and self.path.partition("?")[0] in PREFILLED:
            url = next(self.server.decode)
            fields = _fields(body)
            if fields is not None:  # else the decode server says what is wrong
                if not self._prefill(fields, prefilling):
                    return
                body = json.dumps(fields).encode()
        self._pass_on(url, body)

    def _prefill(self, fields: dict[str, Any], prefilling: ExitStack) -> bool:
        """Have the prompt computed, until `prefilling` ends, and add to its fields what the decode
        server has to know; False where the prefill server has refused the request, as the client
        was told."""
        fields.pop(FIELD, None)  # the client does not choose among our servers
        asked = {name: value for name, value in fields.items() if name not in NOT_OF_A_PROMPT}
        url = next(self.server.prefill)
        try:
            body = json.dumps({**asked, "max_tokens": 1, "stream": True}).encode()
            connection = prefilling.enter_context(closing(self._send(url, body)))
            upstream = connection.sock
            self._wait(upstream, PREFILL_SECONDS)
            response = prefilling.enter_context(closing(connection.getresponse()))
            if not 400 <= response.status < 500:
                fields[FIELD] = self._handed_over(upstream, response)
                return True
            data = response.read()
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            logger.warning("%s did not compute a prompt; the decode server does: %r", url, error)
            return True
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in OWN_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        return False

    def _handed_over(self, upstream: socket.socket, response: HTTPResponse) -> Any:
        """What a prefill server says of where a prompt is computed, or, at its end, was."""
        told = None
        for event in self._events(upstream, response):
            told = event.get(FIELD, told)
            if told is not None and "request" in told:
                break
        if told is None:
            raise LookupError(f"its stream ends without {FIELD}")
        return told

    def _events(self, upstream: socket.socket, response: HTTPResponse) -> Iterator[Any]:
        """Of a stream, without the word that ends it."""
        data = b""
        while piece := response.read1(PIECE):
            *events, data = (data + piece).split(b"\n\n")
            yield from (json.loads(one[5:]) for one in events if one.startswith(b"data: {"))
            self._wait(upstream, PREFILL_SECONDS)

    def _pass_on(self, url: str, body: bytes) -> None:
        """The client gets every byte that this server answers, as it comes."""
        try:
            connection = self._send(url, body)
        except OSError as error:
            logger.warning("%s can't be reached: %r", url, error)
            return self.send_error(502, "The decode server can not be reached.")
        with closing(connection):
            self._wait(connection.sock)
            while data := connection.sock.recv(PIECE):
                self.connection.sendall(data)
                self._wait(connection.sock)

    def _send(self, url: str, body: bytes) -> HTTPConnection:
        """The request, with this body, to that server."""
        there = urlsplit(url)
        kind = HTTPSConnection if there.scheme == "https" else HTTPConnection
        connection = kind(there.netloc, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(None)
        path = there.path.rstrip("/") + self.path
        connection.putrequest(self.command, path, skip_accept_encoding=True)
        given = [pair for pair in self.headers.items() if pair[0].lower() not in OWN_HEADERS]
        for name, value in [*given, ("Content-Length", str(len(body))), ("Connection", "close")]:
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection

    def _wait(self, upstream: socket.socket, seconds: float | None = None) -> None:
        """Until the server says something. Raises ClientGone if the client hangs up before."""
        poll = select.poll()
        poll.register(upstream, select.POLLIN)
        poll.register(self.connection, select.POLLIN)
        ready = [one for one, _ in poll.poll(None if seconds is None else 1000 * seconds)]
        if not ready:
            raise TimeoutError(f"nothing came for {seconds:g} seconds")
        if upstream.fileno() not in ready:
            with suppress(OSError):
                if self.connection.recv(1, socket.MSG_PEEK):
                    return  # it sends more, which nobody reads
            raise ClientGone

    def log_message(self, format: str, *values: object) -> None:
        """The servers log requests."""


def _fields(body: bytes) -> dict[str, Any] | None:
    """Of a body; None unless it is a JSON object."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s proxy: %(message)s")
    with Proxy((args.host, args.port), args.prefill, args.decode) as proxy:
        logger.info("on http://%s:%d", args.host, proxy.server_port)
        proxy.serve_forever()


if __name__ == "__main__":
    main()
