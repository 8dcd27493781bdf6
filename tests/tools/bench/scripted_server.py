"""A server with OpenAI's API in this process, whose every byte a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
CLOSE = object()  # in an answer's pieces: close the connection here


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def answer_events(body: Body, chat: bool) -> list[bytes]:
    """max_tokens tokens, one an event: "w0 ", "w1 ", ... with the ids 100, 101, ..."""
    count = body.get("max_tokens") or body["max_completion_tokens"]
    prompt = body.get("prompt") or body["messages"]
    events = [event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})] if chat else []
    for i in range(count):
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if i == count - 1 else None}
        choice |= {"delta": {"content": f"w{i} "}} if chat else {"text": f"w{i} "}
        if body.get("return_token_ids"):
            choice["token_ids"] = [100 + i]
        events.append(event({"choices": [choice]}))
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": len(prompt) // 2},
    }
    return [*events, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


@dataclass
class ScriptedServer:
    """Answers with `script(body)`: pieces of a stream, or (status, JSON). None: answer_events.

    token_ids: whether return_token_ids is known (else refused, as OpenAI does). seconds: how long
    an answer takes before its first event.
    """

    script: Callable[[Body], Any] | None = None
    token_ids: bool = True
    tokenize: bool = True
    seconds: float = 0.0
    bodies: list[Body] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    connections: int = 0
    url: str = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[ScriptedServer]:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    @contextmanager
    def in_thread(self) -> Iterator[ScriptedServer]:
        """For what runs an event loop of its own."""
        ready = threading.Event()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def main() -> None:
            async with self.serve():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
        thread.start()
        assert ready.wait(10)
        yield self
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
                body = await reader.readexactly(length)
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    go_on = await self._answer(head, body, writer)
                finally:
                    self.running -= 1
                if not go_on:
                    break
        writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        path = head.split(" ")[1]
        answer: Any
        if path.startswith("/v1/") and path.endswith("completions"):
            values = json.loads(body)
            self.headers.append(head)
            self.bodies.append(values)
            await asyncio.sleep(self.seconds)
            if "return_token_ids" in values and not self.token_ids:
                answer = (400, {"error": {"message": "return_token_ids is not known."}})
            elif self.script is None:
                answer = answer_events(values, path.endswith("chat/completions"))
            else:
                answer = self.script(values)
        elif path == "/v1/models":
            answer = (200, {"data": [{"id": "scripted"}]})
        elif path == "/tokenize" and self.tokenize:
            words = json.loads(body)["prompt"].split()
            answer = (200, {"tokens": [300 + int(word[1:]) for word in words if word[0] == "w"]})
        else:
            answer = (404, {"error": {"message": f"no {path}"}})
        if isinstance(answer, tuple):
            text = json.dumps(answer[1]).encode()
            head_lines = f"HTTP/1.1 {answer[0]} Reason\r\nContent-Length: {len(text)}\r\n\r\n"
            writer.write(head_lines.encode() + text)
            await writer.drain()
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in answer:
            if piece is CLOSE:
                return False
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
