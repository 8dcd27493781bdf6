"""The body of /v1/responses, field by field."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from megatron_hybrid import request as limits
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, only
from megatron_hybrid.server.http.protocol.requests import (
    MAX_TIMEOUT,
    Budget,
    JsonObject,
    Length,
    Logprobs,
    PlainText,
    Sampling,
    StructuredOutputs,
    Word,
)
from megatron_hybrid.server.http.protocol.response_items import Items
from megatron_hybrid.server.http.protocol.tools import (
    MAX_TOOLS,
    AnyObject,
    Description,
    FunctionName,
    Marked,
    Name,
)

MAX_METADATA, MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"  # in `include`

_OnlyFalse, _OnlyOne = only(False), only(1)
_OnlyAuto, _OnlyStandard, _OnlyDirect = only("auto"), only("standard"), only(["direct"])
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_KEY_LENGTH)],
        Annotated[str, Meta(max_length=MAX_VALUE_LENGTH)],
    ],
    Meta(max_length=MAX_METADATA),
]
Include = Literal[
    LOGPROBS,
    SEALED,
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Summary = Literal["auto", "concise", "detailed"]


class FunctionTool(Marked, tag_field="type", tag="function", kw_only=True):
    """A function that the answer may call. `type` may be left out.

    parameters: JSON Schema of the arguments.
    strict: The arguments always match their schema; left out: false.
    output_schema: Changes nothing.
    """

    name: FunctionName
    description: Description | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None
    output_schema: AnyObject | None = None

    allowed_callers: _OnlyDirect | None = None
    defer_loading: _OnlyFalse | None = None


class NamedFunction(Body, tag_field="type", tag="function"):
    """The function that has to be called."""

    name: FunctionName


class AllowedFunction(Body):
    """A function that may be called."""

    type: Literal["function"]
    name: FunctionName


class AllowedTools(Body, tag_field="type", tag="allowed_tools"):
    """Only some of the tools: the prompt, and what is cached of it, stays as it is.

    mode: Whether one of them has to be called.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class SchemaFormat(Body, tag_field="type", tag="json_schema"):
    """JSON that follows a schema.

    schema: The answer's JSON Schema. An object has no properties but those that its schema names,
        unless it says otherwise. A schema with a feature that cannot be followed is refused.
    strict: Changes nothing: the answer always follows the schema.
    """

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    schema: AnyObject
    description: Description | None = None
    strict: bool | None = None


class TextConfig(Body):
    """What the answer's text is like.

    format: The form of the answer's text, unless max_output_tokens cuts it short. Where a call is
        forced there is no text.
    verbosity: Changes nothing: ask for short answers in a message.
    """

    format: PlainText | JsonObject | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """How the model thinks.

    effort: The chat template's variable reasoning_effort, unless chat_template_kwargs has it; none
        also turns thoughts off.
    summary: Changes nothing: thoughts are given as they are.
    generate_summary: The older name of summary.
    """

    effort: Word | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None

    context: _OnlyAuto | None = None
    mode: _OnlyStandard | None = None


class ResponseStreamOptions(Body):
    """What a stream holds besides the answer: nothing."""

    include_obfuscation: _OnlyFalse | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """Of /v1/responses.

    input: Text, or items: messages, calls and their outputs, thoughts, references to stored items.
    instructions: A system message before all others. Of this response only: not handed on by
        previous_response_id.
    model: The model's name; left out: the one that is served.
    previous_response_id: A stored response that this one goes on from.
    tools: Functions that the answer may call; their names differ.
    tool_choice: Whether, or which of the tools, the answer calls.
    parallel_tool_calls: Whether an answer may hold more than one call.
    text: What the answer's text is like.
    reasoning: How the model thinks.
    max_output_tokens: The answer's longest length, thoughts included; left out: as long as fits.
    max_tool_calls: Changes nothing: it counts built-in tools, of which there are none.
    top_logprobs: So many likeliest tokens at each place, with the log-probabilities that include
        asks for.
    include: message.output_text.logprobs gives every token's log-probability;
        reasoning.encrypted_content gives thoughts as clients send them back that store nothing,
        and is given unasked where the response is not stored. The others change nothing.
    truncation: What becomes of an input that is too long. disabled: it is refused; auto: the oldest
        turns are left out.
    stream: Send the response as server-sent events while it is generated.
    stream_options: Needs `stream` to be true.
    store: Whether the response can be asked for later; left out: true, if the server stores any.
    metadata: Given back with the response.
    user: Whose request it is, for the client's own records.
    safety_identifier: The newer name of user.
    service_tier: Changes nothing; priority says who runs first.
    prompt_cache_key: Changes nothing: equal beginnings of prompts are found by themselves.
    prompt_cache_retention: Changes nothing: what is cached stays while there is room.
    prompt_cache_options: Changes nothing: the cache chooses by itself.
    structured_outputs: The answer's form in vLLM's words; not beside text.format.
    chat_template_kwargs: Variables of the model's chat template.
    enable_thinking: The template's variable of this name, unless chat_template_kwargs has it.
    thinking_token_budget: After so many tokens of thoughts they are ended; -1 or left out: when the
        model ends them.
    cache_salt: Requests share cached prefixes only if their salts are equal.
    priority: A smaller number runs first.
    cache_checkpoints: Positions in the prompt to keep a state at.
    timeout: Seconds after which the request is given up with status 504; the server's own limit
        holds too.
    """

    input: str | Items
    instructions: str | None = None
    model: Name | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Length | None = None
    max_tool_calls: Length | None = None
    top_logprobs: Logprobs | None = None
    include: list[Include] | None = None
    truncation: Literal["disabled", "auto"] | None = "disabled"
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = True
    metadata: Metadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Word | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: AnyObject | None = None

    n: _OnlyOne | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: AnyObject | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Budget | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = 0
    cache_checkpoints: (
        Annotated[list[Length], Meta(max_length=limits.MAX_CACHE_CHECKPOINTS)] | None
    ) = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None

    background: _OnlyFalse | None = None
    conversation: Unsupported | None = None
    prompt: Unsupported | None = None
    context_management: Unsupported | None = None
    moderation: Unsupported | None = None
