"""/v1/messages with the reference model: a turn finds all of the one before it."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.http.messages_api import COUNT, ask, assistant, put_together, stream, text, user

SYSTEM = [
    text("You are Nora. The code of the north gate is 7313. " * 4, mark=True),
    text("It is Monday."),
]
WEATHER = {
    "name": "weather",
    "description": "What the weather is like.",
    "input_schema": {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["unit", "days"],
    },
}


@pytest.fixture
def http(reference_http: FlaskClient) -> FlaskClient:
    return reference_http


def read(usage: dict[str, int]) -> int:
    """Tokens of the prompt."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in names)


# The model is sure of itself: only the hot one gives tokens that its text is not encoded to.
@pytest.mark.parametrize(("temperature", "streamed"), [(0.0, True), (20.0, False)])
def test_a_turn_finds_all_of_the_one_before_it(
    http: FlaskClient, temperature: float, streamed: bool
) -> None:
    messages = [user(f"Who are you, at {temperature}?")]
    computed = None
    for turn in range(3):
        how: dict[str, Any] = {"temperature": temperature, "seed": turn, "max_tokens": 40}
        if streamed:
            answer = put_together(stream(http, *messages, system=SYSTEM, **how))
        else:
            answer = ask(http, *messages, system=SYSTEM, **how)
        usage = answer["usage"]
        counted = http.post(COUNT, json={"messages": messages, "system": SYSTEM}).get_json()
        assert counted == {"input_tokens": read(usage)}
        if computed is not None:
            assert usage["cache_read_input_tokens"] >= computed
        # The last token was sampled and never went through the model; the end token was neither.
        computed = read(usage) + usage["output_tokens"] - 1
        if answer["stop_reason"] == "end_turn":
            computed -= 1
        messages += [assistant(answer["content"]), user(f"And what then, in turn {turn}?")]


def test_what_stands_before_a_mark_is_found_by_others(http: FlaskClient) -> None:
    for pet, mark in (("cat", True), ("dog", False)):
        known = text(f"The {pet} is called Pixel, and lives in the museum. " * 4, mark=mark)
        first, other = (
            ask(http, user("Who is it?"), system=[known, text(f"{day}! " * 40)], max_tokens=1)
            for day in ("Friday", "Monday")
        )
        before, found = first["usage"], other["usage"]
        marked = before["cache_read_input_tokens"] + before["cache_creation_input_tokens"]
        if mark:
            assert before["cache_creation_input_tokens"] > 20
            assert found["cache_read_input_tokens"] == marked
        else:
            assert before["cache_creation_input_tokens"] == 0
            assert found["cache_read_input_tokens"] < 20
        assert found["cache_creation_input_tokens"] == 0


def test_a_forced_call_and_its_result_go_on(http: FlaskClient) -> None:
    asked = user("The weather?")
    how: dict[str, Any] = {"tools": [WEATHER], "temperature": 1.5, "seed": 3, "max_tokens": 200}
    forced = {"type": "tool", "name": "weather"}
    answer = ask(http, asked, tool_choice=forced, **how)
    (call,) = answer["content"]
    assert answer["stop_reason"] == "tool_use" and call["name"] == "weather"
    assert call["input"]["unit"] in ("C", "F") and 1 <= call["input"]["days"] <= 9
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "It rains."}
    chat = [asked, assistant(answer["content"]), user([result])]
    after = ask(http, *chat, tools=[WEATHER], max_tokens=8)["usage"]
    usage = answer["usage"]
    assert after["cache_read_input_tokens"] >= read(usage) + usage["output_tokens"] - 2


def test_an_answer_follows_a_schema(http: FlaskClient) -> None:
    schema = {
        "type": "object",
        "properties": {"code": {"type": "integer", "minimum": 0, "maximum": 9999}},
        "required": ["code"],
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(http, user("What is the code of the gate?"), output_config=form)
    assert answer["content"][0]["text"].startswith('{"code":')
    assert answer["stop_reason"] == "end_turn"
