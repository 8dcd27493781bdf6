"""OpenAI's `response_format`: the grammar that an answer has to follow."""

from __future__ import annotations

import json
import re

from megatron_hybrid.request import Grammar
from megatron_hybrid.server.http.field_types import JsonSchema
from megatron_hybrid.server.http.fields import BY_DEFAULT, Fields
from megatron_hybrid.server.http.json_schemas import served_schema
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.grammar import check

MAX_DESCRIPTION_LENGTH = 65_536
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ANY_OBJECT = '{"type":"object"}'


def parse_response_format(fields: Fields, options: ParseOptions = BY_DEFAULT) -> Grammar | None:
    """Takes the field out of a body; None if the answer is plain text.

    Raises InvalidRequestError; a JSON schema that cannot be followed is named with the reason.
    """
    if not fields.given("response_format"):
        fields.any("response_format")
        return None
    wanted = fields.inside(fields.object("response_format"), "response_format")
    if not wanted.given("type"):
        raise wanted.missing("type")
    kind = wanted.text("type", 64)
    if kind not in ("text", "json_object", "json_schema"):
        raise wanted.wrong_value("type", kind, "it must be text, json_object or json_schema")
    grammar: Grammar | None = None
    if kind == "json_object":
        grammar = Grammar("json_schema", _ANY_OBJECT)
    elif kind == "json_schema":
        grammar = _parse_json_schema(wanted, options)
    wanted.finish()
    return grammar


def _parse_json_schema(wanted: Fields, options: ParseOptions) -> Grammar:
    if not wanted.given("json_schema"):
        raise wanted.missing("json_schema")
    fields = wanted.inside(wanted.object("json_schema"), "response_format.json_schema")
    if not fields.given("name"):
        raise fields.missing("name")
    name = fields.text("name", 64)
    if not _NAME.fullmatch(name):
        raise fields.wrong_value(
            "name", name, "it must have from 1 to 64 letters, digits, underscores or hyphens"
        )
    # These two change nothing here: the answer follows the schema whether `strict` or not.
    fields.text("description", MAX_DESCRIPTION_LENGTH)
    fields.boolean("strict")
    text = _ANY_OBJECT
    if fields.given("schema"):
        name = fields.name("schema")
        text = json.dumps(served_schema(fields.object("schema"), name, options))
    fields.any("schema")
    fields.finish()
    grammar = Grammar("json_schema", text)
    check(grammar)
    return grammar


def response_format_schema() -> JsonSchema:
    """What `parse_response_format` accepts, as JSON Schema."""
    json_schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
            "description": {"type": ["string", "null"], "maxLength": MAX_DESCRIPTION_LENGTH},
            "schema": {
                "type": ["object", "null"],
                "description": "The answer's JSON Schema; left out: any JSON object. An object "
                "has no properties but those that its schema names, unless it says otherwise. A "
                "schema with a feature that cannot be followed is refused.",
            },
            "strict": {
                "type": ["boolean", "null"],
                "description": "Changes nothing: the answer always follows the schema.",
            },
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    plain = {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object"]}},
        "required": ["type"],
        "additionalProperties": False,
    }
    with_schema = {
        "type": "object",
        "properties": {"type": {"const": "json_schema"}, "json_schema": json_schema},
        "required": ["type", "json_schema"],
        "additionalProperties": False,
    }
    return {
        "anyOf": [plain, with_schema, {"type": "null"}],
        "description": "The answer's form, unless max_tokens cuts it short.",
    }
