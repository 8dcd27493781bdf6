"""Chats of several turns with the reference model: what the cache finds again, and tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.conftest import reference_server
from tests.thorough import A_THIRD, usually

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are Nora. The code of the north gate is 7313. " * 4}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def http(reference_http: FlaskClient) -> FlaskClient:
    return reference_http


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(http: FlaskClient, messages: list[dict[str, Any]], **more: Any) -> Any:
    answer = http.post(CHAT, json={"messages": messages, **more})
    assert answer.status_code == 200, answer.data
    return answer.get_json()


# The model is sure of itself: only the last one gives tokens that its text is not encoded to.
@pytest.mark.parametrize("temperature", usually([0.0, 20.0], [0.0, 1.5, 20.0]))
def test_a_turn_finds_all_of_the_one_before_it(http: FlaskClient, temperature: float) -> None:
    messages: list[dict[str, Any]] = [SYSTEM, user(f"Who are you, at {temperature}?")]
    computed = None
    for turn in range(4):
        answer = ask(http, messages, temperature=temperature, seed=turn, max_tokens=40)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if computed is not None:
            assert cached >= computed
        # The last token was sampled and never went through the model; the end token was neither.
        computed = usage["total_tokens"] - 1
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            computed -= 1
        messages += [choice["message"], user(f"And what then, in turn {turn}?")]


# Thoughts before the last question are kept, as they were.
KEEPS_THOUGHTS = r"""
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.reasoning_content -%}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n' -}}
{%- endif -%}
{{- message.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\n' -}}{%- endif -%}
"""


# What is wild has texts that it would not be encoded to.
@pytest.mark.parametrize("temperature", [0.0, 20.0])
def test_a_turn_finds_all_of_the_thoughts_before_it(tmp_path: Path, temperature: float) -> None:
    """The model thinks until its budget ends that; what follows is its answer."""
    (tmp_path / "template.jinja").write_text(KEEPS_THOUGHTS)
    with reference_server(tmp_path, tmp_path / "template.jinja") as (http, _):
        messages: list[dict[str, Any]] = [SYSTEM, user("Who are you?")]
        computed = 0
        for turn in range(4):
            fields = {"temperature": temperature, "seed": turn, "thinking_token_budget": 9}
            answer = ask(http, messages, min_tokens=30, max_tokens=40, **fields)
            usage, choice = answer["usage"], answer["choices"][0]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= computed
            assert choice["message"]["reasoning_content"] and choice["message"]["content"]
            computed = usage["total_tokens"] - 1 - (choice["finish_reason"] == "stop")
            messages += [choice["message"], user(f"And what then, in turn {turn}?")]


def streamed(http: FlaskClient, body: dict[str, Any]) -> dict[str, Any]:
    """The choice that the events of a stream add up to."""
    answer = http.post(CHAT, json={**body, "stream": True})
    assert answer.status_code == 200, answer.data
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    reason = None
    for event in answer.data.decode().split("\n\n"):
        if not event.startswith("data: {"):
            continue
        (choice,) = json.loads(event[6:])["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == len(message["tool_calls"])
            message["tool_calls"].append(call)
        reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}


@A_THIRD
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_answer_is_a_call_and_its_result_goes_on(
    http: FlaskClient, stream: bool, choice: Any
) -> None:
    messages: list[dict[str, Any]] = [user(f"The weather? {stream} {choice}")]
    body = {
        "messages": messages,
        "tools": [WEATHER, TIME],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1.5,
        "seed": 3,
        "max_tokens": 200,
    }
    if stream:
        answered = streamed(http, body)
    else:
        answer = ask(http, **body)
        answered = answer["choices"][0]
    assert answered["finish_reason"] == "tool_calls"
    message = answered["message"]
    assert not message["content"]
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["id"] and call["type"] == "function"
    if call["function"]["name"] == "weather":
        assert arguments["unit"] in ("C", "F") and 1 <= arguments["days"] <= 9
    else:
        assert choice == "required" and arguments["zone"] in ("UTC", "CET")
    # As clients send it back: with a content of null, and arguments as they were or respelled.
    call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    back = {**message, "content": None}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    chat = [*messages, back, result]
    after = ask(http, chat, tools=[WEATHER, TIME], temperature=0, max_tokens=8)
    before = ask(http, messages, tools=[WEATHER, TIME], temperature=0, max_tokens=1)
    prompt = before["usage"]["prompt_tokens"]
    cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > prompt  # the call's own tokens too
    if not stream:
        assert cached >= answer["usage"]["total_tokens"] - 2


def test_tools_change_no_prompt_without_them(http: FlaskClient) -> None:
    plain = http.post("/tokenize", json={"messages": [user("Hi")]}).get_json()["tokens"]
    with_none = {"messages": [user("Hi")], "tools": []}
    assert http.post("/tokenize", json=with_none).get_json()["tokens"] == plain
    with_one = {"messages": [user("Hi")], "tools": [TIME]}
    assert len(http.post("/tokenize", json=with_one).get_json()["tokens"]) > len(plain)


def test_tools_that_are_not_to_be_called_are_only_described(http: FlaskClient) -> None:
    body = {"tools": [TIME], "temperature": 0, "max_tokens": 8}
    answer = ask(http, [user("Hi, who is there?")], tool_choice="none", **body)
    assert "tool_calls" not in answer["choices"][0]["message"]
    strict = {"type": "function", "function": {**TIME["function"], "strict": True}}
    ask(http, [user("Hi")], **{**body, "tools": [strict]})


def test_allowed_ids_and_a_forced_call_do_not_go_together(http: FlaskClient) -> None:
    body = {"messages": [user("Hi")], "tools": [TIME], "allowed_token_ids": [70], "max_tokens": 4}
    refused = http.post(CHAT, json={**body, "tool_choice": "required"})
    error = refused.get_json()["error"]
    assert (refused.status_code, error["param"]) == (400, "allowed_token_ids")
    assert "does not go with tools" in error["message"]
    assert ask(http, [user("Hi")], tools=[TIME], allowed_token_ids=[70], max_tokens=4)


def test_a_form_and_a_forced_call_do_not_go_together(http: FlaskClient) -> None:
    body = {
        "messages": [user("Hi")],
        "tools": [TIME],
        "response_format": {"type": "json_object"},
        "max_tokens": 40,
        "temperature": 0,
    }
    refused = http.post(CHAT, json={**body, "tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.get_json()["error"]["param"] == "response_format"
    answered = ask(http, **body)["choices"][0]["message"]
    assert answered.get("tool_calls") or answered["content"].startswith("{")
