"""OpenAI's request bodies, checked and typed. A field is supported or refused; ignored are only
those that change no token, and unknown ones where the operator says so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.chat_messages import parse_messages, parse_template_arguments
from megatron_hybrid.server.http.field_types import take_all
from megatron_hybrid.server.http.fields import BY_DEFAULT, FieldError, Fields
from megatron_hybrid.server.http.request_fields import (
    CHAT,
    COMMON,
    COMPLETION,
    SAMPLING,
    STREAM_OPTIONS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
)
from megatron_hybrid.server.http.response_format import parse_response_format
from megatron_hybrid.server.http.tool_calls.fields import Tools, parse_tools
from megatron_hybrid.server.options import ParseOptions

MAX_ANSWERS = 1024  # of one HTTP request: prompts times n


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What both endpoints share."""

    model: str | None
    params: SamplingParams
    max_tokens_field: str | None  # the name under which the client gave max_tokens, if it did
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk of a stream; only with include_usage
    cache_salt: str
    priority: int
    cache_checkpoints: tuple[int, ...]
    timeout: float | None = None  # seconds
    # Nothing but the prompt: the engine makes one token, which nobody sees.
    prompt_only: bool = False
    return_token_ids: bool = False

    @property
    def asked_tokens(self) -> dict[str, int]:
        """By field, the lengths of an answer that the client asks for."""
        name, most = self.max_tokens_field, self.params.max_tokens
        asked = {} if name is None or most is None else {name: most}
        return {**asked, "min_tokens": self.params.min_tokens}

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
    tools: Tools
    generation: GenerationRequest


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`echo`: the prompt's text comes before the answer's."""

    prompts: list[str | list[int]]
    generation: GenerationRequest
    echo: bool = False


def parse_chat(body: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> ChatRequest:
    """Raises InvalidRequestError naming the first field that is wrong."""
    fields = Fields(body, ignore_unknown=options.ignore_unknown_fields)
    messages = parse_messages(fields)
    template_arguments = parse_template_arguments(fields)
    tools = parse_tools(fields, options)
    max_tokens_field, max_tokens, logprobs = _parse_chat_lengths(fields)
    take_all(fields, UNSUPPORTED_CHAT)
    generation = _parse_generation(fields, options, max_tokens_field, max_tokens, logprobs)
    fields.finish()
    return ChatRequest(messages, template_arguments, tools, generation)


def parse_completion(body: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> CompletionRequest:
    """Raises InvalidRequestError naming the first field that is wrong."""
    fields = Fields(body, ignore_unknown=options.ignore_unknown_fields)
    prompts = _parse_prompts(fields)
    max_tokens_field = "max_tokens" if fields.given("max_tokens") else None
    own = take_all(fields, COMPLETION)
    take_all(fields, UNSUPPORTED_COMPLETION)
    generation = _parse_generation(
        fields, options, max_tokens_field, own["max_tokens"], own["logprobs"], echo=own["echo"]
    )
    fields.finish()
    n = generation.params.n
    if len(prompts) * n > MAX_ANSWERS:
        raise FieldError(
            "prompt",
            f"prompt has {len(prompts)} entries and n is {n}; "
            f"the limit for both together is {MAX_ANSWERS} answers.",
        )
    return CompletionRequest(prompts, generation, own["echo"])


def _parse_chat_lengths(fields: Fields) -> tuple[str, int | None, int | None]:
    """The name and value of max_tokens, and how many log-probabilities are wanted."""
    own = take_all(fields, CHAT)
    old, new = own["max_tokens"], own["max_completion_tokens"]
    if old is not None and new is not None and old != new:
        raise FieldError(
            "max_tokens",
            f"max_tokens is {old} and max_completion_tokens is {new}; give only one of them.",
        )
    top = own["top_logprobs"]
    if top is not None and not own["logprobs"]:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true.")
    logprobs = (top or 0) if own["logprobs"] else None
    if new is None:
        return "max_tokens", old, logprobs
    return "max_completion_tokens", new, logprobs


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
            if set(map(type, entry)) <= {int}:
                continue
            wrong = next(token for token in entry if not _is_integer(token))
            raise fields.wrong_value("prompt", wrong, "a token id must be a whole number")
        elif not isinstance(entry, str):
            raise fields.wrong_value("prompt", entry, "a prompt must be text or token ids")
    if not prompts or not all(prompts):
        raise FieldError("prompt", "prompt is empty; it needs at least one token.")
    return prompts


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_generation(
    fields: Fields,
    options: ParseOptions,
    max_tokens_field: str | None,
    max_tokens: int | None,
    logprobs: int | None,
    *,
    echo: bool = False,
) -> GenerationRequest:
    common = take_all(fields, COMMON)
    prompt_only = max_tokens == 0
    if prompt_only and not echo:
        raise FieldError("max_tokens", "max_tokens is 0, which needs echo to be true.")
    params = SamplingParams(
        max_tokens=1 if prompt_only else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        grammar=parse_response_format(fields, options),
        **take_all(fields, SAMPLING),
    )
    params.validate()
    include_usage, continuous_usage = _parse_stream_options(fields, common["stream"])
    return GenerationRequest(
        model=common["model"] or None,
        params=params,
        max_tokens_field=max_tokens_field,
        stream=common["stream"],
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        cache_salt=common["cache_salt"],
        priority=common["priority"],
        cache_checkpoints=common["cache_checkpoints"],
        timeout=common["timeout"],
        prompt_only=prompt_only,
        return_token_ids=common["return_token_ids"],
    )


def _parse_stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether usage comes in a chunk at the end, and in every chunk."""
    if not fields.given("stream_options"):
        fields.any("stream_options")
        return False, False
    options = fields.inside(fields.object("stream_options"), "stream_options")
    if not stream:
        raise FieldError("stream_options", "stream_options needs stream to be true.")
    wanted = take_all(options, STREAM_OPTIONS)
    options.finish()
    # As vLLM has it: without the one, the other changes nothing.
    return wanted["include_usage"], wanted["include_usage"] and wanted["continuous_usage_stats"]
