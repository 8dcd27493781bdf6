"""What an answer has to look like, in vLLM's words: structured_outputs and the older guided_*."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import Grammar
from megatron_hybrid.server.http.protocol.constraints import MAX_RULES
from tests.server.fake_engine import FakeEngine
from tests.thorough import A_THIRD

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    COMPLETION: {"prompt": "Hello", "max_tokens": 4},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("named", ["structured_outputs.{}", "guided_{}"])
@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("json", SCHEMA, ("json_schema", CLOSED)),
        ("json", json.dumps(SCHEMA), ("json_schema", CLOSED)),
        ("regex", "[ab]+", ("regex", "[ab]+")),
        ("choice", ["yes", 'a "b"'], ("regex", r"yes|a\x{20}\x{22}b\x{22}")),
        ("grammar", LARK, ("lark", LARK)),
        ("grammar", GBNF, ("lark", 'start: R_ROOT_0\nR_ROOT_0: "yes" | "no"\n')),
    ],
)
def test_each_becomes_a_grammar_under_its_name(
    http: FlaskClient,
    engine: FakeEngine,
    path: str,
    named: str,
    kind: str,
    value: Any,
    wanted: tuple[str, Any],
) -> None:
    outer, _, inner = named.format(kind).partition(".")
    found = grammar(http, engine, path, {outer: {inner: value} if inner else value})
    assert (found.kind, found.field) == (wanted[0], named.format(kind))
    assert (json.loads(found.text) if kind == "json" else found.text) == wanted[1]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type":"object"}')),
        ({"response_format": {"type": "regex", "value": "a|b"}}, ("regex", "a|b")),
        ({"response_format": {"type": "grammar", "grammar": LARK}}, ("lark", LARK)),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False, "regex": None}}, None),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            ("regex", "a"),
        ),
    ],
)
def test_other_forms(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], wanted: Any
) -> None:
    found = grammar(http, engine, CHAT, fields)
    assert (None if found is None else (found.kind, found.text)) == wanted


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("older", [False, True])
def test_a_structural_tag_has_many_names(
    http: FlaskClient, engine: FakeEngine, path: str, older: bool
) -> None:
    fields = {"structures": [OLDER], "triggers": ["<"]} if older else {"format": TRIGGERED}
    for body in (
        tagged(fields),
        tag_of(fields),
        tag_of(json.dumps(fields)),
        tag_of({"type": "structural_tag", **fields}),
    ):
        found = grammar(http, engine, path, body)
        assert found is not None and found.kind == "lark"
        assert found.text.startswith('start: (r0 "call>" %json {')
        assert '"additionalProperties": false' in found.text


def test_sglangs_names(http: FlaskClient, engine: FakeEngine) -> None:
    for name, value, same in (
        ("json_schema", json.dumps(SCHEMA), "json"),
        ("json_schema", SCHEMA, "json"),
        ("regex", "[ab]+", "regex"),
        ("ebnf", GBNF, "grammar"),
    ):
        for path in BODIES:
            found = grammar(http, engine, path, {name: value})
            other = grammar(http, engine, path, {f"guided_{same}": value})
            assert found is not None and other is not None and found.field == name
            assert (found.kind, found.text) == (other.kind, other.text)


def test_schemas_inside_a_grammar_are_closed_as_others(
    http: FlaskClient, engine: FakeEngine
) -> None:
    text = f'start: "%json {{" A %json {json.dumps(SCHEMA)} // ":(\nA: /[(:"]/ '
    found = grammar(http, engine, CHAT, {"guided_grammar": text})
    assert found is not None
    assert found.text == text.replace(json.dumps(SCHEMA), json.dumps(CLOSED))


def chain(count: int, group: int = 0) -> str:
    """So many rules, each of which leads to the next one, in so many groups."""
    inner = "(" * group + 'r{} "b"' + ' | "a")' * group
    rules = [f"r{number}: {inner.format(number + 1)}" for number in range(count - 1)]
    return "\n".join(["start: r0", *rules, f'r{count - 1}: "x"'])


def references(count: int) -> str:
    chained = {
        f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(count)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**chained, f"a{count}": {"type": "string"}}})


A = {"type": "const_string", "value": "a"}
ANY, ONE_OF = {"type": "any_text"}, {"type": "or"}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
DEEP = {**JSON, "json_schema": json.loads('{"items":' * 130 + "{}" + "}" * 130)}
OLDER = {"begin": "<call>", "schema": SCHEMA, "end": "</call>"}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<"],
    "tags": [{"type": "tag", "begin": "<call>", "content": JSON, "end": "</call>"}],
}


def nested(count: int) -> dict[str, Any]:
    return json.loads('{"type":"star","content":' * count + json.dumps(A) + "}" * count)


def tagged(fields: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", **fields}}


def tag_of(fields: dict[str, Any] | str) -> dict[str, Any]:
    return {"structured_outputs": {"structural_tag": fields}}


REFUSED = [
    ("structured_outputs", {"structured_outputs": "json"}, "an object"),
    ("structured_outputs.surprise", {"structured_outputs": {"surprise": 1}}, "Unknown"),
    ("structured_outputs.structural_tag", tag_of("{}"), "needs either format or structures"),
    ("structured_outputs.structural_tag", tag_of("{"), "no JSON object"),
    ("structured_outputs.structural_tag.b", tag_of({"b": 1}), "Unknown field: structured_outputs"),
    (
        "structured_outputs.structural_tag.format.value",
        tag_of({"format": {**A, "value": 1}}),
        "is 1",
    ),
    ("response_format", tagged({"format": A, "structures": [OLDER], "triggers": ["<"]}), "either"),
    ("response_format.format.type", tagged({"format": {"type": "dispatch"}}), "any_text, const"),
    (
        "response_format.format.max_tokens",
        tagged({"format": {**ANY, "max_tokens": 5}}),
        "supported",
    ),
    (
        "response_format.format.style",
        tagged({"format": {**JSON, "style": "qwen_xml"}}),
        "supported",
    ),
    ("response_format.format", tagged({"format": {**ONE_OF, "elements": [A] * 1000}}), "too many"),
    ("response_format.format", tagged({"format": nested(65)}), "too many formats"),
    ("response_format.format", tagged({"format": nested(900)}), "too many formats"),
    (
        "response_format.format",
        tagged({"format": {"type": "sequence", "elements": [ANY, A]}}),
        "endl",
    ),
    ("response_format.format.json_schema", tagged({"format": DEEP}), "inside each other"),
    ("response_format.format", tagged({"format": {**JSON, "json_schema": {"not": {}}}}), "not"),
    (
        "response_format.format.grammar",
        tagged({"format": {"type": "grammar", "grammar": "a ::= b"}}),
        "root",
    ),
    ("response_format.structures", tagged({"structures": [OLDER]}), "0 triggers"),
    (
        "response_format.structures[0].schema",
        tagged({"structures": [{**OLDER, "schema": "["}], "triggers": ["<"]}),
        "no JSON",
    ),
    ("structured_outputs.json", {"structured_outputs": {"json": []}}, "object"),
    ("structured_outputs.json", {"structured_outputs": {"json": "[1]"}}, "no JSON object"),
    ("structured_outputs.json", {"structured_outputs": {"json": "{"}}, "no JSON object"),
    ("structured_outputs.json", {"structured_outputs": {"json": "[" * 100_000}}, "no JSON object"),
    ("structured_outputs.json", {"structured_outputs": {"json": {"type": "cat"}}}, "cat"),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "(a"}}, "unclosed"),
    ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}, "1 to"),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}, "1 to 1024"),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"] * 1025}}, "1 to 1024"),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", 1]}}, "string"),
    ("structured_outputs.choice", {"structured_outputs": {"choice": "a"}}, "list"),
    ("structured_outputs.json_object", {"structured_outputs": {"json_object": 1}}, "true"),
    ("guided_regex", {"guided_regex": "(?=a)b"}, "look-a"),
    ("guided_regex", {"guided_regex": "a" * (2**20 + 1)}, str(2**20)),
    ("guided_choice", {"guided_choice": {}}, "list"),
    ("guided_grammar", {"guided_grammar": "root ::= other"}, "names other"),
    ("guided_grammar", {"guided_grammar": "start: other"}, "other"),
    ("guided_grammar", {"guided_grammar": "start: %json {"}, "no JSON follows in line 1"),
    ("guided_grammar", {"guided_grammar": 'start: %json {"not": {}}'}, "not"),
    ("guided_grammar", {"guided_grammar": f"start: %json {references(5000)}"}, "too deep"),
    ("guided_grammar", {"guided_grammar": chain(5000)}, "5001 rules"),
    ("guided_grammar", {"guided_grammar": chain(500, 10)}, "5491 rules and groups"),
    ("guided_grammar", {"guided_grammar": 'root ::= "a"\n' * 2}, "twice"),
    ("regex", {"regex": "("}, "unclosed"),
    ("ebnf", {"ebnf": "root ::= other"}, "names other"),
    ("json_schema", {"json_schema": "[1]"}, "no JSON object"),
    ("regex", {"regex": "a", "guided_regex": "a"}, "guided_regex and regex both"),
    ("response_format.value", {"response_format": {"type": "regex"}}, "required"),
    ("response_format.value", {"response_format": {"type": "regex", "value": "["}}, "regular"),
    ("response_format.grammar", {"response_format": {"type": "grammar", "grammar": "a"}}, "gramm"),
    (
        "guided_regex",
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "response_format and guided_regex both",
    ),
    (
        "structured_outputs.choice",
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.regex and structured_outputs.choice both",
    ),
    (
        "structured_outputs.json",
        {"structured_outputs": {"json": {}}, "guided_json": {}},
        "guided_json and structured_outputs.json both",
    ),
]


@pytest.mark.parametrize(("field", "fields", "reason"), REFUSED)
def test_what_can_not_be_followed_is_refused_by_name(
    http: FlaskClient, field: str, fields: dict[str, Any], reason: str
) -> None:
    for path, body in BODIES.items():
        answer = http.post(path, json={**body, **fields})
        error = answer.get_json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert reason in error["message"] and len(error["message"]) < 1000


def test_rules_and_groups_up_to_the_limit_are_served(http: FlaskClient, engine: FakeEngine) -> None:
    for text in (chain(MAX_RULES - 1), chain(MAX_RULES // 20 - 1, 18)):
        assert grammar(http, engine, COMPLETION, {"guided_grammar": text}) is not None


def test_beside_tools_only_a_schema_goes(reference_http: FlaskClient) -> None:
    body = {**BODIES[CHAT], "tools": [TIME]}
    for fields, choice, refused in (
        ({"guided_regex": "a"}, "auto", "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA}}, "required", "structured_outputs.json"),
        ({"guided_regex": "a"}, "none", None),
        ({"structured_outputs": {"json": SCHEMA}}, "auto", None),
        (tagged({"format": A}), "auto", "response_format.format"),
        (tagged({"format": A}), "none", None),
    ):
        answer = reference_http.post(CHAT, json={**body, **fields, "tool_choice": choice})
        found = answer.get_json()
        assert (answer.status_code == 400) == (refused is not None), found
        assert refused is None or found["error"]["param"] == refused


@A_THIRD
@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"guided_choice": ["north", "north gate", "south"]}, "north( gate)?|south"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, "[0-9]{3}-[0-9]{2}"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [a-f]{4} ">"'}}, "<[a-f]{4}>"),
        ({"guided_json": SCHEMA}, r'\{"a": ?(true|false)\}'),
        (
            tagged({"format": {**TRIGGERED, "at_least_one": True, "stop_after_first": True}}),
            r'<call>\{"a": ?(true|false)\}</call>',
        ),
        ({"response_format": {"type": "grammar", "grammar": LARK}}, "yes|no"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_models_answers_match(
    reference_http: FlaskClient, path: str, fields: dict[str, Any], matches: str
) -> None:
    body = {**BODIES[path], "max_tokens": 40, "temperature": 2.0, "n": 3, "seed": 1, **fields}
    answer = reference_http.post(path, json=body).get_json()
    for choice in answer["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert re.fullmatch(matches, text) and choice["finish_reason"] == "stop"


def test_what_shows_only_in_the_engine_has_the_fields_name(reference_http: FlaskClient) -> None:
    answer = reference_http.post(COMPLETION, json={**BODIES[COMPLETION], "guided_regex": "a{0}"})
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_regex")
    assert error["message"].startswith("guided_regex holds") and "no token" in error["message"]


def grammar(
    http: FlaskClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> Grammar | None:
    """What the engine is asked to hold the answer to."""
    answer = http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.data
    return engine.added[-1].params.grammar


def test_a_models_answer_is_without_bad_words_and_of_allowed_ids(
    reference_http: FlaskClient,
) -> None:
    body = {**BODIES[CHAT], "max_tokens": 12, "temperature": 0}
    plain = said(reference_http, body)
    first, second = plain.split()[:2]
    without = said(reference_http, {**body, "bad_words": [second]})
    assert without.startswith(first) and second not in without.split()
    assert plain.split()[0] not in said(reference_http, {**body, "bad_words": [first]}).split()
    ids = reference_http.post("/tokenize", json={"prompt": "abc", "add_special_tokens": False})
    allowed = ids.get_json()["tokens"]
    answer = {**body, "allowed_token_ids": allowed, "temperature": 1, "return_token_ids": True}
    found = reference_http.post(CHAT, json=answer).get_json()["choices"][0]
    assert set(found["token_ids"]) <= set(allowed) and found["finish_reason"] == "length"


def said(http: FlaskClient, body: dict[str, Any]) -> str:
    content: str = http.post(CHAT, json=body).get_json()["choices"][0]["message"]["content"]
    return content
