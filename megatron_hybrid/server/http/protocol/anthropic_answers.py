"""What Anthropic's routes answer, one shape a statement."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Any, Literal

from megatron_hybrid.server.http.protocol.answers import Count, optional, says, shape, tagged

MessagesError = shape(
    "MessagesError",
    type=Literal["error"],
    error=shape(
        "MessagesErrorObject",
        type=str,
        message=str,
        details=optional(shape("MessagesErrorDetails", error_code=str)),
    ),
    request_id=says(str, "The same as in the header request-id."),
)
InputTokens = shape("InputTokens", input_tokens=Count)

_CACHED: dict[str, Any] = {  # missing with --no-report-cached-tokens
    "cache_creation_input_tokens": optional(
        says(Count, "Prompt tokens that were computed, up to the last mark of cache_control.")
    ),
    "cache_read_input_tokens": optional(says(Count, "Prompt tokens that were not computed.")),
}
_USAGE = shape(
    "MessagesUsage",
    input_tokens=says(Count, "All other tokens of the prompt."),
    output_tokens=Count,
    **_CACHED,
    output_tokens_details=optional(  # only where the model thinks
        shape(
            "MessagesOutputDetails",
            thinking_tokens=says(Count, "Tokens of thoughts and their marks."),
        )
    ),
)
_TEXT = tagged("TextAnswer", "text", text=str)
_THINKING = tagged("ThinkingAnswer", "thinking", thinking=str, signature=str)
_TOOL_USE = tagged("ToolUseAnswer", "tool_use", id=str, name=str, input=dict[str, Any])
_BLOCK = _TEXT | _THINKING | _TOOL_USE
_REASON = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]
_ENDED: dict[str, Any] = {
    "stop_reason": says(_REASON | None, "null before the answer has ended."),
    "stop_sequence": says(str | None, "Which one of stop_sequences has ended the answer."),
}
Message = shape(
    "MessagesAnswer",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[_BLOCK],
    **_ENDED,
    usage=_USAGE,
)
_DELTA = (
    tagged("TextDelta", "text_delta", text=str)
    | tagged("ThinkingDelta", "thinking_delta", thinking=str)
    | tagged("SignatureDelta", "signature_delta", signature=str)
    | tagged("InputJsonDelta", "input_json_delta", partial_json=str)
)
# Of a stream, in this order; deltas are those of the block that was started last.
Event = (
    tagged("MessageStart", "message_start", message=Message)
    | tagged("Ping", "ping")
    | tagged("ContentBlockStart", "content_block_start", index=Count, content_block=_BLOCK)
    | tagged("ContentBlockDelta", "content_block_delta", index=Count, delta=_DELTA)
    | tagged("ContentBlockStop", "content_block_stop", index=Count)
    | tagged("MessageDelta", "message_delta", delta=shape("MessageEnd", **_ENDED), usage=_USAGE)
    | tagged("MessageStop", "message_stop")
)
