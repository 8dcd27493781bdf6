"""The items of a response's input: as clients send them, as a chat, and as they are given back."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.protocol.messages import (
    AnyMessage,
    AssistantMessage,
    LongText,
    Notes,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from megatron_hybrid.server.http.protocol.parsing import Body
from megatron_hybrid.server.http.protocol.tools import (
    AnyObject,
    Arguments,
    Call,
    CalledFunction,
    FunctionName,
    Marked,
    Name,
    Repeated,
)

MAX_ITEMS = 100_000
Status = Literal["in_progress", "completed", "incomplete"]
Listed = dict[str, Any]  # an item as it is given back
_SYSTEM = ("system", "developer")
_SEAL = "megatron-hybrid:"


class InputText(Marked, tag_field="type", tag="input_text", kw_only=True):
    """A part of what is asked, or of what came of a call."""

    text: str


class OutputText(Marked, tag_field="type", tag="output_text", kw_only=True):
    """A part of an answer that comes back.

    annotations: Changes nothing.
    logprobs: Changes nothing.
    parsed: Changes nothing: what a client has read in the text.
    """

    text: str
    annotations: Notes | None = None
    logprobs: Notes | None = None
    parsed: Any = None


class RefusalText(Body, tag_field="type", tag="refusal"):
    """Taken as the answer's text."""

    refusal: LongText

    @property
    def text(self) -> str:
        """As the other parts have it."""
        return str(self.refusal)


class SummaryText(Body):
    """A part of another server's summary of thoughts."""

    type: Literal["summary_text"]
    text: LongText


class ReasoningText(Body):
    """A part of what was thought."""

    type: Literal["reasoning_text"]
    text: LongText


Parts = list[InputText | OutputText | RefusalText]


class Item(Repeated, tag_field="type", kw_only=True):
    """What all items may have.

    id: The item's name in a response.
    status: Changes nothing.
    """

    id: Name | None = None
    status: Status | None = None


class MessageItem(Item, tag="message", kw_only=True):
    """What somebody said. `type` may be left out.

    content: Text, or its parts; pictures, sounds and files are not supported.
    phase: Changes nothing.
    """

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    phase: Name | None = None


class FunctionCallItem(Item, tag="function_call", kw_only=True):
    """A call that the model made.

    call_id: By which its output names it.
    caller: Changes nothing.
    parsed_arguments: Changes nothing: what a client has read in the arguments.
    """

    call_id: Name
    name: FunctionName
    arguments: Arguments
    caller: AnyObject | None = None
    parsed_arguments: Any = None


class FunctionCallOutputItem(Item, tag="function_call_output", kw_only=True):
    """What came of a call.

    call_id: That of the call, which stands before it.
    output: Text, or its parts; pictures and files are not supported.
    name: Changes nothing: the call has it.
    caller: Changes nothing.
    """

    call_id: Name
    output: str | list[InputText | OutputText]
    name: Name | None = None
    caller: AnyObject | None = None


class ReasoningItem(Item, tag="reasoning", kw_only=True):
    """What the model thought before its answer, for templates that show it.

    content: The thoughts.
    summary: Changes nothing: see content.
    encrypted_content: The thoughts, as this server gave them; another server's can't be read, and
        change nothing.
    """

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: LongText | None = None

    @property
    def thoughts(self) -> str:
        """In whichever form they came."""
        said = "\n".join(one.text for one in self.content or ())
        return said or _unsealed(self.encrypted_content or "")


def sealed(thoughts: str) -> str:
    """For clients that send back nothing else of thoughts. No secret: they stand beside it."""
    return _SEAL + b64encode(thoughts.encode()).decode()


def _unsealed(text: str) -> str:
    """The thoughts, or nothing if it was not made here."""
    try:
        return b64decode(text.removeprefix(_SEAL)).decode() if text.startswith(_SEAL) else ""
    except ValueError:
        return ""


class ItemReference(Body, tag_field="type", tag="item_reference"):
    """An item of a stored response.

    id: The item's.
    """

    id: Name


Saying = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
Items = Annotated[list[Saying | ItemReference], Meta(min_length=1, max_length=MAX_ITEMS)]


def with_types(given: Any) -> Any:
    """An input whose messages all say that they are messages, which clients may leave out."""
    if not isinstance(given, list):
        return given
    return [
        {**item, "type": "message"}
        if isinstance(item, dict) and "role" in item and "type" not in item
        else item
        for item in given
    ]


def read_items(data: bytes, field: str = "") -> list[Saying]:
    """From the JSON of a list, or of an object that holds them in this field."""
    values = msgspec.json.decode(data)
    items = values[field] if field else values
    return msgspec.convert(items, list[Saying], dec_hook=lambda own, value: own.read(value))


def listed(item: Saying, item_id: str) -> Listed:
    """The item as it is given back; item_id: unless it has an id."""
    tag = item.__struct_config__.tag
    shown: Listed = {"id": item.id or item_id, "type": tag, "status": item.status or "completed"}
    match item:
        case MessageItem():
            return shown | {"role": item.role, "content": _listed_parts(item)}
        case FunctionCallItem():
            arguments = json.dumps(item.arguments.values, ensure_ascii=False)
            return shown | {"call_id": item.call_id, "name": item.name, "arguments": arguments}
        case FunctionCallOutputItem():
            return shown | {"call_id": item.call_id, "output": _text(item.output)}
        case ReasoningItem():
            thoughts = [item.thoughts] if item.thoughts else []
            content = [{"type": "reasoning_text", "text": text} for text in thoughts]
            summary = [{"type": "summary_text", "text": one.text} for one in item.summary or ()]
            return shown | {"summary": summary, "content": content}


def _listed_parts(item: MessageItem) -> list[Listed]:
    texts = [item.content] if isinstance(item.content, str) else [one.text for one in item.content]
    if item.role != "assistant":
        return [{"type": "input_text", "text": text} for text in texts]
    plain: Listed = {"type": "output_text", "annotations": [], "logprobs": []}
    return [{**plain, "text": text} for text in texts]


def messages_of(
    instructions: str | None, items: Sequence[Saying], paths: Mapping[int, str]
) -> list[AnyMessage]:
    """The items as a chat, after the instructions.

    paths: by an item's number its name in the body, if it stands there. Raises InvalidRequestError
    for an output without its call.
    """
    begin = count_system(items)
    # Many templates take only one system message, at the beginning.
    texts = [instructions] if instructions else []
    texts += [_text(item.content) for item in items[:begin] if isinstance(item, MessageItem)]
    said = _Said()
    if texts:
        said.messages.append(SystemMessage(content="\n\n".join(texts)))
    for number, item in enumerate(items[begin:], start=begin):
        if isinstance(item, FunctionCallOutputItem) and item.call_id not in said.called:
            name = f"{paths.get(number, 'input')}.call_id"
            words = f"is {item.call_id!r}, which is not the call_id of a function_call before it."
            raise InvalidRequestError(name, f"{name} {words}")
        said.add(item)
    return said.messages


def count_system(items: Sequence[Saying]) -> int:
    """With how many messages of the system or a developer the items begin."""
    for number, item in enumerate(items):
        if not (isinstance(item, MessageItem) and item.role in _SYSTEM):
            return number
    return len(items)


class _Said:
    """A chat that is put together. What a response said is one message of the assistant's: its
    thoughts, its text and its calls."""

    def __init__(self) -> None:
        self.messages: list[AnyMessage] = []
        self.called: set[str] = set()  # ids of calls

    def add(self, item: Saying) -> None:
        match item:
            case MessageItem(role="assistant"):
                answer = self._answer(lambda one: not one.content or bool(one.tool_calls))
                answer.content = _text(answer.content or "") + _text(item.content)
            case MessageItem():
                kind = SystemMessage if item.role in _SYSTEM else UserMessage
                self.messages.append(kind(content=_text(item.content)))
            case FunctionCallItem():
                answer = self._answer(lambda one: True)
                function = CalledFunction(name=item.name, arguments=item.arguments)
                call = Call(type="function", id=item.call_id, function=function)
                if answer.tool_calls is None:
                    answer.tool_calls = []
                answer.tool_calls.append(call)
                self.called.add(item.call_id)
            case FunctionCallOutputItem():
                output = _text(item.output)
                self.messages.append(ToolMessage(tool_call_id=item.call_id, content=output))
            case ReasoningItem():
                answer = self._answer(lambda one: not one.content and not one.tool_calls)
                thoughts = filter(None, [answer.reasoning_content, item.thoughts])
                answer.reasoning_content = "\n".join(thoughts) or None

    def _answer(self, goes_on: Callable[[AssistantMessage], bool]) -> AssistantMessage:
        """The assistant's message that the chat ends with, if it goes on; else a new one."""
        last = self.messages[-1] if self.messages else None
        if not (isinstance(last, AssistantMessage) and goes_on(last)):
            last = AssistantMessage()
            self.messages.append(last)
        return last


def _text(content: Any) -> str:
    """Of a message or an output: a string, or parts, which stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
