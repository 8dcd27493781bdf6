"""The messages of a chat, checked one by one."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.server.fields import FieldError, Fields, show
from megatron_hybrid.server.tool_calls.fields import name_results, parse_call_id, parse_calls

MAX_MESSAGES = 100_000
MAX_NAME_LENGTH = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
# What a client sends back when it repeats an answer of ours, besides role and content.
EMPTY_IN_ANSWERS = ("refusal", "function_call", "audio", "annotations")


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, with known roles and without fields that would be dropped."""
    if not fields.given("messages"):
        raise fields.missing("messages")
    messages = fields.list("messages", MAX_MESSAGES)
    if not messages:
        raise FieldError("messages", "messages is empty; it needs at least one message.")
    parsed = [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    name_results(parsed)
    return parsed


def _parse_message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(path, f"{path} is {show(value)}; it must be an object.", "invalid_type")
    fields = Fields(value, path)
    if not fields.given("role"):
        raise fields.missing("role")
    role = fields.text("role", 64)
    if role not in ROLES:
        raise fields.wrong_value("role", role, f"it must be one of {', '.join(ROLES)}")
    calls = parse_calls(fields) if role == "assistant" else []
    if not fields.given("content") and not calls:
        raise fields.missing("content")
    # Templates know the older of OpenAI's two names for the same role.
    message = {
        "role": "system" if role == "developer" else role,
        "content": _parse_content(fields),
    }
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = parse_call_id(fields)
    if fields.given("name"):
        message["name"] = fields.text("name", MAX_NAME_LENGTH)
    fields.any("name")
    fields.unsupported("tool_calls", [])
    for name in EMPTY_IN_ANSWERS:
        fields.unsupported(name, [])
    fields.finish()
    return message


def _parse_content(fields: Fields) -> Any:
    """Text, or a list of parts, which the tokenizer checks one by one."""
    content = fields.any("content")
    if content is None:  # beside tool calls
        return ""
    if not isinstance(content, (str, list)):
        raise fields.wrong_type("content", content, "a string or a list of parts")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "text":
                rest = {name: value for name, value in part.items() if name not in ("type", "text")}
                Fields(rest, f"{fields.name('content')}[{number}]").finish()
    return content
