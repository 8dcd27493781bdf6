"""The body of /generate, SGLang's.

Every field of SGLang's that text can have is here: honoured, refused unless it says what is so
anyway, or taken without effect because it changes no token of the answer.
"""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from megatron_hybrid import request as limits
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.protocol.generation_request import MAX_ANSWERS
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, only
from megatron_hybrid.server.http.protocol.requests import (
    MAX_STOP_STRINGS,
    MAX_TIMEOUT,
    Budget,
    Count,
    CustomParams,
    Factor,
    Filled,
    FilledIds,
    GrammarText,
    Length,
    LogitBias,
    Logprobs,
    Penalty,
    Share,
    StopString,
    TokenId,
)
from megatron_hybrid.server.http.protocol.tools import AnyObject, Name

_PLAIN = SamplingParams()
_OnlyFalse, _OnlyOne, _OnlyEmpty = only(False), only(1), only([], "")


class GenerateSampling(Body):
    """SGLang's sampling_params.

    max_new_tokens: The answer's longest length; left out: 128, or fewer where these do not fit;
        null: as many as fit; 0: the prompt is computed.
    min_new_tokens: The answer does not end by itself before these.
    stop: Strings that end the answer.
    stop_token_ids: Token ids that end the answer.
    ignore_eos: Go on after the model's own end of the answer.
    temperature: 0 takes the most likely token.
    top_p: Only the likeliest tokens that together have this probability.
    top_k: Only this many of the likeliest tokens; -1: all.
    min_p: Only tokens this likely in relation to the likeliest one.
    frequency_penalty: Subtracted from a token's logit as often as the answer holds it.
    presence_penalty: Subtracted from the logits of tokens that the answer holds.
    repetition_penalty: Makes tokens of prompt and answer less likely if above 1.
    n: Answers to each prompt.
    sampling_seed: The same seed gives the same tokens, whatever else runs beside it.
    logit_bias: By token id, what is added to its logit.
    json_schema: A JSON Schema that the answer follows, as an object or as text.
    regex: A regular expression that matches the whole answer.
    ebnf: A grammar, in GBNF or Lark.
    structural_tag: Marks that hold what stands between them, as an object or as text.
    skip_special_tokens: false: the text shows special tokens, too.
    no_stop_trim: The text ends with what has ended it, a stop string or the text of an id.
    spaces_between_special_tokens: Changes nothing: the tokenizers that are read here put none.
    stream_interval: Changes nothing: an event comes with every step that has news.
    custom_params: Holds a budget of thoughts.
    """

    max_new_tokens: Count | None | UnsetType = UNSET
    min_new_tokens: Count | None = 0
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = False
    temperature: Annotated[float, Meta(ge=0.0, le=limits.MAX_TEMPERATURE)] | None = (
        _PLAIN.temperature
    )
    top_p: Annotated[float, Meta(ge=limits.MIN_TOP_P, le=1.0)] | None = _PLAIN.top_p
    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKENS)] | None = -1
    min_p: Share | None = _PLAIN.min_p
    frequency_penalty: Penalty | None = _PLAIN.frequency_penalty
    presence_penalty: Penalty | None = _PLAIN.presence_penalty
    repetition_penalty: Factor | None = _PLAIN.repetition_penalty
    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = 1
    sampling_seed: (
        Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})] | None
    ) = None
    logit_bias: LogitBias | None = None
    json_schema: AnyObject | GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    structural_tag: AnyObject | GrammarText | None = None
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    spaces_between_special_tokens: bool | None = True
    stream_interval: Length | None = None
    custom_params: CustomParams | None = None

    stop_regex: _OnlyEmpty | None = None
    beam_width: _OnlyOne | None = None


class GenerateRequest(Body):
    """Of /generate, as SGLang has it. What is said for each prompt may be one value for all of
    them, or a list with one for each.

    text: A prompt, or several.
    input_ids: A prompt in token ids, or several; not beside text.
    sampling_params: How tokens are chosen, and what ends an answer; for each prompt.
    rid: The request's name, for /abort_request; for each prompt.
    return_logprob: Give the log-probability of every token of the answer; for each prompt.
    logprob_start_len: With return_logprob: also those of the prompt, from this position on; -1:
        none; for each prompt.
    top_logprobs_num: With return_logprob: also this many likeliest tokens; for each prompt.
    return_text_in_logprobs: Their texts, too.
    return_prompt_token_ids: Give the prompt's token ids, too.
    return_routed_experts: Give the experts that every token of prompt and answer was sent to.
    routed_experts_start_len: Only from this position in the prompt on; for each prompt.
    stream: Send events while tokens come, each with all that there is so far.
    model: The model's name; left out: the one that is served.
    priority: A larger number runs first, as SGLang has it.
    cache_salt: Requests share cached prefixes only if their salts are equal.
    extra_key: The same, beside cache_salt.
    timeout: Seconds after which the request is given up with status 504; the server's own limit
        holds too. Not SGLang's.
    lora_path: The adapter's name; for each prompt.
    max_thinking_tokens: A budget of thoughts, as in sampling_params.custom_params.
    http_worker_ipc: Changes nothing: it is between SGLang's own processes.
    session_id: Changes nothing: equal beginnings of prompts are found by themselves.
    conversation_id: The same.
    routing_key: Changes nothing here; routers read it.
    routed_dp_rank: Changes nothing: the server itself knows where a prompt is cached.
    data_parallel_rank: The older name of routed_dp_rank.
    disagg_prefill_dp_rank: The same.
    kv_router_hint: The same.
    bootstrap_host: Changes nothing: what routers add for a prefill server of SGLang's.
    bootstrap_port: The same.
    bootstrap_room: The same.
    bootstrap_pair_key: The same.
    decode_tp_size: The same.
    log_metrics: Changes nothing: every request is counted.
    no_logs: Changes nothing: neither prompts nor answers are logged.
    custom_labels: Changes nothing: metrics have no labels of clients.
    external_trace_header: Changes nothing: HTTP headers say it.
    received_time: Changes nothing: time counts from when the request came here.
    """

    text: Filled | Annotated[list[Filled], Meta(min_length=1, max_length=MAX_ANSWERS)] | None = None
    input_ids: Annotated[list[TokenId | FilledIds], Meta(min_length=1)] | None = None
    sampling_params: (
        GenerateSampling | Annotated[list[GenerateSampling], Meta(min_length=1)] | None
    ) = None
    rid: Name | list[Name] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: Budget | list[Budget] | None = -1
    top_logprobs_num: Logprobs | list[Logprobs] | None = 0
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    routed_experts_start_len: Count | list[Count] | None = 0
    stream: bool | None = False
    model: Name | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = 0
    cache_salt: Name | None = None
    extra_key: Name | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None
    lora_path: Name | list[Name | None] | None = None
    max_thinking_tokens: Budget | None = None

    http_worker_ipc: Name | None = None
    session_id: Name | None = None
    conversation_id: Name | None = None
    routing_key: Name | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    kv_router_hint: AnyObject | None = None
    bootstrap_host: Name | list[Name | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    bootstrap_pair_key: Name | list[Name | None] | None = None
    decode_tp_size: int | list[int | None] | None = None
    log_metrics: bool | None = True
    no_logs: bool | None = False
    custom_labels: AnyObject | None = None
    external_trace_header: AnyObject | None = None
    received_time: float | None = None

    token_ids_logprob: _OnlyEmpty | None = None
    return_indexer_topk: _OnlyFalse | None = None
    return_sampling_mask: _OnlyFalse | None = None
    sampling_logprobs_mode: Unsupported | None = None
    return_flat_raw_top_logprobs: _OnlyFalse | None = None
    return_flat_raw_top_logprobs_b64: _OnlyFalse | None = None
    return_hidden_states: _OnlyFalse | None = None
    return_entropy: _OnlyFalse | None = None
    return_bytes: _OnlyFalse | None = None
    background: _OnlyFalse | None = None
    require_reasoning: _OnlyFalse | None = None
    session_params: Unsupported | None = None
    input_embeds: Unsupported | None = None
    positional_embed_overrides: Unsupported | None = None
    custom_logit_processor: Unsupported | None = None
    multi_item_delimiter_indices: Unsupported | None = None
    image_data: _OnlyEmpty | None = None
    video_data: _OnlyEmpty | None = None
    audio_data: _OnlyEmpty | None = None
    modalities: _OnlyEmpty | None = None
    use_audio_in_video: _OnlyFalse | None = None
