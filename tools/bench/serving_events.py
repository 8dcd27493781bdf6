"""Server-sent events of an OpenAI-compatible server, from pieces of any size."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class EventParser:
    """Collects the `data` of events; comments and other fields are skipped.

    Lines end with LF or CRLF (a lone CR, which the standard allows too, is not a line end here:
    no server of this kind writes it).
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that this piece completes."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
                continue
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                payloads.append(b"\n".join(lines))
        return payloads


class Delta(msgspec.Struct):
    """What a chat's event adds. `reasoning` has two names among servers."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """`text` of /v1/completions, `delta` of /v1/chat/completions."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode
