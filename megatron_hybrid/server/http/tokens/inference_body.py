"""The body of /inference/v1/generate, vLLM's, and what it asks for."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from megatron_hybrid import request as limits
from megatron_hybrid.server.http.protocol.generation_request import (
    default_max_tokens,
    generation_of,
)
from megatron_hybrid.server.http.protocol.parsing import BY_DEFAULT, Body, Unsupported, only, read
from megatron_hybrid.server.http.protocol.requests import (
    MAX_TIMEOUT,
    AnswerRequest,
    Budget,
    Count,
    FilledIds,
    KvTransferParams,
    Length,
    Logprobs,
    Sampling,
    StreamOptions,
    StructuredOutputs,
    Word,
)
from megatron_hybrid.server.http.protocol.tools import AnyObject, Name
from megatron_hybrid.server.http.tokens.asked import AskedPrompt, PreparedTokens, Words
from megatron_hybrid.server.options import ParseOptions

SAMPLING = "sampling_params"
_OnlyFalse, _OnlyZero, _OnlyEmpty = only(False), only(0), only([])
_OnlyEmptyObject, _OnlyTokens, _OnlyTrue = only({}), only("tokens"), only(True)


class InferenceSampling(Sampling):
    """vLLM's sampling_params.

    max_tokens: The answer's longest length; left out: as long as fits.
    logprobs: Give the log-probability of every token and of this many likeliest ones.
    prompt_logprobs: The same of the prompt's tokens.
    structured_outputs: The answer's form.
    thinking_token_budget: After so many tokens of thoughts they are ended; -1: when the model ends
        them. Needs a model whose thoughts have marks.
    skip_special_tokens: Changes nothing: answers are token ids.
    include_stop_str_in_output: The same.
    spaces_between_special_tokens: The same.
    detokenize: The same.
    return_token_ids: The same.
    stream_interval: Changes nothing: an event comes with every step that has news.
    skip_reading_prefix_cache: Changes nothing: what is cached is the same as what is computed.
    routed_experts_prompt_start: Where experts are given: only those from this position in the
        prompt on.
    """

    max_tokens: Length | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Budget | None = None

    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    spaces_between_special_tokens: bool | None = True
    detokenize: bool | None = True
    return_token_ids: bool | None = None
    stream_interval: Length | None = None
    skip_reading_prefix_cache: bool | None = None
    routed_experts_prompt_start: Count | None = 0

    flat_logprobs: _OnlyFalse | None = None
    logprob_token_ids: _OnlyEmpty | None = None
    prompt_logprob_token_ids: _OnlyEmpty | None = None
    prompt_logprob_start: _OnlyZero | None = None
    trace_decode_token_ids: _OnlyEmpty | None = None
    repetition_detection: Unsupported | None = None
    extra_args: _OnlyEmptyObject | None = None


class InferenceRequest(Body, kw_only=True):
    """Of /inference/v1/generate, as vLLM has it.

    token_ids: The prompt.
    sampling_params: How tokens are chosen, and what ends an answer.
    request_id: The request's name, for /abort and /abort_request.
    model: The model's name; left out: the one that is served.
    stream: Send events while tokens come, each with those that are new.
    stream_options: Needs `stream` to be true.
    cache_salt: Requests share cached prefixes only if their salts are equal.
    priority: A smaller number runs first.
    return_token_ids: Give the prompt's token ids, too.
    kv_transfer_params: What a server with --role prefill has answered to the same request.
    timeout: Seconds after which the request is given up with status 504; the server's own limit
        holds too. Not vLLM's.
    token_offsets: Changes nothing: what /render gives besides the ids.
    assistant_tokens_mask: The same.
    parse_context: Changes nothing: answers are token ids.
    """

    token_ids: FilledIds
    sampling_params: InferenceSampling
    request_id: Name | None = None
    model: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = 0
    return_token_ids: bool | None = False
    kv_transfer_params: KvTransferParams | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None
    token_offsets: list[Any] | None = None
    assistant_tokens_mask: list[Any] | None = None
    parse_context: AnyObject | Word | None = None

    output_mode: _OnlyTokens | None = None
    reasoning_ended: _OnlyTrue | None = None
    reasoning_parser_kwargs: _OnlyEmptyObject | None = None
    features: Unsupported | None = None
    content_parts: _OnlyEmpty | None = None
    ec_transfer_params: Unsupported | None = None


@dataclass(frozen=True, slots=True)
class Inference:
    """A request of /inference/v1/generate. with_prompt: its ids are answered, too."""

    model: str | None
    prompt: AskedPrompt
    with_prompt: bool


@dataclass(frozen=True, slots=True)
class PreparedInference(PreparedTokens):
    """The same in tokens."""

    with_prompt: bool


def parse_inference(values: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> Inference:
    """Of a body's JSON. Raises InvalidRequestError naming the first field that is wrong."""
    body = read(InferenceRequest, values, options)
    words, sampling = Words(f"{SAMPLING}."), body.sampling_params
    budget = sampling.thinking_token_budget
    answer = AnswerRequest(
        **{name: getattr(sampling, name) for name in Sampling.__struct_fields__},
        structured_outputs=sampling.structured_outputs,
        model=body.model,
        stream=body.stream,
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
        priority=body.priority,
        kv_transfer_params=body.kv_transfer_params,
        timeout=body.timeout,
        return_token_ids=True,
    )
    with words.used():
        wanted = generation_of(
            answer,
            options,
            max_tokens_field="max_tokens",
            max_tokens=default_max_tokens(sampling.max_tokens, sampling.min_tokens, options),
            logprobs=sampling.logprobs,
            thinking_token_budget=None if budget is None or budget < 0 else budget,
        )
    params = replace(
        wanted.params,
        prompt_logprobs=sampling.prompt_logprobs,
        return_routed_experts=None,  # wherever the server keeps them, as vLLM does
        routed_experts_prompt_start=sampling.routed_experts_prompt_start or 0,
    )
    wanted = replace(wanted, params=params)
    asked = AskedPrompt(
        "token_ids", body.token_ids, replace(wanted, called=body.request_id or ""), words
    )
    return Inference(body.model or None, asked, bool(body.return_token_ids))
