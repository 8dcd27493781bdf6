"""A server that says what a test wants, byte by byte, and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.server.running import http_server

USAGE = {
    "prompt_tokens": 1300,
    "completion_tokens": 57,
    "prompt_tokens_details": {"cached_tokens": 1234},
    "completion_tokens_details": {"reasoning_tokens": 20},
}


def chunk(finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
    """An event with what it adds to the answer."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def stream(*events: dict[str, Any], done: bool = True) -> bytes:
    """Events as they are sent."""
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


def answer(*pieces: str) -> bytes:
    """A whole stream that says these."""
    parts = [chunk(content=piece) for piece in pieces]
    return stream(*parts, chunk("stop"), {"choices": [], "usage": USAGE})


NOT_HERE = 404, b""


class Scripted:
    """`answers`: (status, body) of the chats to come, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models = b'{"data": [{"id": "scripted"}]}'
        self.url = ""

    def next(self) -> tuple[int, bytes]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def scripted_server() -> Iterator[Scripted]:
    """One that listens."""
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*(200, script.models) if self.path == "/v1/models" else NOT_HERE)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            script.asked.append(json.loads(body))
            script.headers.append(dict(self.headers))
            self._send(*script.next() if self.path == "/v1/chat/completions" else NOT_HERE)

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Handler) as script.url:
        yield script
