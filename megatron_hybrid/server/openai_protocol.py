"""OpenAI's request bodies, checked and typed. A field is supported or refused, never ignored."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.request import (
    MAX_CACHE_CHECKPOINTS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from megatron_hybrid.server.fields import FieldError, Fields, show

MAX_ANSWERS = 1024  # of one HTTP request: prompts times n
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_NAME_LENGTH = 1024
MAX_TOKENS = 2**31 - 1
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

# Fields of OpenAI's API (and of vLLM's) that are refused, with the values that change nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
}
NOT_SUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **NOT_SUPPORTED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NOT_SUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    **NOT_SUPPORTED,
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_ROLES = ("system", "developer", "user", "assistant")
# What a client sends back when it repeats an answer of ours, besides role and content.
_EMPTY_IN_ANSWERS = ("refusal", "tool_calls", "function_call", "audio", "annotations")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What both endpoints share."""

    model: str | None
    params: SamplingParams
    max_tokens_field: str | None  # the name under which the client gave max_tokens, if it did
    stream: bool
    include_usage: bool
    cache_salt: str
    priority: int
    cache_checkpoints: tuple[int, ...]

    def params_that_fit(self, room: int) -> SamplingParams:
        """room: tokens that fit after the prompt; a default of ours never asks for more."""
        max_tokens = self.params.max_tokens
        if max_tokens is None or max_tokens <= room:
            return self.params
        return dataclasses.replace(self.params, max_tokens=room)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    generation: GenerationRequest


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    prompts: list[str | list[int]]
    generation: GenerationRequest


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    fields = Fields(body)
    messages = parse_messages(fields)
    template_arguments = fields.object("chat_template_kwargs")
    max_tokens_field, max_tokens = _chat_max_tokens(fields)
    logprobs = _chat_logprobs(fields)
    for name, harmless in NOT_SUPPORTED_CHAT.items():
        fields.unsupported(name, *harmless)
    generation = _parse_generation(fields, max_tokens_field, max_tokens, logprobs)
    fields.finish()
    return ChatRequest(messages, template_arguments, generation)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    fields = Fields(body)
    prompts = _parse_prompts(fields)
    max_tokens_field = "max_tokens" if fields.given("max_tokens") else None
    max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS, COMPLETION_MAX_TOKENS)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    for name, harmless in NOT_SUPPORTED_COMPLETION.items():
        fields.unsupported(name, *harmless)
    generation = _parse_generation(fields, max_tokens_field, max_tokens, logprobs)
    fields.finish()
    n = generation.params.n
    if len(prompts) * n > MAX_ANSWERS:
        raise FieldError(
            "prompt",
            f"prompt has {len(prompts)} entries and n is {n}; "
            f"the limit for both together is {MAX_ANSWERS} answers.",
        )
    return CompletionRequest(prompts, generation)


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, with known roles and without fields that would be dropped."""
    if not fields.given("messages"):
        raise fields.missing("messages")
    messages = fields.list("messages", 100_000)
    if not messages:
        raise FieldError("messages", "messages is empty; it needs at least one message.")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _parse_message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(path, f"{path} is {show(value)}; it must be an object.", "invalid_type")
    fields = Fields(value, path)
    if not fields.given("role"):
        raise fields.missing("role")
    role = fields.text("role", 64)
    if role not in _ROLES:
        raise fields.wrong_value("role", role, f"it must be one of {', '.join(_ROLES)}")
    if not fields.given("content"):
        raise fields.missing("content")
    # Templates know the older of OpenAI's two names for the same role.
    message = {
        "role": "system" if role == "developer" else role,
        "content": _parse_content(fields),
    }
    if fields.given("name"):
        message["name"] = fields.text("name", MAX_NAME_LENGTH)
    for name in _EMPTY_IN_ANSWERS:
        fields.unsupported(name, [])
    fields.finish()
    return message


def _parse_content(fields: Fields) -> Any:
    """Text, or a list of parts, which the tokenizer checks one by one."""
    content = fields.any("content")
    if not isinstance(content, (str, list)):
        raise fields.wrong_type("content", content, "a string or a list of parts")
    return content


def _chat_max_tokens(fields: Fields) -> tuple[str, int | None]:
    old = fields.integer("max_tokens", 1, MAX_TOKENS)
    new = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise FieldError(
            "max_tokens",
            f"max_tokens is {old} and max_completion_tokens is {new}; give only one of them.",
        )
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true.")
    return (top or 0) if wanted else None


def _parse_prompts(fields: Fields) -> list[str | list[int]]:
    if not fields.given("prompt"):
        raise fields.missing("prompt")
    prompt = fields.any("prompt")
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list):
        prompts = [prompt] if prompt and _is_integer(prompt[0]) else prompt
    else:
        raise fields.wrong_type(
            "prompt", prompt, "text, a list of texts, token ids or a list of lists of token ids"
        )
    for entry in prompts:
        if isinstance(entry, list):
            for token in entry:
                if not _is_integer(token):
                    raise fields.wrong_value("prompt", token, "a token id must be a whole number")
        elif not isinstance(entry, str):
            raise fields.wrong_value("prompt", entry, "a prompt must be text or token ids")
    if not prompts or not all(prompts):
        raise FieldError("prompt", "prompt is empty; it needs at least one token.")
    return prompts


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_generation(
    fields: Fields, max_tokens_field: str | None, max_tokens: int | None, logprobs: int | None
) -> GenerationRequest:
    fields.text("user", MAX_NAME_LENGTH)  # OpenAI's accounting field: it changes no answer
    params = SamplingParams(
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer("top_k", -1, 2**31 - 1, 0) or 0,
        min_p=fields.number("min_p", 0.0),
        max_tokens=max_tokens,
        seed=fields.integer("seed", -(2**63), 2**64 - 1),
        stop=_parse_stop(fields),
        stop_token_ids=_parse_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        n=fields.integer("n", 1, MAX_CHOICES, 1) or 1,
    )
    params.validate()
    stream = fields.boolean("stream")
    return GenerationRequest(
        model=fields.text("model", MAX_NAME_LENGTH) or None,
        params=params,
        max_tokens_field=max_tokens_field,
        stream=stream,
        include_usage=_parse_stream_options(fields, stream),
        cache_salt=fields.text("cache_salt", MAX_NAME_LENGTH),
        priority=fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY, 0) or 0,
        cache_checkpoints=_parse_cache_checkpoints(fields),
    )


def _parse_cache_checkpoints(fields: Fields) -> tuple[int, ...]:
    """Positions in the prompt, whose length is not known yet."""
    positions = fields.list("cache_checkpoints", MAX_CACHE_CHECKPOINTS)
    for position in positions:
        fields.check_integer("cache_checkpoints", position, 1, MAX_TOKENS)
    return tuple(positions)


def _parse_stop(fields: Fields) -> tuple[str, ...]:
    if isinstance(value := fields.any("stop"), str):
        value = [value]
    stops = Fields({"stop": value}).list("stop", MAX_STOP_STRINGS)
    for stop in stops:
        if not isinstance(stop, str):
            raise fields.wrong_type("stop", stop, "a string or a list of strings")
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise fields.wrong_value(
                "stop", stop, f"a stop string has from 1 to {MAX_STOP_LENGTH} characters"
            )
    return tuple(stops)


def _parse_stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.list("stop_token_ids", MAX_STOP_TOKEN_IDS)
    for token_id in ids:
        fields.check_integer("stop_token_ids", token_id, 0, 2**31 - 1)
    return tuple(ids)


def _parse_stream_options(fields: Fields, stream: bool) -> bool:
    if not fields.given("stream_options"):
        fields.any("stream_options")
        return False
    options = Fields(fields.object("stream_options"), "stream_options")
    if not stream:
        raise FieldError("stream_options", "stream_options needs stream to be true.")
    include_usage = options.boolean("include_usage")
    options.unsupported("include_obfuscation", False)
    options.finish()
    return include_usage
