"""What is wrong with a body is said with the field's name, its value and its rule."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.protocol import requests
from megatron_hybrid.server.http.protocol.generation_request import parse_chat
from megatron_hybrid.server.http.protocol.parsing import (
    Unsupported,
    field_descriptions,
    parse_body,
    show,
)
from megatron_hybrid.server.options import ParseOptions

HELLO = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "[]"}}
LENIENT = ParseOptions(ignore_unknown_fields=True)


@pytest.mark.parametrize("options", [ParseOptions(), LENIENT])
@pytest.mark.parametrize(
    ("fields", "field", "code", "sentence"),
    [
        ({"n": 0}, "n", "invalid_value", "n is 0; it must be a whole number from 1 to 128."),
        ({"n": 2.0}, "n", "invalid_type", "n is 2.0; it must be a whole number from 1 to 128."),
        (
            {"temperature": True},
            "temperature",
            "invalid_type",
            "temperature is true; it must be a number from 0 to 100.",
        ),
        (
            {"timeout": 0},
            "timeout",
            "invalid_value",
            "timeout is 0; it must be a number above 0 and at most 86400.",
        ),
        # An entry of a list is shown; the field is the list.
        (
            {"stop": ["a", ""]},
            "stop",
            "invalid_value",
            'stop[1] is ""; it must be a string of 1 to 1024 characters.',
        ),
        (
            {"logit_bias": {"7": 1, "50": 101, "51": 102}},
            "logit_bias.50",
            "invalid_value",
            "logit_bias.50 is 101; it must be a number from -100 to 100.",
        ),
        (
            {"logit_bias": {"+7": 1}},
            "logit_bias",
            "invalid_value",
            'logit_bias is {"+7": 1}; each of its keys must be a whole number from 0 to '
            "2147483647.",
        ),
        ({"messages": None}, "messages", "missing_required_parameter", "messages is required."),
        (
            {"messages": [HELLO, {"role": "user", "content": [{"type": "text"}]}]},
            "messages[1].content[0].text",
            "missing_required_parameter",
            "messages[1].content[0].text is required.",
        ),
        (
            {"messages": [HELLO, 5]},
            "messages[1]",
            "invalid_type",
            "messages[1] is 5; it must be an object.",
        ),
        (
            {"messages": [{"role": "robot"}]},
            "messages[0].role",
            "invalid_value",
            'messages[0].role is "robot"; it must be system, developer, user, assistant or tool.',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
            'messages[0].tool_calls[0].function.arguments is "[]"; it must be a JSON object in a '
            "string.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f\n"}}]},
            "tools[0].function.name",
            "invalid_value",
            'tools[0].function.name is "f\\n"; it must be a string that matches '
            "^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}$.",
        ),
        (
            {"best_of": True},
            "best_of",
            "unsupported_parameter",
            "best_of is not supported yet; leave it out.",
        ),
    ],
)
def test_a_complaint_names_field_value_and_rule(
    fields: dict[str, Any], field: str, code: str, sentence: str, options: ParseOptions
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": [HELLO], **fields}, options)
    assert (caught.value.field, caught.value.code, str(caught.value)) == (field, code, sentence)


@pytest.mark.parametrize(
    "name", ["a b", "", "x` - at `$.n[99]", "\n`", "x` - at `$.messages[0]", ".a"]
)
def test_an_unknown_field_may_have_any_name(name: str) -> None:
    for body, path in (
        ({"messages": [HELLO], name: 1}, ""),
        ({"messages": [{**HELLO, name: 1}]}, "messages[0]."),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat(body)
        assert caught.value.field == path + name


def test_a_long_value_is_cut_short_without_being_written_out() -> None:
    assert show({"a": [1, "b", None]}) == '{"a": [1, "b", null]}'
    shown = show([[1] * 1000] * 1000)
    assert len(shown) == 60 and shown.startswith("[[1, 1,") and shown.endswith("...")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep).startswith("[[[")


def test_numbers_that_json_does_not_have_are_wrong_where_they_stand() -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400):
        values = parse_body(b'{"temperature": %s}' % number.encode())
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat({"messages": [HELLO], **values})
        assert caught.value.field == "temperature"


def test_seeds_beyond_what_msgspec_can_limit_are_checked() -> None:
    for seed in (-(2**63), 2**63, 2**64 - 1):
        values = parse_body(json.dumps({"messages": [HELLO], "seed": seed}).encode())
        assert parse_chat(values).generation.params.seed == seed
    for seed in (-(2**63) - 1, 2**64, 10**30):
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat({"messages": [HELLO], "seed": seed})
        assert caught.value.field == "seed"


def test_every_field_of_a_request_for_answers_is_described_unless_it_is_not_supported() -> None:
    for kind in (requests.ChatRequest, requests.CompletionRequest):
        plain = {
            field.name
            for field in msgspec.structs.fields(kind)
            if not any(
                isinstance(part, type) and issubclass(part, Unsupported)
                for part in get_args(field.type)
            )
        }
        assert set(field_descriptions(kind)) == plain - {"messages"}
