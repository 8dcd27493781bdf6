"""Requests to the routes for tokens."""

from __future__ import annotations

import json
from typing import Any

from flask.testing import FlaskClient

GENERATE, INFER = "/generate", "/inference/v1/generate"


def generate(http: FlaskClient, prompt: Any = (5, 6, 7), **body: Any) -> Any:
    """The answer of /generate; sampling_params are greedy unless they say otherwise."""
    answer = http.post(GENERATE, json=generate_body(prompt, **body))
    assert answer.status_code == 200, answer.data
    return answer.get_json()


def generate_body(prompt: Any = (5, 6, 7), **body: Any) -> dict[str, Any]:
    """What it sends: ids or texts."""
    is_text = isinstance(prompt if isinstance(prompt, str) else prompt[0], str)
    body["text" if is_text else "input_ids"] = prompt
    return {"sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}, **body}


def sampling(**params: Any) -> dict[str, Any]:
    """Greedy, three tokens, but for what is said."""
    return {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True, **params}


def infer(http: FlaskClient, prompt: Any = (5, 6, 7), *, body: Any = None, **params: Any) -> Any:
    """The answer of /inference/v1/generate. params: of sampling."""
    answer = http.post(INFER, json=infer_body(prompt, body=body, **params))
    assert answer.status_code == 200, answer.data
    return answer.get_json()


def infer_body(prompt: Any = (5, 6, 7), *, body: Any = None, **params: Any) -> dict[str, Any]:
    """What it sends."""
    asked = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, **params}
    return {"token_ids": prompt, "sampling_params": asked, **(body or {})}


def streamed(http: FlaskClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream that has come to its end."""
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.data
    assert answer.mimetype == "text/event-stream"
    *events, last, end = answer.get_data(as_text=True).split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
