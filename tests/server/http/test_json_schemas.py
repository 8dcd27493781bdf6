"""What answers are held to: objects end, and what can't be served is refused with its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar
from megatron_hybrid.server.http.json_schemas import LARGEST_INTEGER, MAX_DEPTH, served_schema
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.grammar import GrammarCompiler, check
from megatron_hybrid.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
OPEN = ParseOptions(close_json_objects=False)
INTEGER = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
NODE: dict[str, Any] = {
    "allOf": [
        {"$ref": "#/$defs/a"},
        {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
    ]
}
# Schema, answers that match it, answers that do not.
CLOSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (A, ['{"a": 1}'], ['{"a": 1, "b": 2}', "{}"]),
    ({**A, "additionalProperties": True}, ['{"a": 1, "b": "x"}'], []),
    ({**A, "additionalProperties": INTEGER}, ['{"a": 1, "b": 2}'], ['{"a": 1, "b": "x"}']),
    ({**A, "unevaluatedProperties": True}, ['{"a": 1, "b": 2}'], []),
    ({**A, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    ({"type": "object"}, ['{"a": 1}', "{}"], ["5"]),
    ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    ({"type": ["object", "null"], "properties": {"a": True}}, ["null", '{"a": []}'], ['{"b": 1}']),
    (
        {"properties": {"a": INTEGER}, "patternProperties": {"^x": INTEGER}},
        ['{"a": 1, "x1": 2}'],
        ['{"a": 1, "y": 2}'],
    ),
    # Inside others.
    (
        {"type": "object", "properties": {"o": A, "l": {"type": "array", "items": A}}},
        ['{"o": {"a": 1}, "l": [{"a": 1}]}'],
        ['{"o": {"a": 1, "b": 1}}', '{"l": [{"a": 1, "b": 1}]}'],
    ),
    ({"type": "array", "prefixItems": [A]}, ['[{"a": 1}]'], ['[{"a": 1, "b": 1}]']),
    ({"additionalProperties": A}, ['{"k": {"a": 1}}'], ['{"k": {"a": 1, "b": 1}}']),
    ({"anyOf": [A, B, {"type": "null"}]}, ['{"b": 1}', "null"], ['{"a": 1, "b": 1}']),
    ({"oneOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
    ({"$ref": "#/$defs/a", "$defs": {"a": A}}, ['{"a": 1}'], ['{"a": 1, "b": 1}']),
    # Several parts of one object.
    ({"allOf": [A, B]}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}']),
    ({"allOf": [A, B], "additionalProperties": True}, ['{"a": 1, "b": 2, "c": 3}'], []),
    ({"allOf": [A], "title": "one"}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    (
        {"$ref": "#/definitions/a", "properties": B["properties"], "definitions": {"a": A}},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1, "c": 2}'],
    ),
    (
        {
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/a"}, "both": {"allOf": [NODE["allOf"][0], B]}},
            "$defs": {"a": A, "copy0": B},
        },
        ['{"one": {"a": 1}, "both": {"a": 1, "b": 2}}'],
        ['{"one": {"a": 1, "b": 2}}', '{"both": {"a": 1, "b": 2, "c": 3}}'],
    ),
    (
        {"$ref": "#/$defs/n", "$defs": {"a": A, "n": NODE}},
        ['{"a": 1, "of": [{"a": 2, "of": []}]}'],
        ['{"a": 1, "of": [{"a": 2, "b": 3}]}', '{"a": 1, "b": 2}'],
    ),
    (
        {**A, "anyOf": [B, {"properties": {"c": INTEGER}, "required": ["c"]}]},
        ['{"a": 1, "b": 2}', '{"a": 1, "c": 2}'],
        ['{"a": 1}', '{"a": 1, "b": 2, "d": 3}'],
    ),
    (
        {"properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["b"]}]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"b": 2, "c": 3}'],
    ),
    (
        {
            "$id": "https://x.y/z",
            "allOf": [{"$ref": "https://x.y/z#/$defs/a"}, B],
            "$defs": {"a": A},
        },
        ['{"a": 1, "b": 2}'],
        ['{"a": 1, "b": 2, "c": 3}'],
    ),
    # The whole, from within.
    (
        {"type": "object", "properties": {"l": {"type": "array", "items": {"$ref": "#"}}}},
        ['{"l": [{"l": []}]}'],
        ['{"l": [{"m": 1}]}'],
    ),
    # Data that look like schemas, and names that look like keywords.
    ({"const": {"properties": {"a": 1}}}, ['{"properties": {"a": 1}}'], []),
    ({"enum": [{"properties": {"a": 1}}]}, ['{"properties": {"a": 1}}'], []),
    (
        {"type": "object", "properties": {"default": INTEGER, "properties": A, "$ref": INTEGER}},
        ['{"default": 1, "properties": {"a": 1}, "$ref": 2}'],
        ['{"properties": {"a": 1, "b": 1}}'],
    ),
    # Notes, which change nothing.
    (
        {
            "type": "object",
            "properties": {
                "p": {"type": "string", "format": "path"},
                "l": {"type": "array", "uniqueItems": False},
            },
        },
        ['{"p": "a", "l": [1, 1]}'],
        [],
    ),
    # Digits end, unless the schema says otherwise.
    (INTEGER, [str(LARGEST_INTEGER), str(-LARGEST_INTEGER)], ["1" * 20]),
    ({**INTEGER, "minimum": 5, "maximum": 2**63 - 1}, [str(2**63 - 1), "5"], ["4", "1" * 20]),
    ({**INTEGER, "maximum": 10**30}, ["1" * 19], []),
    ({"type": ["integer", "number"]}, ["1" * 25], []),
]


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(
        tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_ids
    )


def allows(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, text: str) -> bool:
    """Whether an answer that is held to the schema may be this text."""
    matcher = compiler.answer(compiler.matcher(Grammar("json_schema", json.dumps(schema))))
    for token in [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]:
        if matcher.is_complete:
            return token == tokenizer.eos_token_ids[0]
        if not matcher.allowed()[token >> 3] >> (token & 7) & 1:
            return False
        matcher.advance(token)
    return True


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED)
def test_an_object_has_the_properties_that_its_schema_names(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    before = json.dumps(schema)
    served = served_schema(schema, "schema", ParseOptions())
    assert json.dumps(schema) == before, "the client's own goes to the chat template"
    for text in good:
        assert allows(compiler, tokenizer, served, text), text
    for text in bad:
        assert not allows(compiler, tokenizer, served, text), text


def test_the_letter_of_the_standard_is_there_on_request(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for schema, text in (
        (A, '{"a": 1, "b": 2}'),
        ({"allOf": [A, B]}, '{"a": 1, "b": 2, "c": 3}'),
        (INTEGER, "1" * 25),
    ):
        served = served_schema(schema, "schema", OPEN)
        assert served == schema
        assert allows(compiler, tokenizer, served, text)


def chain(link: Any, length: int) -> dict[str, Any]:
    """Each definition holds the next one, somewhere in what `link` makes of a reference."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": A}}


def nested(depth: int) -> Any:
    return {"items": nested(depth - 1)} if depth else {}


SPELLINGS = ["%61" * i + "a" * (100 - i) for i in range(100)]
MANY = {"properties": {f"p{i}": True for i in range(3000)}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} lists and objects"),
        # llguidance follows these until its stack is full, which ends the process.
        (chain(lambda one: one, 5000), r"references (\$ref)"),
        (chain(lambda one: {"properties": {"p": one}}, 1000), r"references (\$ref)"),
        (chain(lambda one: {"anyOf": [{"properties": {"p": one}}]}, 600), r"references (\$ref)"),
        (chain(lambda one: {"items": [{"$ref": "#/$defs/d0"}, one]}, 600), r"references (\$ref)"),
        # Small bodies that would be large schemas.
        (
            {
                "properties": {f"p{i}": {"allOf": [{"$ref": "#/$defs/m"}, A]} for i in range(100)},
                "$defs": {"m": MANY},
            },
            "too large",
        ),
        (
            {
                "properties": {
                    spelling: {"allOf": [{"$ref": f"#/$defs/{spelling}"}, A]}
                    for spelling in SPELLINGS
                },
                "$defs": {"a" * 100: MANY},
            },
            "too large",
        ),
    ],
)
def test_a_schema_that_would_take_all_the_stack_or_memory_is_refused(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match="^schema ") as caught:
        served_schema(schema, "schema", ParseOptions())
    assert reason.replace("\\", "") in str(caught.value)


def test_references_may_lead_deep_and_in_circles() -> None:
    for schema in (
        chain(lambda one: {"properties": {"p": one}}, 200),
        {"anyOf": [{"$ref": f"#/$defs/{i}/{j}"} for i in (0, 1) for j in (0, 1)]}
        | {"$defs": {"0": [{"$ref": "#"}, A], "1": [{"items": {"$ref": "#/$defs/0/0"}}, B]}},
    ):
        check(Grammar("json_schema", json.dumps(served_schema(schema, "schema", ParseOptions()))))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"allOf": [{"$ref": "#"}, A]}, "a $ref to what it stands in itself has other keywords"),
        ({"$ref": "#/$defs/x"}, "$ref names '#/$defs/x', which is not in it"),
        ({"$ref": "https://x.y/z.json"}, "'https://x.y/z.json', and nothing outside the schema"),
        ({"$ref": "other.json"}, "'other.json', and nothing outside the schema"),
        ({"not": INTEGER}, 'it uses "not", which is not supported'),
        ({"if": A, "then": B}, 'it uses "if", "then", which is not supported'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems", which is not supported'),
        ({"propertyNames": {"pattern": "^a"}}, '"propertyNames", which is not supported'),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "could match several branches of a oneOf"),
        ({"enum": []}, "an enum, a type or an anyOf in it is empty"),
        ({"type": []}, "an enum, a type or an anyOf in it is empty"),
        ({"anyOf": []}, "an enum, a type or an anyOf in it is empty"),
        ({**INTEGER, "minimum": 5, "maximum": 2}, "nothing can match it: minimum (5) is greater"),
        ({"type": "string", "enum": [5]}, "nothing can match it"),
        ({**A, "required": ["z"]}, "nothing can match it: required property 'z'"),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {**INTEGER, "minimum": 5, "maximum": 2}}},
            "nothing can match it: minimum (5) is greater than maximum (2) (in #/$defs/x)",
        ),
        ({**INTEGER, "minimum": 10**30}, "the range of an integer in it lies beyond 64 bits"),
        ({"type": "number", "multipleOf": 0}, "multipleOf must be more than 0"),
        ({"type": "colour"}, "colour"),
        ({"properties": []}, "properties must be an object"),
        ({"properties": {"a": 1}}, "schema must be an object or boolean"),
        ({"allOf": 5}, "allOf must be an array"),
        ({"required": "a"}, "Expected array for 'required'"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
    ],
)
def test_a_schema_that_can_not_be_served_is_refused_with_the_cause(
    http: FlaskClient, schema: dict[str, Any], reason: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "Hello"}]
    answer = http.post(CHAT, json={"messages": messages, "response_format": wanted})
    assert answer.status_code == 400
    error = answer.get_json()["error"]
    assert error["param"] == "response_format"
    assert reason in error["message"]


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}]
)
def test_a_schema_of_nothing_but_references_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    served = served_schema(schema, "schema", ParseOptions())
    with pytest.raises(InvalidRequestError, match="lead to nothing but each other"):
        compiler.matcher(Grammar("json_schema", json.dumps(served)))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": None},
        {"enum": [1, "a", None, {"a": [1]}]},
        {"type": ["string", "null"]},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": INTEGER, "maxItems": 10**6},
        {"type": "number", "multipleOf": 0.01},
        {"$schema": "http://json-schema.org/draft-07/schema#", **A},
        {"type": "string", "x-note": 1, "format": "password"},
    ],
)
def test_less_common_schemas_are_served(http: FlaskClient, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": "Hello", "max_tokens": 2, "response_format": wanted}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_the_small_model_ends_its_objects(reference_http: FlaskClient) -> None:
    """Without closing and bounds, each of these went on until max_tokens."""
    question = "The code of the gate is 7315. What is the code of the gate?"
    schema = {"type": "object", "properties": {"code": INTEGER}, "required": ["code"]}
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 96}
    function = {"name": "Code", "parameters": schema}
    for asked in (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "C", "schema": schema},
            }
        },
        {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "Code"}},
        },
    ):
        answer = reference_http.post(CHAT, json={**body, **asked})
        assert answer.status_code == 200, answer.data
        (choice,) = answer.get_json()["choices"]
        message = choice["message"]
        text = message["content"]
        if "tools" in asked:
            text = message["tool_calls"][0]["function"]["arguments"]
        assert choice["finish_reason"] in ("stop", "tool_calls")
        assert set(json.loads(text)) == {"code"}


@pytest.mark.parametrize("bounds", [{}, {"minimum": 1}])
def test_many_integers_are_one_for_the_grammar(bounds: dict[str, int]) -> None:
    schema = {"type": "object", "properties": {f"n{i}": {**INTEGER, **bounds} for i in range(900)}}
    served = served_schema(schema, "schema", ParseOptions())
    assert len(served["$defs"]) == 1
    check(Grammar("json_schema", json.dumps(served)))


def test_a_schema_that_shows_in_use_that_it_is_too_large_is_the_requests_fault(
    reference_http: FlaskClient,
) -> None:
    """Of 600 names, any of which may come first."""
    properties = {f"name_{number}": {"type": "integer"} for number in range(1500)}
    schema = {"name": "a", "schema": {"type": "object", "properties": properties}}
    answer = reference_http.post(
        CHAT,
        json={
            "messages": [{"role": "user", "content": "Hello"}],
            "response_format": {"type": "json_schema", "json_schema": schema},
        },
    )
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert "can't go on in its grammar" in error["message"]
