"""What the routes of /v1/responses answer, and the events of a stream, named as in OpenAI's API."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Literal

from megatron_hybrid.server.http.protocol.answers import ChosenToken, Count, optional, shape, tagged
from megatron_hybrid.server.http.protocol.tools import AnyObject

_LOGPROBS = list[ChosenToken]  # empty unless include asks for them
_ITEM: dict[str, Any] = {"id": str, "status": Literal["in_progress", "completed", "incomplete"]}
_CALL: dict[str, Any] = {**_ITEM, "call_id": str, "name": str, "arguments": str}

OutputPart = tagged(
    "OutputPart", "output_text", text=str, annotations=list[AnyObject], logprobs=_LOGPROBS
)
ReasoningPart = tagged("ReasoningPart", "reasoning_text", text=str)
SummaryPart = tagged("SummaryPart", "summary_text", text=str)
InputPart = tagged("InputPart", "input_text", text=str)

OutputReasoning = tagged(
    "OutputReasoning",
    "reasoning",
    **_ITEM,
    summary=list[SummaryPart],
    content=list[ReasoningPart],
    # Only where include asks for it, and where the response is not stored.
    encrypted_content=optional(str),
)
OutputCall = tagged("OutputCall", "function_call", **_CALL)
OutputMessage = tagged(
    "OutputMessage", "message", **_ITEM, role=Literal["assistant"], content=list[OutputPart]
)
OutputItem = OutputReasoning | OutputMessage | OutputCall

ListedMessage = tagged(
    "ListedMessage",
    "message",
    **_ITEM,
    role=Literal["user", "assistant", "system", "developer"],
    content=list[InputPart | OutputPart],
)
ListedOutput = tagged("ListedOutput", "function_call_output", **_ITEM, call_id=str, output=str)
ItemList = shape(
    "ItemList",
    object=Literal["list"],
    data=list[ListedMessage | OutputReasoning | OutputCall | ListedOutput],
    first_id=str,
    last_id=str,
    has_more=bool,
)

ResponseUsage = shape(
    "ResponseUsage",
    input_tokens=Count,
    input_tokens_details=shape("InputDetails", cached_tokens=Count, cache_write_tokens=Count),
    output_tokens=Count,
    output_tokens_details=shape("OutputDetails", reasoning_tokens=Count),
    total_tokens=Count,
)
UsedTool = tagged(
    "UsedTool",
    "function",
    name=str,
    description=str | None,
    parameters=AnyObject | None,
    strict=bool,
)
Response = shape(
    "Response",
    id=str,
    object=Literal["response"],
    created_at=Count,
    background=bool,
    instructions=str | None,
    max_output_tokens=Count | None,
    max_tool_calls=Count | None,
    metadata=dict[str, str],
    model=str,
    parallel_tool_calls=bool,
    previous_response_id=str | None,
    prompt_cache_key=str | None,
    reasoning=shape("UsedReasoning", effort=str | None, summary=None),
    safety_identifier=str | None,
    service_tier=Literal["default"],
    store=bool,
    temperature=float,
    text=shape("UsedText", format=AnyObject, verbosity=Literal["low", "medium", "high"]),
    tool_choice=str | AnyObject,
    tools=list[UsedTool],
    top_logprobs=Count,
    top_p=float,
    truncation=Literal["disabled", "auto"],
    user=str | None,
    status=Literal["in_progress", "completed", "incomplete", "failed"],
    completed_at=Count | None,
    error=shape("ResponseError", code=str, message=str) | None,
    incomplete_details=shape("Incomplete", reason=Literal["max_output_tokens"]) | None,
    output=list[OutputItem],
    usage=ResponseUsage | None,
)
ResponseDeleted = shape("ResponseDeleted", id=str, object=Literal["response"], deleted=bool)


_PLACE: dict[str, Any] = {"item_id": str, "output_index": Count}
_PART: dict[str, Any] = {**_PLACE, "content_index": Count}
_WHOLE: dict[str, Any] = {"response": Response}
_OF_ITEM: dict[str, Any] = {"output_index": Count, "item": OutputItem}
_OF_PART: dict[str, Any] = {**_PART, "part": OutputPart | ReasoningPart}
_EVENTS: dict[str, dict[str, Any]] = {
    "response.created": _WHOLE,
    "response.in_progress": _WHOLE,
    "response.output_item.added": _OF_ITEM,
    "response.content_part.added": _OF_PART,
    "response.reasoning_text.delta": {**_PART, "delta": str},
    "response.reasoning_text.done": {**_PART, "text": str},
    "response.output_text.delta": {**_PART, "delta": str, "logprobs": _LOGPROBS},
    "response.output_text.done": {**_PART, "text": str, "logprobs": _LOGPROBS},
    "response.content_part.done": _OF_PART,
    "response.function_call_arguments.delta": {**_PLACE, "delta": str},
    "response.function_call_arguments.done": {**_PLACE, "name": str, "arguments": str},
    "response.output_item.done": _OF_ITEM,
    "response.completed": _WHOLE,
    "response.incomplete": _WHOLE,
    "response.failed": _WHOLE,
    "error": {"code": str | None, "message": str, "param": str | None},
}


def _name(tag: str) -> str:
    words = tag.replace("response.", "").replace("_", ".").split(".")
    return f"Response{''.join(map(str.capitalize, words))}Event"


ResponseEvent: Any = reduce(
    or_,
    (tagged(_name(tag), tag, sequence_number=Count, **fields) for tag, fields in _EVENTS.items()),
)
