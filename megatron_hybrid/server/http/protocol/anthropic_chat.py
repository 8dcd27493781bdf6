"""What the bodies of /v1/messages ask for, in the terms of chats."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams, Unasked
from megatron_hybrid.server.http.protocol.anthropic import (
    ChooseAny,
    ChooseNone,
    ChooseTool,
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
)
from megatron_hybrid.server.http.protocol.anthropic_turns import Conversation
from megatron_hybrid.server.http.protocol.constraints import schema_grammar
from megatron_hybrid.server.http.protocol.generation_request import (
    Chat,
    ChatPrompt,
    GenerationRequest,
    check_beside_tools,
    with_defaults,
)
from megatron_hybrid.server.http.protocol.messages import for_template
from megatron_hybrid.server.http.protocol.parsing import read
from megatron_hybrid.server.http.protocol.requests import Drawing
from megatron_hybrid.server.http.protocol.tools import (
    ToolChoice,
    ToolFields,
    Tools,
    choice_of,
    function_tool,
    make_tools,
)
from megatron_hybrid.server.options import ParseOptions

_FIELDS = ToolFields("tools[{}].name", "tools[{}].input_schema", "tool_choice.name")


def parse_messages(
    values: dict[str, Any], options: ParseOptions, *, later_system: bool = True
) -> Chat:
    """Of a body's JSON. later_system: see Conversation. Raises InvalidRequestError naming the first
    field that is wrong."""
    body = read(MessagesRequest, with_defaults(values, options), options)
    conversation = Conversation(body, later_system=later_system)
    prompt = _prompt(body, conversation, options)
    generation = _generation(body, options)
    check_beside_tools(generation.params.grammar, prompt.tools)
    return Chat(
        prompt.messages,
        prompt.template_arguments,
        prompt.tools,
        prompt.ending,
        generation,
        marks=conversation.marks(body),
    )


def parse_count_tokens(
    values: dict[str, Any], options: ParseOptions, *, later_system: bool = True
) -> tuple[ChatPrompt, CountTokensRequest]:
    """Of the JSON of a body of /v1/messages/count_tokens, and the body. Raises the same."""
    body = read(CountTokensRequest, values, options)
    conversation = Conversation(body, later_system=later_system)
    return _prompt(body, conversation, options), body


def _prompt(
    body: CountTokensRequest, conversation: Conversation, options: ParseOptions
) -> ChatPrompt:
    arguments: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort:
        arguments["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        arguments["enable_thinking"] = not isinstance(body.thinking, ThinkingDisabled)
    if isinstance(body.thinking, ThinkingEnabled) and body.thinking.budget_tokens is not None:
        arguments["thinking_budget"] = body.thinking.budget_tokens
    arguments |= body.chat_template_kwargs or {}
    messages = for_template(conversation.messages)
    return ChatPrompt(messages, arguments, _tools(body, options), conversation.ending)


def _tools(body: CountTokensRequest, options: ParseOptions) -> Tools:
    given = [
        function_tool(one.name, one.description, one.input_schema, one.strict)
        for one in body.tools or ()
    ]
    choice: str | ToolChoice | None = None
    match body.tool_choice:
        case ChooseAny() | ChooseTool() if not given:
            raise InvalidRequestError(
                "tool_choice", "tool_choice asks for a tool, but there are no tools."
            )
        case ChooseAny():
            choice = "required"
        case ChooseTool(name=name):
            choice = choice_of(name)
        case ChooseNone():
            choice = "none"
    alone = not isinstance(body.tool_choice, ChooseNone | None) and bool(
        body.tool_choice.disable_parallel_tool_use
    )
    return make_tools(given, choice, several=not alone, options=options, fields=_FIELDS)


def _generation(body: MessagesRequest, options: ParseOptions) -> GenerationRequest:
    drawing = {name: getattr(body, name) for name in Drawing.__struct_fields__}
    params = SamplingParams(
        # Of what does not fit into the context, as much as does.
        max_tokens=Unasked(body.max_tokens),
        stop=tuple(body.stop_sequences or ()),
        grammar=_grammar(body, options),
        **{name: value for name, value in drawing.items() if value is not None},
    )
    params.validate()
    return GenerationRequest(
        model=body.model or None,
        params=params,
        max_tokens_field="max_tokens",
        stream=bool(body.stream),
        include_usage=False,
        continuous_usage=False,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        cache_checkpoints=(),
        timeout=body.timeout,
        hide_thoughts=getattr(body.thinking, "display", None) == "omitted",
    )


def _grammar(body: MessagesRequest, options: ParseOptions) -> Grammar | None:
    path = "output_config.format"
    wanted = None if body.output_config is None else body.output_config.format
    if body.output_format is not None:
        if wanted is not None:
            raise InvalidRequestError(
                "output_format", f"output_format is the older name of {path}; give only one."
            )
        path, wanted = "output_format", body.output_format
    return None if wanted is None else schema_grammar(f"{path}.schema", wanted.schema, options)
