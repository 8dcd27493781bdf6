"""A server whose model is scripted, asked through /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/responses"
THOUGHT, FOX = "Hm, é😀.\n\nSo a < b?", "A quick\n fox."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SUB: dict[str, Any] = {"type": "function", "name": "sub"}
OPENED = f"{THOUGHT}\n</think>\n\n"  # the prompt has begun it


class Server(NamedTuple):
    http: FlaskClient
    engine: ScriptedEngine
    tokenizer: Tokenizer

    def ask(self, given: Any = "Hello", key: str = "", **more: Any) -> dict[str, Any]:
        """The response."""
        body = {"input": given, "temperature": 0, **more}
        answer = self.http.post(PATH, json=body, headers=bearer(key))
        assert answer.status_code == 200, answer.data
        return dict(answer.get_json())

    def stream(self, given: Any = "Hello", **more: Any) -> list[dict[str, Any]]:
        """Its events."""
        body = {"input": given, "temperature": 0, "stream": True, **more}
        answer = self.http.post(PATH, json=body)
        assert answer.status_code == 200, answer.data
        return list(events_in(answer.get_data(as_text=True)))

    def begin_stream(self) -> TestResponse:
        """Whose pieces are read as they come."""
        return self.http.post(PATH, json={"input": "Hello", "stream": True}, buffered=False)

    def refused(self, given: Any = "Hello", key: str = "", **more: Any) -> tuple[int, str, str]:
        """With which status, field and code."""
        body = {"input": given, "max_output_tokens": 4, **more}
        answer = self.http.post(PATH, json=body, headers=bearer(key))
        error = answer.get_json()["error"]
        assert error["type"] == "invalid_request_error"
        return answer.status_code, error["param"], error["code"]

    @property
    def prompt(self) -> list[int]:
        """That the engine was given last."""
        return self.engine.added[-1].prompt

    @property
    def said(self) -> str:
        """The same as text."""
        return self.tokenizer.decode(self.prompt, skip_special_tokens=False)


Serve = Callable[..., Server]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def events_in(text: str) -> Iterator[dict[str, Any]]:
    """The data of each event, whose name is its type."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    for number, event in enumerate(events):
        name, data = event.removeprefix("event: ").split("\ndata: ")
        said = json.loads(data)
        assert said["type"] == name and said["sequence_number"] == number
        yield said
