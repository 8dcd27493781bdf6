"""What changes no token is taken; what is unknown is refused, or dropped if so configured."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.protocol.generation_request import parse_chat, parse_completion
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.options import (
    ParseOptions,
    ServerOptions,
)
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.test_options import parsed
from tests.text.make_tokenizers import byte_level

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
TAKEN: dict[str, Any] = {
    "metadata": {"session": "a", "turn": 3, "test": True, "nothing": None},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "safety_identifier": "somebody",
    "user": "somebody",
}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}", "provider_specific_fields": None},
}
# As clients send earlier turns back, whichever server they had them from.
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief.", **MARK}]},
    {**HELLO, **MARK},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "provider_specific_fields": {"a": 1}, "extra_content": {}}],
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    },
    {"role": "tool", "tool_call_id": "1", "content": None},
    {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Is it?",
        "reasoning_details": [{"type": "reasoning.text", "text": "Is it?"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "Is it?"}],
        "provider_specific_fields": {"refusal": None},
        "annotations": [{"type": "url_citation"}],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Why?", "prompt_cache_breakpoint": {"mode": "explicit"}}
        ],
    },
]


def last_prompt(
    http: FlaskClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> list[int]:
    answer = http.post(path, json={"max_tokens": 2, **body})
    assert answer.status_code == 200, answer.data
    return engine.added[-1].prompt


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"messages": [HELLO]}), (COMPLETION, {"prompt": "a"})]
)
def test_fields_for_the_clients_own_records_change_nothing(
    http: FlaskClient, engine: FakeEngine, path: str, asked: dict[str, Any]
) -> None:
    plain = last_prompt(http, engine, path, asked)
    params = engine.added[-1].params
    for fields in ({name: value} for name, value in TAKEN.items()):
        assert last_prompt(http, engine, path, {**asked, **fields}) == plain
        assert engine.added[-1].params == params
    assert last_prompt(http, engine, path, {**asked, **TAKEN}) == plain


def test_marks_and_what_other_servers_added_to_messages_change_nothing(
    http: FlaskClient, engine: FakeEngine
) -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    wanted = last_prompt(http, engine, CHAT, {"messages": plain})
    assert last_prompt(http, engine, CHAT, {"messages": MESSAGES, "verbosity": "low"}) == wanted


def test_marks_in_tools_are_no_part_of_the_prompt() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": {**function, **MARK}, **MARK}
    parsed = parse_chat({"messages": [HELLO], "tools": [tool]})
    assert parsed.tools.descriptions == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well."),
    ],
)
def test_an_answer_may_be_empty(message: dict[str, Any], content: str) -> None:
    parsed = parse_chat({"messages": [HELLO, {"role": "assistant", **message}]})
    assert parsed.messages[1] == {"role": "assistant", "content": content}


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_who_asks_says_something(role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\].content is required"):
            parse_chat({"messages": [message]})


def test_the_template_gets_the_effort_and_what_was_thought() -> None:
    hf = byte_level()
    hf.chat_template = (
        "{{ reasoning_effort | default('none') }}:"
        "{% for message in messages %}{% if message.reasoning_content %}"
        "({{ message.reasoning_content }}){% endif %}{{ message.content }};{% endfor %}"
    )
    tokenizer = Tokenizer(hf)

    def rendered(body: dict[str, Any]) -> str:
        parsed = parse_chat({"messages": MESSAGES, **body})
        return tokenizer.decode(tokenizer.encode_chat(parsed.messages, parsed.template_arguments))

    chat = "Be brief.;Hello;;;(Is it?)Yes.;Why?;"
    assert rendered({}) == f"none:{chat}"
    assert rendered({"reasoning_effort": "high"}) == f"high:{chat}"
    own = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert rendered(own) == f"low:{chat}"
    thought = {"role": "assistant", "content": "a", "reasoning": "b"}
    assert rendered({"messages": [thought]}) == "none:(b)a;"


# A name at each place where a body has names.
UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    ("surprise", {"surprise": 1}),
    ("stream_options.surprise", {"stream": True, "stream_options": {"surprise": 1}}),
    ("response_format.surprise", {"response_format": {"type": "text", "surprise": 1}}),
    (
        "response_format.json_schema.surprise",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "surprise": 1}}},
    ),
    ("messages[0].surprise", {"messages": [{**HELLO, "surprise": 1}]}),
    (
        "messages[0].content[0].surprise",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "surprise": 1}]}]},
    ),
    (
        "messages[0].tool_calls[0].surprise",
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "surprise": 1}]}]},
    ),
    (
        "messages[0].tool_calls[0].function.surprise",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "f", "surprise": 1}}],
                }
            ]
        },
    ),
    (
        "tools[0].surprise",
        {"tools": [{"type": "function", "function": {"name": "f"}, "surprise": 1}]},
    ),
    (
        "tools[0].function.surprise",
        {"tools": [{"type": "function", "function": {"name": "f", "surprise": 1}}]},
    ),
]


@pytest.mark.parametrize(("name", "fields"), UNKNOWN)
def test_an_unknown_field_is_refused_or_dropped(name: str, fields: dict[str, Any]) -> None:
    body = {"messages": [HELLO], **fields}
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(body)
    assert (caught.value.field, str(caught.value)) == (name, f"Unknown field: {name}.")
    dropped = parse_chat(body, ParseOptions(ignore_unknown_fields=True))
    assert dropped == parse_chat(without(body, "surprise"))


def without(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [without(one, name) for one in value]
    if isinstance(value, dict):
        return {key: without(one, name) for key, one in value.items() if key != name}
    return value


def test_what_is_known_and_wrong_or_not_supported_is_refused_all_the_same() -> None:
    lenient = ParseOptions(ignore_unknown_fields=True)
    for body, field in (
        ({"messages": [HELLO], "temperature": "hot"}, "temperature"),
        ({"messages": [HELLO], "modalities": ["audio"]}, "modalities"),
        ({"messages": [HELLO], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [{**HELLO, "audio": {}}]}, "messages[0].audio"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat(body, lenient)
        assert caught.value.field == field
    with pytest.raises(InvalidRequestError):
        parse_completion({"prompt": "a", "best_of": 2}, lenient)


def test_the_flags_reach_every_route(
    running: RunningLoop, tokenizer: Tokenizer, engine: FakeEngine, options: ServerOptions
) -> None:
    lenient = dataclasses.replace(options, ignore_unknown_fields=True, close_json_objects=False)
    http = create_app(Serving(running.engines, tokenizer, lenient)).test_client()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for path, asked in ((CHAT, {"messages": [HELLO]}), (COMPLETION, {"prompt": "a"})):
        last_prompt(http, engine, path, {**asked, "surprise": 1, "response_format": wanted})
        grammar = engine.added[-1].params.grammar
        assert grammar is not None and json.loads(grammar.text) == schema
    for body in ({"prompt": "a", "surprise": 1}, {"messages": [HELLO], "surprise": 1}):
        assert http.post("/tokenize", json=body).status_code == 200


def test_tokenize_takes_the_effort_as_a_chat_does(http: FlaskClient) -> None:
    body = {"messages": [HELLO], "reasoning_effort": "high"}
    assert http.post("/tokenize", json=body).status_code == 200


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], ParseOptions()),
        (["--no-close-json-objects"], ParseOptions(close_json_objects=False)),
        (["--ignore-unknown-fields"], ParseOptions(ignore_unknown_fields=True)),
    ],
)
def test_the_flags_say_how_bodies_are_read(flags: list[str], wanted: ParseOptions) -> None:
    _, options, _ = parsed(*flags)
    for parsing in (options, pickle.loads(pickle.dumps(options))):  # another process parses too
        assert parsing.close_json_objects == wanted.close_json_objects
        assert parsing.ignore_unknown_fields == wanted.ignore_unknown_fields
