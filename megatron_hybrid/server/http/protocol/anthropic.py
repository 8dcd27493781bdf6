"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, field by field."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_hybrid import request as limits
from megatron_hybrid.server.http.protocol.messages import MAX_MESSAGES, LongText, Notes
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, only
from megatron_hybrid.server.http.protocol.requests import (
    MAX_STOP_STRINGS,
    MAX_TIMEOUT,
    Count,
    Drawing,
    Length,
    StopString,
    Word,
)
from megatron_hybrid.server.http.protocol.tools import AnyObject, Description, Name

MAX_CACHE_MARKS = 4  # as at Anthropic's
MAX_CLIENT_TOOLS = 1024

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}\Z")]
_OnlyFalse, _OnlyEmptyList, _OnlyDirect = only(False), only([]), only([], ["direct"])


class Thread(Unsupported):
    """A chat that the server keeps. The official client's tool runner asks for one, and goes on
    without when it is refused in these words."""

    @classmethod
    def read(cls, value: Any) -> Any:
        words = "is not supported: no chat is kept here; send all of its messages."
        raise ValueError(words, "thread_unsupported_request")


class CacheControl(Body, kw_only=True):
    """Marks the end of what other prompts will begin with.

    ttl: Changes nothing: what is cached stays while there is room.
    scope: Changes nothing: see cache_salt.
    """

    type: Literal["ephemeral"]
    ttl: Word | None = None
    scope: Word | None = None


class Markable(Body):
    """What a mark of the cache may stand at.

    cache_control: A state of the model is kept at its end.
    """

    cache_control: CacheControl | None = None


class AnyText(Markable, kw_only=True):
    """Text.

    citations: Changes nothing.
    """

    text: str
    citations: Notes | None = None


class TextBlock(AnyText, tag_field="type", tag="text", kw_only=True):
    """Text, where there may be other blocks."""


class PlainBlock(AnyText, kw_only=True):
    """Text, where there are no other blocks."""

    type: Literal["text"]


class ToolUseBlock(Markable, tag_field="type", tag="tool_use", kw_only=True):
    """A call that an answer made.

    input: The call's arguments.
    caller: Changes nothing.
    """

    id: Name
    name: ToolName
    input: AnyObject
    caller: AnyObject | None = None


class ToolResultBlock(Markable, tag_field="type", tag="tool_result", kw_only=True):
    """What came of a call.

    tool_use_id: The call's id.
    is_error: The result reaches the model with "Error: " before it.
    """

    tool_use_id: Name
    content: str | list[PlainBlock] | None = None
    is_error: bool | None = False


class ThinkingBlock(Body, tag_field="type", tag="thinking", kw_only=True):
    """What was thought before an answer, for templates that show it.

    signature: Changes nothing.
    """

    thinking: LongText
    signature: LongText | None = None


class RedactedThinkingBlock(Body, tag_field="type", tag="redacted_thinking", kw_only=True):
    """Thoughts of another server's, which nobody can read here: they are left out.

    data: Changes nothing.
    """

    data: LongText


class UserTurn(Body, tag_field="role", tag="user", kw_only=True):
    """What is asked, and what came of calls."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(Body, tag_field="role", tag="assistant", kw_only=True):
    """An answer that a client sends back; the last one is gone on with."""

    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock]


class SystemTurn(Body, tag_field="role", tag="system", kw_only=True):
    """What the model should know from here on, for templates that take it."""

    content: str | list[PlainBlock]


AnyTurn = UserTurn | AssistantTurn | SystemTurn


class ClientTool(Markable, kw_only=True):
    """A function of the client's that the answer may call.

    input_schema: JSON Schema of the arguments.
    strict: The arguments always match their schema.
    eager_input_streaming: Changes nothing: arguments are sent when they are complete.
    """

    name: ToolName
    input_schema: AnyObject
    type: Literal["custom"] | None = None
    description: Description | None = None
    strict: bool | None = False
    eager_input_streaming: bool | None = None

    input_examples: _OnlyEmptyList | None = None
    defer_loading: _OnlyFalse | None = None
    allowed_callers: _OnlyDirect | None = None


class _MayBeOne(Body):
    """
    disable_parallel_tool_use: The answer holds at most one call.
    """

    disable_parallel_tool_use: bool | None = False


class ChooseAuto(_MayBeOne, tag_field="type", tag="auto"):
    """The answer calls tools or not."""


class ChooseAny(_MayBeOne, tag_field="type", tag="any"):
    """The answer calls a tool."""


class ChooseTool(_MayBeOne, tag_field="type", tag="tool", kw_only=True):
    """The answer calls this tool, once."""

    name: ToolName


class ChooseNone(Body, tag_field="type", tag="none"):
    """The answer calls no tool."""


class _Shown(Body):
    """
    display: omitted: thinking blocks come empty.
    """

    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(_Shown, tag_field="type", tag="enabled"):
    """The model thinks, if it can.

    budget_tokens: After so many tokens of thoughts they are ended.
    """

    budget_tokens: Length | None = None


class ThinkingAdaptive(_Shown, tag_field="type", tag="adaptive"):
    """The model thinks, if it can."""


class ThinkingDisabled(Body, tag_field="type", tag="disabled"):
    """The model does not think."""


class JsonOutput(Body, kw_only=True):
    """JSON that follows a schema.

    schema: As in a chat's response_format.
    """

    type: Literal["json_schema"]
    schema: AnyObject


class OutputConfig(Body):
    """What the answer is to be like.

    effort: The chat template's variable reasoning_effort, unless chat_template_kwargs has it.
    format: The answer's form, unless max_tokens cuts it short.
    """

    effort: Word | None = None
    format: JsonOutput | None = None


class ClearThinking(Body, kw_only=True):
    """Changes nothing: the chat template says which earlier thoughts the model sees.

    keep: Changes nothing.
    """

    type: Literal["clear_thinking_20251015"]
    keep: str | AnyObject | None = None


class ContextManagement(Body):
    """Edits of earlier messages; only those that change nothing."""

    edits: list[ClearThinking] | None = None


class CountTokensRequest(Drawing, kw_only=True):
    """Of /v1/messages/count_tokens: any body of /v1/messages; what makes no prompt changes nothing.

    model: The model's name; left out: the one that is served.
    system: What the model should know beforehand.
    messages: Those of the same role that follow each other are one.
    max_tokens: The answer's longest length, or as much of it as fits; 0: only the prompt is
        computed, for later requests that begin with it.
    stop_sequences: Strings that end the answer; not part of it.
    stream: Send the answer as server-sent events while it is generated.
    tools: Functions that the answer may call; their names differ.
    tool_choice: Whether, or which of the tools, the answer calls.
    thinking: Whether the model thinks first; left out: as its chat template has it.
    output_config: What the answer is to be like.
    output_format: The older name of output_config.format.
    cache_control: The same as at the end of the last message.
    metadata: For the client's own records; nothing keeps it here.
    service_tier: Changes nothing; priority says who runs first.
    speed: Changes nothing.
    context_management: Edits of earlier messages.
    diagnostics: Changes nothing.
    cache_salt: Requests share cached prefixes only if their salts are equal.
    priority: A smaller number runs first.
    timeout: Seconds after which the request is given up with status 504; the server's own limit
        holds too.
    chat_template_kwargs: Variables of the model's chat template.
    """

    messages: Annotated[list[AnyTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: str | list[PlainBlock] | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_CLIENT_TOOLS)] | None = None
    tool_choice: ChooseAuto | ChooseAny | ChooseTool | ChooseNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None
    cache_control: CacheControl | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Word | None = None
    speed: Word | None = None
    context_management: ContextManagement | None = None
    diagnostics: AnyObject | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = 0
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None
    chat_template_kwargs: AnyObject | None = None

    thread: Thread | None = None
    container: Unsupported | None = None
    mcp_servers: _OnlyEmptyList | None = None
    inference_geo: Unsupported | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Of /v1/messages."""

    max_tokens: Count
