"""Requests to /v1/messages, for the tests of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from flask.testing import FlaskClient

from megatron_hybrid.server.http.protocol.anthropic_answers import Event, Message

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(said: str, *, mark: bool = False) -> dict[str, Any]:
    """A block of text; mark: with cache_control."""
    block: dict[str, Any] = {"type": "text", "text": said}
    return {**block, "cache_control": {"type": "ephemeral"}} if mark else block


def ask(http: FlaskClient, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The whole answer, of the described shape; greedy unless it says otherwise."""
    body = {"messages": [*messages], "max_tokens": 64, "temperature": 0, **more}
    answer = http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.data
    msgspec.json.decode(answer.data, type=Message, strict=True)
    return dict(answer.get_json())


def stream(http: FlaskClient, *messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The events of the same; each has the described shape."""
    body = {"messages": [*messages], "max_tokens": 64, "temperature": 0, **more}
    answer = http.post(MESSAGES, json={**body, "stream": True})
    assert answer.status_code == 200, answer.data
    assert answer.mimetype == "text/event-stream"
    *events, end = answer.get_data(as_text=True).split("\n\n")
    assert not end
    return [read_event(event) for event in events]


def read_event(event: str) -> dict[str, Any]:
    name, data = event.split("\n")
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {found['type']}"
    if found["type"] != "error":
        msgspec.convert(found, Event)
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, which come in their order."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["usage"]["output_tokens"] == 0
    is_open = False
    for event in events[2:-2]:
        content = message["content"]
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(content) - 1
            field, said = DELTAS[event["delta"]["type"]]
            before = content[-1][field] or ""  # arguments are {} first
            content[-1][field] = before + event["delta"][said]
        else:
            assert is_open and event == {"type": "content_block_stop", "index": len(content) - 1}
        is_open = event["type"] != "content_block_stop"
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_names(message: dict[str, Any]) -> dict[str, Any]:
    """The message without ids and without what the cache did for it."""
    content = [{**block, "id": ""} for block in message["content"]]
    usage = {name: message["usage"][name] for name in ("output_tokens",)}
    return {**message, "id": "", "content": content, "usage": usage}
