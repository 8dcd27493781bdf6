"""The body of /v1/responses, field by field, and the chat that it comes to."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron_hybrid import request as limits
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams
from megatron_hybrid.server.http.protocol.constraints import grammar_of, schema_grammar
from megatron_hybrid.server.http.protocol.generation_request import (
    Chat,
    GenerationRequest,
    check_beside_tools,
    default_max_tokens,
)
from megatron_hybrid.server.http.protocol.messages import for_template
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, only
from megatron_hybrid.server.http.protocol.requests import (
    MAX_TIMEOUT,
    AnswerRequest,
    Budget,
    JsonObject,
    Length,
    Logprobs,
    PlainText,
    Sampling,
    StructuredOutputs,
    Word,
)
from megatron_hybrid.server.http.protocol.response_items import Items, Saying, messages_of
from megatron_hybrid.server.http.protocol.tools import (
    MAX_TOOLS,
    AnyObject,
    ChosenFunction,
    Description,
    Function,
    FunctionName,
    Marked,
    Name,
    Tool,
    ToolChoice,
    ToolFields,
    Tools,
    make_tools,
)
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.tokenizer import Ending

MAX_METADATA, MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"  # in `include`
_FIELDS = ToolFields("tools[{}].name", "tools[{}].parameters", "tool_choice.name")
_ANY_OBJECT = {"type": "object"}

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


def chat_of(
    body: ResponsesRequest,
    items: Sequence[Saying],
    paths: Mapping[int, str],
    options: ParseOptions,
) -> Chat:
    """What is asked of the model. items: all that was said, also before this body; paths: as
    `messages_of` wants them. Raises InvalidRequestError for what fields only say together."""
    tools = _tools(body, options)
    generation = _generation(body, tools, options)
    check_beside_tools(generation.params.grammar, tools)
    messages = for_template(messages_of(body.instructions, items, paths))
    return Chat(messages, _template_arguments(body), tools, Ending.ANSWER, generation, "input")


def _template_arguments(body: ResponsesRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if body.reasoning is not None and body.reasoning.effort:
        arguments["reasoning_effort"] = body.reasoning.effort
        if body.reasoning.effort == "none":  # what templates have that know no effort
            arguments["enable_thinking"] = False
    if body.enable_thinking is not None:
        arguments["enable_thinking"] = body.enable_thinking
    return arguments | (body.chat_template_kwargs or {})


def _tools(body: ResponsesRequest, options: ParseOptions) -> Tools:
    given = [
        Tool(
            type="function",
            function=Function(
                name=one.name,
                description=one.description,
                parameters=one.parameters,
                strict=one.strict,
            ),
        )
        for one in body.tools or ()
    ]
    choice: str | ToolChoice | None
    allowed: frozenset[str] | None = None
    match body.tool_choice:
        case NamedFunction(name=name):
            choice = ToolChoice(type="function", function=ChosenFunction(name=name))
        case AllowedTools(mode=mode, tools=some):
            choice, allowed = mode, frozenset(one.name for one in some)
            known = {tool.function.name for tool in given}
            for number, one in enumerate(some):
                if one.name not in known:
                    name = f"tool_choice.tools[{number}].name"
                    words = f"is {one.name!r}, which is not one of the tools."
                    raise InvalidRequestError(name, f"{name} {words}")
        case choice:
            pass
    several = body.parallel_tool_calls is not False
    tools = make_tools(given, choice, several=several, options=options, fields=_FIELDS)
    return tools if allowed is None else replace(tools, allowed=allowed)


def _generation(body: ResponsesRequest, tools: Tools, options: ParseOptions) -> GenerationRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "stream_options needs stream to be true.")
    with_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        words = f'top_logprobs needs include to have "{LOGPROBS}".'
        raise InvalidRequestError("top_logprobs", words)
    budget = body.thinking_token_budget
    sampling = {name: getattr(body, name) for name in Sampling.__struct_fields__ if name != "n"}
    params = SamplingParams(
        max_tokens=default_max_tokens(body.max_output_tokens, body.min_tokens, options),
        logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        grammar=_grammar(body, tools, options),
        thinking_token_budget=None if budget is None or budget < 0 else budget,
        **{name: value for name, value in sampling.items() if value is not None},
    )
    params.validate()
    return GenerationRequest(
        model=body.model or None,
        params=params,
        max_tokens_field="max_output_tokens",
        stream=bool(body.stream),
        include_usage=False,  # which belongs to the response
        continuous_usage=False,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        cache_checkpoints=tuple(body.cache_checkpoints or ()),
        timeout=body.timeout,
    )


def _grammar(body: ResponsesRequest, tools: Tools, options: ParseOptions) -> Grammar | None:
    form = None if body.text is None else body.text.format
    ours = grammar_of(AnswerRequest(structured_outputs=body.structured_outputs), options)
    if form is None or isinstance(form, PlainText):
        return ours
    if ours is not None:
        words = f"{ours.field} and text.format both say what the answer looks like; "
        raise InvalidRequestError("text.format", f"{words}give only one of them.")
    if tools.forced:  # then there is no text, whose form it would be
        return None
    if isinstance(form, JsonObject):
        return schema_grammar("text.format", _ANY_OBJECT, options)
    return schema_grammar("text.format.schema", form.schema, options)
