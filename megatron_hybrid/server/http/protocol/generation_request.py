"""What the bodies of requests for answers ask for, once their fields are checked together.

A field is supported or refused; ignored are only those that change no token, and unknown ones where
the operator says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams, Unasked
from megatron_hybrid.server.http.protocol.constraints import grammar_of
from megatron_hybrid.server.http.protocol.messages import AnyMessage, for_template
from megatron_hybrid.server.http.protocol.parsing import BY_DEFAULT, read
from megatron_hybrid.server.http.protocol.requests import (
    COMPLETION_MAX_TOKENS,
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    Sampling,
    TokenizeChatRequest,
)
from megatron_hybrid.server.http.protocol.tools import Tools, make_tools
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.block_ends import BlockEnd
from megatron_hybrid.text.tokenizer import Ending

MAX_ANSWERS = 1024  # of one HTTP request: prompts times n


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What both endpoints share."""

    model: str | None
    params: SamplingParams
    max_tokens_field: str  # what the client calls max_tokens
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk of a stream; only with include_usage
    cache_salt: str
    priority: int
    cache_checkpoints: tuple[int, ...]
    timeout: float | None = None  # seconds
    return_token_ids: bool = False
    return_weight_versions: bool = False
    adapter: str = ""
    # Of the prompt, which the others are not part of; -1: as many as leave room for the answer.
    last_tokens: int | None = None
    show_special: bool = False  # special tokens are part of the text
    show_stop: bool = False  # so is what ended the answer
    hide_thoughts: bool = False  # clients see that there were some, and no more
    prefilled_by: str = ""  # the address of a server that has computed the prompt
    prefilling: str = ""  # or its request that does so
    called: str = ""  # the client's own name for it


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat's prompt is made of: by the template, from messages, variables and tools."""

    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    tools: Tools
    ending: Ending


@dataclass(frozen=True, slots=True)
class Chat(ChatPrompt):
    """A request for an answer to it. field: what the client calls the messages. marks: ends of
    blocks at which the model's state will be wanted, besides `cache_checkpoints`."""

    generation: GenerationRequest
    field: str = "messages"
    marks: tuple[BlockEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A request of /v1/completions. `echo`: the prompt's text comes before the answer's."""

    prompts: list[str | list[int]]
    generation: GenerationRequest
    echo: bool = False


def parse_chat(values: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> Chat:
    """Of a body's JSON. Raises InvalidRequestError naming the first field that is wrong."""
    body = read(ChatRequest, with_defaults(values, options), options)
    prompt = chat_prompt(body, options)
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            "max_tokens",
            f"max_tokens is {old} and max_completion_tokens is {new}; give only one of them.",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "top_logprobs needs logprobs to be true.")
    generation = generation_of(
        body,
        options,
        max_tokens_field="max_tokens" if new is None else "max_completion_tokens",
        max_tokens=default_max_tokens(old if new is None else new, body.min_tokens, options),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking_token_budget=_thinking_budget(body),
    )
    check_beside_tools(generation.params.grammar, prompt.tools)
    return Chat(prompt.messages, prompt.template_arguments, prompt.tools, prompt.ending, generation)


def with_defaults(values: dict[str, Any], options: ParseOptions) -> dict[str, Any]:
    """With the operator's sampling for what is left open, or null."""
    missing = {
        name: value
        for name, value in options.sampling_defaults
        if values.get(name) is None and name != "max_tokens"
    }
    return {**values, **missing} if missing else values


def default_max_tokens(
    max_tokens: int | None, min_tokens: int | None, options: ParseOptions
) -> int | None:
    """The longest answer, or as much of the operator's default as fits; None: all that fits."""
    default = dict(options.sampling_defaults).get("max_tokens")
    if max_tokens is not None or default is None:
        return max_tokens
    return Unasked(max(default, min_tokens or 0))


def _thinking_budget(body: ChatRequest) -> int | None:
    """By whichever of its names."""
    theirs = None if body.custom_params is None else body.custom_params.thinking_budget
    named = {
        "thinking_token_budget": body.thinking_token_budget,
        "thinking_budget": body.thinking_budget,
        "custom_params.thinking_budget": theirs,
    }
    given = [(name, value) for name, value in named.items() if value is not None]
    for (one, budget), (other, value) in pairwise(given):
        if budget != value:
            raise InvalidRequestError(
                other, f"{one} is {budget} and {other} is {value}; give only one of them."
            )
    return given[0][1] if given and given[0][1] >= 0 else None


def check_beside_tools(grammar: Grammar | None, tools: Tools) -> None:
    """An answer that may or has to call a function can follow a JSON schema besides, and nothing
    else."""
    if grammar is None or grammar.field == "response_format":  # which is looked at with the calls
        return
    if tools.forced or (tools.read and grammar.kind != "json_schema"):
        raise InvalidRequestError(
            grammar.field,
            f"{grammar.field} does not go with tools that the answer may call; "
            'set tool_choice to "none".',
        )


def chat_prompt(body: ChatRequest | TokenizeChatRequest, options: ParseOptions) -> ChatPrompt:
    """The chat in a body. Raises InvalidRequestError for what its fields only say together."""
    arguments = template_arguments(
        body.reasoning_effort, body.enable_thinking, body.chat_template_kwargs
    )
    several = body.parallel_tool_calls is not False
    tools = make_tools(body.tools or (), body.tool_choice, several=several, options=options)
    return ChatPrompt(for_template(body.messages), arguments, tools, _ending(body))


def template_arguments(
    effort: str | None, thinking: bool | None, more: dict[str, Any] | None
) -> dict[str, Any]:
    """The template's variables: an effort, whether to think, and those that a body names itself,
    which count most."""
    arguments: dict[str, Any] = {}
    if effort:
        arguments["reasoning_effort"] = effort
    if effort == "none":  # what templates have that know no effort
        arguments["enable_thinking"] = False
    if thinking is not None:
        arguments["enable_thinking"] = thinking
    return arguments | (more or {})


def _ending(body: ChatRequest | TokenizeChatRequest) -> Ending:
    if not body.continue_final_message:
        return Ending.NOTHING if body.add_generation_prompt is False else Ending.ANSWER
    if body.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt",
            "add_generation_prompt and continue_final_message are both true; the prompt ends with "
            "only one of them.",
        )
    if not _says_something(body.messages[-1:]):
        raise InvalidRequestError(
            "continue_final_message",
            "continue_final_message needs the last message to be text of the assistant's.",
        )
    return Ending.CONTINUED


def _says_something(messages: Sequence[AnyMessage]) -> bool:
    """Whether these are answers with text in them."""
    for message in for_template(messages):
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if message["role"] == "assistant" and any(map(str.strip, texts)):
            return True
    return False


def parse_completion(values: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> Completion:
    """Of a body's JSON. Raises InvalidRequestError naming the first field that is wrong."""
    body = read(CompletionRequest, with_defaults(values, options), options)
    prompts = _prompts(body.prompt)
    max_tokens = body.max_tokens
    if values.get("max_tokens") is None:
        max_tokens = Unasked(COMPLETION_MAX_TOKENS)
    echo = bool(body.echo)
    if max_tokens == 0 and not echo:
        raise InvalidRequestError("max_tokens", "max_tokens is 0, which needs echo to be true.")
    generation = generation_of(
        body,
        options,
        max_tokens_field="max_tokens",
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        echo=echo,
    )
    n = generation.params.n
    if len(prompts) * n > MAX_ANSWERS:
        raise InvalidRequestError(
            "prompt",
            f"prompt has {len(prompts)} entries and n is {n}; "
            f"the limit for both together is {MAX_ANSWERS} answers.",
        )
    return Completion(prompts, generation, echo)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if int in kinds:
        raise InvalidRequestError(
            "prompt", "prompt holds token ids beside texts or lists; it must be all of one kind."
        )
    return list(prompt)


def generation_of(
    body: AnswerRequest,
    options: ParseOptions,
    *,
    max_tokens_field: str,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    thinking_token_budget: int | None = None,
) -> GenerationRequest:
    """What the fields that all bodies share ask for. max_tokens_field: what the client calls
    max_tokens. Raises InvalidRequestError naming the first field that is wrong."""
    sampling = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    params = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        grammar=grammar_of(body, options),
        thinking_token_budget=thinking_token_budget,
        **{name: value for name, value in sampling.items() if value is not None},
    )
    params.validate()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options", "stream_options needs stream to be true.")
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is 0; it must be -1, or a whole number from 1 on.",
        )
    wanted, handed_over = body.stream_options, body.kv_transfer_params
    include_usage = wanted is not None and bool(wanted.include_usage)
    return GenerationRequest(
        model=body.model or None,
        params=params,
        max_tokens_field=max_tokens_field,
        stream=bool(body.stream),
        include_usage=include_usage,
        # As vLLM has it: without the one, the other changes nothing.
        continuous_usage=include_usage and bool(wanted and wanted.continuous_usage_stats),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        cache_checkpoints=tuple(body.cache_checkpoints or ()),
        timeout=body.timeout,
        return_token_ids=bool(body.return_token_ids),
        return_weight_versions=bool(body.return_weight_versions),
        last_tokens=body.truncate_prompt_tokens,
        show_special=body.skip_special_tokens is False,
        show_stop=bool(body.include_stop_str_in_output),
        prefilled_by="" if handed_over is None else handed_over.peer or "",
        prefilling="" if handed_over is None else handed_over.request or "",
    )


def of_prompt_alone(params: SamplingParams) -> SamplingParams:
    """For a server that hands over what it computes: one token shows that the prompt was computed.
    Nobody reads it, so it need not wait for a grammar."""
    return replace(
        params,
        n=1,
        max_tokens=1,
        min_tokens=min(1, params.min_tokens),
        grammar=None,
        thinking_token_budget=None,
    )
