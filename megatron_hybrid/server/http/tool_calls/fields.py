"""What a request says of tools: `tools`, `tool_choice`, `parallel_tool_calls`, and in messages the
calls that were made and their results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid.server.http.field_types import AnyObject, FieldType, JsonSchema, take_all
from megatron_hybrid.server.http.field_types import schemas as schemas_of
from megatron_hybrid.server.http.fields import BY_DEFAULT, FieldError, Fields, show
from megatron_hybrid.server.http.json_schemas import served_schema
from megatron_hybrid.server.options import ParseOptions

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_DESCRIPTION_LENGTH = 65_536
MAX_ARGUMENTS_LENGTH = 2**24
MAX_ID_LENGTH = 1024
MAX_INDEX = 100_000
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,63}")
_NAME_RULE = "it must have from 1 to 64 letters, digits, _, . or -, a letter or _ first"
_WORDS = ("none", "auto", "required")
_NO_PARAMETERS: JsonSchema = {"type": "object", "properties": {}}  # what is meant by leaving out
# What clients add to messages, their parts and tools for other servers' caches.
CACHE_MARKS: dict[str, FieldType] = {
    "cache_control": AnyObject("Changes nothing: what is cached is found by itself."),
    "prompt_cache_breakpoint": AnyObject("Changes nothing: what is cached is found by itself."),
}
# What clients keep of other servers' answers, and send back.
PROVIDER_FIELDS: dict[str, FieldType] = {
    "provider_specific_fields": AnyObject("Changes nothing."),
    "extra_content": AnyObject("Changes nothing."),
}


@dataclass(frozen=True, slots=True)
class Tools:
    """descriptions: the functions, for the chat template. schemas: of their arguments, by name, as
    answers are held to them. strict: names of those whose arguments must match their schema.
    choice: none, auto, required, or the name of the one that must be called (`named`). several:
    more than one call is fine.
    """

    descriptions: list[dict[str, Any]] = field(default_factory=list)
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    choice: str = "none"
    named: bool = False
    several: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.named or self.choice == "required"

    @property
    def held(self) -> frozenset[str]:
        """Names of the functions whose arguments have to match their schema."""
        if self.named:
            return frozenset([self.choice])
        return frozenset(self.schemas) if self.forced else self.strict

    @property
    def read(self) -> bool:
        """Whether calls are looked for in the answer."""
        return self.named or self.choice != "none"


def parse_tools(fields: Fields, options: ParseOptions = BY_DEFAULT) -> Tools:
    """Take the three fields out of a body; raises FieldError naming what is wrong."""
    several = fields.boolean("parallel_tool_calls", True)
    descriptions: list[dict[str, Any]] = []
    schemas: dict[str, dict[str, Any]] = {}
    strict: set[str] = set()
    for number, value in enumerate(fields.list("tools", MAX_TOOLS)):
        path = f"tools[{number}]"
        function, is_strict = _parse_tool(fields, value, path)
        name = function["name"]
        if name in schemas:
            raise FieldError(
                f"{path}.function.name", f"{path}.function.name is {name!r} for a second time."
            )
        descriptions.append({"type": "function", "function": function})
        schemas[name] = function.get("parameters", _NO_PARAMETERS)
        if is_strict:
            strict.add(name)
    choice, named = _parse_choice(fields, schemas)
    tools = Tools(descriptions, schemas, frozenset(strict), choice, named, several)
    for number, name in enumerate(schemas):
        if name in tools.held:
            path = f"tools[{number}].function.parameters"
            schemas[name] = _held_schema(schemas[name], path, options)
    return tools


def _held_schema(schema: dict[str, Any], path: str, options: ParseOptions) -> dict[str, Any]:
    """What arguments are held to: an object, also where the schema leaves its type out."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise FieldError(f"{path}.type", f"{path}.type is {show(kind)}; arguments are an object.")
    return served_schema({"type": "object"} | schema | {"type": "object"}, path, options)


def _parse_tool(body: Fields, value: Any, path: str) -> tuple[dict[str, Any], bool]:
    """The function, as templates expect it, and whether it is strict."""
    fields = _object(body, value, path)
    _check_type(fields)
    if not fields.given("function"):
        raise fields.missing("function")
    inner = fields.inside(fields.object("function"), f"{path}.function")
    take_all(fields, CACHE_MARKS)
    fields.finish()
    function: dict[str, Any] = {"name": _parse_name(inner)}
    if inner.given("description"):
        function["description"] = inner.text("description", MAX_DESCRIPTION_LENGTH)
    inner.any("description")
    if inner.given("parameters"):
        function["parameters"] = inner.object("parameters")
    inner.any("parameters")
    is_strict = inner.boolean("strict")
    take_all(inner, CACHE_MARKS)
    inner.finish()
    return function, is_strict


def _parse_choice(fields: Fields, schemas: Mapping[str, Any]) -> tuple[str, bool]:
    """Without functions, the words that ask for none of them are accepted."""
    default = "auto" if schemas else "none"
    value = fields.any("tool_choice")
    if value is None:
        return default, False
    if isinstance(value, str):
        if value not in _WORDS:
            rule = "it must be none, auto, required or an object that names a function"
            raise fields.wrong_value("tool_choice", value, rule)
        if value == "required" and not schemas:
            raise FieldError("tool_choice", "tool_choice is 'required', but there are no tools.")
        return (value if schemas else default), False
    if not isinstance(value, dict):
        raise fields.wrong_type("tool_choice", value, "a string or an object")
    wanted = fields.inside(value, "tool_choice")
    _check_type(wanted)
    if not wanted.given("function"):
        raise wanted.missing("function")
    function = wanted.inside(wanted.object("function"), "tool_choice.function")
    wanted.finish()
    name = _parse_name(function)
    function.finish()
    if name not in schemas:
        raise FieldError(
            "tool_choice.function.name",
            f"tool_choice.function.name is {name!r}, which is not one of the tools.",
        )
    return name, True


def parse_calls(fields: Fields) -> list[dict[str, Any]]:
    """`tool_calls` of an assistant's message, with their arguments as objects, for templates."""
    path = fields.name("tool_calls")
    return [
        _parse_call(fields, value, f"{path}[{number}]")
        for number, value in enumerate(fields.list("tool_calls", MAX_CALLS))
    ]


def _parse_call(message: Fields, value: Any, path: str) -> dict[str, Any]:
    fields = _object(message, value, path)
    _check_type(fields)
    call_id = fields.text("id", MAX_ID_LENGTH)
    fields.integer("index", 0, MAX_INDEX)  # of streamed answers, which clients put together
    if not fields.given("function"):
        raise fields.missing("function")
    function = fields.inside(fields.object("function"), f"{path}.function")
    take_all(fields, PROVIDER_FIELDS)
    fields.finish()
    name = _parse_name(function)
    text = function.text("arguments", MAX_ARGUMENTS_LENGTH)
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise function.wrong_value("arguments", text, "it must be a JSON object in a string")
    take_all(function, PROVIDER_FIELDS)
    function.finish()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_call_id(fields: Fields) -> str:
    """Which call a message with the role "tool" answers."""
    if not fields.given("tool_call_id"):
        raise fields.missing("tool_call_id")
    return fields.text("tool_call_id", MAX_ID_LENGTH)


def name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result of a call its function's name, which some templates want."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _object(outer: Fields, value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        raise FieldError(path, f"{path} is {show(value)}; it must be an object.", "invalid_type")
    return outer.inside(value, path)


def _check_type(fields: Fields) -> None:
    if not fields.given("type"):
        raise fields.missing("type")
    kind = fields.any("type")
    if kind != "function":
        raise fields.wrong_value("type", kind, "only 'function' is supported")


def _parse_name(fields: Fields) -> str:
    if not fields.given("name"):
        raise fields.missing("name")
    name = fields.text("name", 64)
    if not _NAME.fullmatch(name):
        raise fields.wrong_value("name", name, _NAME_RULE)
    return name


_NAME_SCHEMA = {"type": "string", "pattern": f"^{_NAME.pattern}$"}


def _closed(properties: JsonSchema, *required: str) -> JsonSchema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def tools_schemas() -> dict[str, JsonSchema]:
    """What `parse_tools` accepts, by field, as JSON Schema."""
    marks = schemas_of(CACHE_MARKS)
    function = _closed(
        {
            "name": _NAME_SCHEMA,
            "description": {"type": ["string", "null"], "maxLength": MAX_DESCRIPTION_LENGTH},
            "parameters": {
                "type": ["object", "null"],
                "description": "JSON Schema of the arguments.",
            },
            "strict": {
                "type": ["boolean", "null"],
                "description": "The arguments always match their schema.",
            },
            **marks,
        },
        "name",
    )
    tool = _closed(
        {"type": {"const": "function"}, "function": function, **marks}, "type", "function"
    )
    named = _closed(
        {"type": {"const": "function"}, "function": _closed({"name": _NAME_SCHEMA}, "name")},
        "type",
        "function",
    )
    return {
        "tools": {
            "type": ["array", "null"],
            "items": tool,
            "maxItems": MAX_TOOLS,
            "description": "Functions that the answer may call; their names differ.",
        },
        "tool_choice": {
            "anyOf": [{"enum": [*_WORDS, None]}, named],
            "description": "Whether, or which of the tools, the answer calls.",
        },
        "parallel_tool_calls": {
            "type": ["boolean", "null"],
            "default": True,
            "description": "Whether an answer may hold more than one call.",
        },
    }


def calls_schema() -> JsonSchema:
    """What `parse_calls` accepts, as JSON Schema."""
    function = _closed(
        {
            "name": _NAME_SCHEMA,
            "arguments": {
                "type": ["string", "null"],
                "maxLength": MAX_ARGUMENTS_LENGTH,
                "description": "A JSON object in a string.",
            },
            **schemas_of(PROVIDER_FIELDS),
        },
        "name",
    )
    call = _closed(
        {
            "id": {"type": ["string", "null"], "maxLength": MAX_ID_LENGTH},
            "type": {"const": "function"},
            "index": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_INDEX},
            "function": function,
            **schemas_of(PROVIDER_FIELDS),
        },
        "type",
        "function",
    )
    return {"type": ["array", "null"], "items": call, "maxItems": MAX_CALLS}
