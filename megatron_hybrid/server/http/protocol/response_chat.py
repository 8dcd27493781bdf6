"""The chat that a body of /v1/responses comes to, once its fields are checked together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams
from megatron_hybrid.server.http.protocol.constraints import grammar_of, schema_grammar
from megatron_hybrid.server.http.protocol.generation_request import (
    Chat,
    GenerationRequest,
    check_beside_tools,
    default_max_tokens,
    template_arguments,
)
from megatron_hybrid.server.http.protocol.messages import for_template
from megatron_hybrid.server.http.protocol.requests import (
    AnswerRequest,
    JsonObject,
    PlainText,
    Sampling,
)
from megatron_hybrid.server.http.protocol.response_items import Saying, messages_of
from megatron_hybrid.server.http.protocol.responses import (
    LOGPROBS,
    AllowedTools,
    NamedFunction,
    ResponsesRequest,
)
from megatron_hybrid.server.http.protocol.tools import (
    ToolChoice,
    ToolFields,
    Tools,
    choice_of,
    function_tool,
    make_tools,
)
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.tokenizer import Ending

_FIELDS = ToolFields("tools[{}].name", "tools[{}].parameters", "tool_choice.name")
_ANY_OBJECT = {"type": "object"}


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
    effort = None if body.reasoning is None else body.reasoning.effort
    return template_arguments(effort, body.enable_thinking, body.chat_template_kwargs)


def _tools(body: ResponsesRequest, options: ParseOptions) -> Tools:
    given = [
        function_tool(one.name, one.description, one.parameters, one.strict)
        for one in body.tools or ()
    ]
    choice, allowed = _tool_choice(body)
    several = body.parallel_tool_calls is not False
    tools = make_tools(given, choice, several=several, options=options, fields=_FIELDS)
    return tools if allowed is None else replace(tools, allowed=allowed)


def _tool_choice(body: ResponsesRequest) -> tuple[str | ToolChoice | None, frozenset[str] | None]:
    """As chats have it, and the names of those that may be called, if not all may."""
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return choice_of(choice.name), None
    if not isinstance(choice, AllowedTools):
        return choice, None
    known = {tool.name for tool in body.tools or ()}
    for number, one in enumerate(choice.tools):
        if one.name not in known:
            path = f"tool_choice.tools[{number}].name"
            words = f"is {one.name!r}, which is not one of the tools."
            raise InvalidRequestError(path, f"{path} {words}")
    return choice.mode, frozenset(one.name for one in choice.tools)


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
