"""The messages of a chat, checked one by one."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.server.http.field_types import (
    AnyList,
    FieldType,
    Text,
    Unsupported,
    take_all,
)
from megatron_hybrid.server.http.fields import FieldError, Fields, show
from megatron_hybrid.server.http.request_fields import TEMPLATE
from megatron_hybrid.server.http.tool_calls.fields import (
    CACHE_MARKS,
    PROVIDER_FIELDS,
    name_results,
    parse_call_id,
    parse_calls,
)

MAX_MESSAGES = 100_000
MAX_NAME_LENGTH = 1024
MAX_TEXT_LENGTH = 2**26
MAX_NOTES = 100_000
ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_BE_EMPTY = ("assistant", "tool")  # what they say may be nothing
# Of a message, whoever wrote it.
SHARED: dict[str, FieldType] = {
    "name": Text(MAX_NAME_LENGTH, "Who wrote it, for templates that show it."),
    **CACHE_MARKS,
}
# What a client sends back when it repeats an answer, from here or from elsewhere.
OF_ANSWERS: dict[str, FieldType] = {
    "reasoning_content": Text(
        MAX_TEXT_LENGTH, "What was thought before the answer, for templates that show it."
    ),
    "reasoning": Text(MAX_TEXT_LENGTH, "Another name of reasoning_content."),
    "refusal": Text(MAX_TEXT_LENGTH, "Taken for the content if there is none."),
    "annotations": AnyList(MAX_NOTES, "Changes nothing."),
    "reasoning_details": AnyList(MAX_NOTES, "Changes nothing: see reasoning_content."),
    "thinking_blocks": AnyList(MAX_NOTES, "Changes nothing: see reasoning_content."),
    "function_call": Unsupported([]),
    "audio": Unsupported([]),
    **PROVIDER_FIELDS,
}
# Clients send these with whatever message they repeat.
EMPTY_ELSEWHERE: dict[str, FieldType] = {
    name: Unsupported([])
    for name in ("tool_calls", "refusal", "annotations", "function_call", "audio")
}


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, with known roles and without fields that would be dropped."""
    if not fields.given("messages"):
        raise fields.missing("messages")
    messages = fields.list("messages", MAX_MESSAGES)
    if not messages:
        raise FieldError("messages", "messages is empty; it needs at least one message.")
    parsed = [
        _parse_message(fields, message, f"messages[{i}]") for i, message in enumerate(messages)
    ]
    name_results(parsed)
    return parsed


def parse_template_arguments(fields: Fields) -> dict[str, Any]:
    """The variables that a request gives its chat's template."""
    own = take_all(fields, TEMPLATE)
    arguments: dict[str, Any] = own["chat_template_kwargs"]
    if own["reasoning_effort"]:
        return {"reasoning_effort": own["reasoning_effort"], **arguments}
    return arguments


def _parse_message(body: Fields, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(path, f"{path} is {show(value)}; it must be an object.", "invalid_type")
    fields = body.inside(value, path)
    if not fields.given("role"):
        raise fields.missing("role")
    role = fields.text("role", 64)
    if role not in ROLES:
        raise fields.wrong_value("role", role, f"it must be one of {', '.join(ROLES)}")
    if not fields.given("content") and role not in MAY_BE_EMPTY:
        raise fields.missing("content")
    # Templates know the older of OpenAI's two names for the same role.
    message = {
        "role": "system" if role == "developer" else role,
        "content": _parse_content(fields),
    }
    if role == "tool":
        message["tool_call_id"] = parse_call_id(fields)
    if fields.are_taken:  # most of many messages
        return message
    if role == "assistant":
        _parse_answer(fields, message)
    else:
        take_all(fields, EMPTY_ELSEWHERE)
    if name := take_all(fields, SHARED)["name"]:
        message["name"] = name
    fields.finish()
    return message


def _parse_answer(fields: Fields, message: dict[str, Any]) -> None:
    """What an assistant's message may hold besides its content."""
    if calls := parse_calls(fields):
        message["tool_calls"] = calls
    own = take_all(fields, OF_ANSWERS)
    if reasoning := own["reasoning_content"] or own["reasoning"]:
        message["reasoning_content"] = reasoning
    if not message["content"] and own["refusal"]:
        message["content"] = own["refusal"]


def _parse_content(fields: Fields) -> Any:
    """Text, or a list of parts, which the tokenizer checks one by one."""
    content = fields.any("content")
    if content is None:  # nothing was said
        return ""
    if not isinstance(content, (str, list)):
        raise fields.wrong_type("content", content, "a string or a list of parts")
    if isinstance(content, list):
        return [
            _parse_part(fields, part, f"{fields.name('content')}[{number}]")
            for number, part in enumerate(content)
        ]
    return content


def _parse_part(message: Fields, part: Any, path: str) -> Any:
    """A part of text without its marks; other kinds are left for the tokenizer to refuse."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return part
    plain = {name: part[name] for name in ("type", "text") if name in part}
    others = message.inside({name: part[name] for name in part if name not in plain}, path)
    take_all(others, CACHE_MARKS)
    others.finish()
    return plain
