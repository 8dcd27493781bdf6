"""The messages of a chat, as clients send them and as chat templates want them."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_hybrid.server.http.protocol.parsing import only
from megatron_hybrid.server.http.protocol.tools import AnyObject, Call, Marked, Name

MAX_MESSAGES = 100_000
MAX_TEXT_LENGTH = 2**26
MAX_NOTES = 100_000
MAX_CALLS = 128  # in one message

LongText = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH)]
Notes = Annotated[list[Any], Meta(max_length=MAX_NOTES)]
Calls = Annotated[list[Call], Meta(max_length=MAX_CALLS)]
OnlyEmptyList = only([])  # what clients send with whatever message they repeat


class TextPart(Marked, kw_only=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class Message(Marked, tag_field="role"):
    """What every message may hold.

    name: Who wrote it, for templates that show it.
    """

    name: Name | None = None
    function_call: OnlyEmptyList | None = None
    audio: OnlyEmptyList | None = None


class _Said(Message):
    tool_calls: OnlyEmptyList | None = None
    refusal: OnlyEmptyList | None = None
    annotations: OnlyEmptyList | None = None


class SystemMessage(_Said, tag="system", kw_only=True):
    """What the model should know beforehand."""

    content: Content


class DeveloperMessage(SystemMessage, tag="developer"):
    """OpenAI's newer name of a system message."""


class UserMessage(SystemMessage, tag="user"):
    """What is asked."""


class ToolMessage(_Said, tag="tool", kw_only=True):
    """What came of a call."""

    tool_call_id: Name
    content: Content | None = None


class AssistantMessage(Message, tag="assistant"):
    """An answer that a client sends back, from here or from elsewhere.

    reasoning_content: What was thought before the answer, for templates that show it.
    reasoning: Another name of reasoning_content.
    refusal: Taken for the content if there is none.
    annotations: Changes nothing.
    reasoning_details: Changes nothing: see reasoning_content.
    thinking_blocks: Changes nothing: see reasoning_content.
    provider_specific_fields: Changes nothing.
    extra_content: Changes nothing.
    """

    content: Content | None = None
    tool_calls: Calls | None = None
    reasoning_content: LongText | None = None
    reasoning: LongText | None = None
    refusal: LongText | None = None
    annotations: Notes | None = None
    reasoning_details: Notes | None = None
    thinking_blocks: Notes | None = None
    provider_specific_fields: AnyObject | None = None
    extra_content: AnyObject | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """The conversation without what changes nothing; results of calls get their function's name,
    which some templates want."""
    called: dict[str, str] = {}
    found = []
    for message in messages:
        content: Any = message.content or ""  # nothing was said
        if not isinstance(content, str):
            content = [{"type": "text", "text": part.text} for part in content]
        role = message.__struct_config__.tag
        # Templates know the older of OpenAI's two names for the same role.
        said: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": content,
        }
        if isinstance(message, ToolMessage):
            said["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                said["name"] = called[message.tool_call_id]
        elif isinstance(message, AssistantMessage):
            _add_answer(said, message)
            for call in said.get("tool_calls", ()):
                called[call["id"]] = call["function"]["name"]
        if message.name:
            said["name"] = message.name
        found.append(said)
    return found


def _add_answer(said: dict[str, Any], message: AssistantMessage) -> None:
    if message.tool_calls:
        said["tool_calls"] = [call.for_template() for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        said["reasoning_content"] = reasoning
    if not said["content"] and message.refusal:
        said["content"] = message.refusal
