"""Conversations with the reference model: what the cache finds again."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.http.responses.responding import PATH
from tests.thorough import usually

RULES = "You are Nora. The code of the north gate is 7313. " * 4
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
    },
}


def ask(http: FlaskClient, given: Any, **more: Any) -> dict[str, Any]:
    body = {"input": given, "instructions": RULES, "max_output_tokens": 24, **more}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.data
    return dict(answer.get_json())


def computed(response: dict[str, Any]) -> int:
    """Tokens that the next turn finds: the last one was sampled, and never went through the model;
    the one that ended the answer neither."""
    ended = response["status"] == "completed"
    return int(response["usage"]["total_tokens"]) - 1 - ended


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


# At the higher temperature there are tokens that their text is not encoded to.
@pytest.mark.parametrize(
    ("temperature", "by_id"),
    usually([(20.0, True), (0.0, False)], [(t, by_id) for t in (0.0, 20.0) for by_id in (0, 1)]),
)
def test_a_turn_skips_all_but_its_new_tokens(
    reference_http: FlaskClient, temperature: float, by_id: bool
) -> None:
    items: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None
    for turn in range(3):
        question = {"role": "user", "content": f"And in turn {turn}, at {temperature}, {by_id}?"}
        items.append(question)
        more: dict[str, Any] = {"temperature": temperature, "seed": turn}
        if before is not None and by_id:
            response = ask(reference_http, [question], previous_response_id=before["id"], **more)
        else:
            response = ask(reference_http, items, **more)
        if before is not None:
            assert cached(response) >= computed(before)
        items += response["output"]
        before = response


def test_a_calls_own_tokens_are_found_again(reference_http: FlaskClient) -> None:
    tools: dict[str, Any] = {"tools": [WEATHER], "seed": 3, "max_output_tokens": 60}
    first = ask(reference_http, "The weather?", tool_choice="required", **tools)
    (call,) = first["output"]
    assert call["type"] == "function_call"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It rains."}
    second = ask(reference_http, [result], previous_response_id=first["id"], **tools)
    assert cached(second) >= computed(first)
