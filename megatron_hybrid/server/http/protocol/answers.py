"""What the server answers, one shape a statement, named as in OpenAI's API; the figures' meanings
are in docs/server_metrics.md."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, defstruct

from megatron_hybrid.cache import tier
from megatron_hybrid.cache.prefix_store import Occupancy
from megatron_hybrid.server.http.metrics import LATENCIES


def shape(name: str, /, *, more: bool = False, **fields: Any) -> Any:
    """An object with exactly these fields, by their types; more: and perhaps others."""
    return defstruct(name, _parts(fields), kw_only=True, forbid_unknown_fields=not more)


def tagged(name: str, tag: str, /, **fields: Any) -> Any:
    """An object of one of several kinds, whose field `type` says which."""
    return defstruct(
        name, _parts(fields), kw_only=True, forbid_unknown_fields=True, tag=tag, tag_field="type"
    )


def _parts(fields: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (field, *(kind if isinstance(kind, tuple) else (kind,))) for field, kind in fields.items()
    ]


def optional(kind: Any) -> tuple[Any, Any]:
    """Of a field that may be missing."""
    return kind | UnsetType, UNSET


def says(kind: Any, description: str) -> Any:
    """The type with what /openapi.json says of it."""
    return Annotated[kind, Meta(description=description)]


Count = Annotated[int, Meta(ge=0)]
_TOKEN_IDS = optional(says(list[Count], "Only if return_token_ids was true."))
_VERSIONS = optional(
    says(
        list[shape("VersionSpan", version=str, start=Count, end=Count)],  # type: ignore[misc]
        "Which tokens, from start to before end, are of which weights; at the end of an answer "
        "that goes on over an update, or if return_weight_versions was true.",
    )
)
_REASON = Literal["stop", "length", "tool_calls", "abort"]

_ERROR = shape(
    "ErrorObject",
    message=str,
    type=str,
    param=says(str | None, "The field that is wrong."),
    code=str | None,
)
Error = shape("Error", error=_ERROR)
Usage = shape(
    "Usage",
    prompt_tokens=Count,
    completion_tokens=Count,
    total_tokens=Count,
    # Missing with --no-report-cached-tokens.
    prompt_tokens_details=optional(
        shape("PromptDetails", cached_tokens=says(Count, "Prompt tokens that were not computed."))
    ),
    completion_tokens_details=optional(  # only where the model thinks
        shape("AnswerDetails", reasoning_tokens=says(Count, "Tokens of thoughts and their marks."))
    ),
)
Model = shape(
    "Model",
    id=str,
    object=Literal["model"],
    created=Count,
    owned_by=str,
    max_model_len=int | None,
    # What Anthropic's clients look for.
    type=Literal["model"],
    display_name=str,
    created_at=str,
    lifecycle=Literal["active"],
    root=says(str, "The folder of its tokenizer; of an adapter, its own."),
    parent=says(str | None, "Of an adapter, the model."),
)
ModelList = shape(
    "ModelList",
    object=Literal["list"],
    data=list[Model],
    has_more=Literal[False],
    first_id=str,
    last_id=str,
)
ToolCall = shape(
    "ToolCall",
    index=optional(Count),
    id=optional(str),
    type=optional(Literal["function"]),
    function=shape("CalledWith", name=optional(str), arguments=optional(str)),
)
_TOKEN: dict[str, Any] = {
    "token": str,
    "bytes": list[Annotated[int, Meta(ge=0, le=255)]],
    "logprob": float,
}
_LIKELY = shape("LikelyToken", **_TOKEN)
ChosenToken = shape("Token", **_TOKEN, top_logprobs=list[_LIKELY])
ChatLogprobs = shape("ChatLogprobs", content=list[ChosenToken], refusal=None)
CompletionLogprobs = shape(
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[Count],
)
_THOUGHTS: dict[str, Any] = {
    "reasoning_content": optional(says(str, "What was thought before the content.")),
    "reasoning": optional(says(str, "The same as reasoning_content.")),
}
_CHAT_CHOICE: dict[str, Any] = {
    "index": Count,
    "logprobs": ChatLogprobs | None,
    "token_ids": _TOKEN_IDS,
    "weight_versions": _VERSIONS,
}
ChatChoice = shape(
    "ChatChoice",
    **_CHAT_CHOICE,
    message=shape(
        "ChatMessage",
        role=Literal["assistant"],
        content=str | None,
        refusal=None,
        **_THOUGHTS,
        tool_calls=optional(list[ToolCall]),
    ),
    finish_reason=_REASON,
)
ChatChunkChoice = shape(
    "ChatChunkChoice",
    **_CHAT_CHOICE,
    delta=shape(
        "ChatDelta",
        role=optional(Literal["assistant"]),
        content=optional(str | None),
        **_THOUGHTS,
        tool_calls=optional(list[ToolCall]),
    ),
    finish_reason=_REASON | None,
)
_TEXT_CHOICE: dict[str, Any] = {
    "index": Count,
    "text": str,
    "logprobs": CompletionLogprobs | None,
    "token_ids": _TOKEN_IDS,
    "prompt_token_ids": _TOKEN_IDS,
    "weight_versions": _VERSIONS,
}
TextChoice = shape("TextChoice", **_TEXT_CHOICE, finish_reason=_REASON)
TextChunkChoice = shape("TextChunkChoice", **_TEXT_CHOICE, finish_reason=_REASON | None)
_HANDED_OVER: dict[str, Any] = {
    "kv_transfer_params": optional(
        shape(
            "HandedOver",
            peer=says(str, "Where another server goes on; only with --role prefill."),
            request=optional(
                says(str, "In the first event of a stream: what computes the prompt.")
            ),
        )
    )
}
_HEAD: dict[str, Any] = {
    "id": str,
    "created": Count,
    "model": str,
    "system_fingerprint": says(str | None, "Of what has computed it; /server_info has its parts."),
}
_CHUNK: dict[str, Any] = {**_HEAD, **_HANDED_OVER, "usage": optional(Usage | None)}
_TEXT = Literal["text_completion"]
ChatCompletion = shape(
    "ChatCompletion",
    **_HEAD,
    **_HANDED_OVER,
    object=Literal["chat.completion"],
    choices=list[ChatChoice],
    usage=Usage,
    prompt_token_ids=_TOKEN_IDS,
)
ChatCompletionChunk = shape(
    "ChatCompletionChunk",
    **_CHUNK,
    object=Literal["chat.completion.chunk"],
    choices=list[ChatChunkChoice],
    prompt_token_ids=_TOKEN_IDS,
)
Completion = shape(
    "Completion",
    **_HEAD,
    **_HANDED_OVER,
    object=_TEXT,
    choices=list[TextChoice],
    usage=Usage,
)
CompletionChunk = shape("CompletionChunk", **_CHUNK, object=_TEXT, choices=list[TextChunkChoice])
_LIKELY_ID = shape("LikelyId", token_id=Count, logprob=float)
Scores = shape(
    "Scores",
    **_HEAD,
    object=Literal["score"],
    scores=list[  # type: ignore[misc]
        shape(
            "Score",
            token_ids=list[Count],
            logprobs=says(list[float], "Of each of these tokens."),
            total_logprob=says(float, "Their sum."),
            top_logprobs=optional(
                says(
                    list[list[_LIKELY_ID]],
                    "At each place the likeliest tokens; only if top_logprobs was given.",
                )
            ),
        )
    ],
    usage=Usage,
)

Tokens = shape("Tokens", tokens=list[Count], count=Count, max_model_len=Count)
Text = shape("Text", prompt=str)
Aborted = shape("Aborted", aborted=Count)
Done = shape("Done", status=Literal["ok"])
_WEIGHTS: dict[str, Any] = {
    "epoch": says(Count, "How often the weights were updated."),
    "weight_version": says(str, "What answers call the weights."),
}
Controlled = shape("Controlled", status=Literal["ok"], **_WEIGHTS)
Succeeded = shape("Succeeded", success=Literal[True], message=str, **_WEIGHTS)
CheckedWeights = shape(
    "CheckedWeights",
    success=Literal[True],
    message=str,
    checksum=optional(says(str, "Of all weights; not with reset_tensors.")),
    **_WEIGHTS,
)
WorldSize = shape("WorldSize", world_size=says(Count, "Ranks of the model."))
Failed = shape("Failed", success=Literal[False], message=str, error=_ERROR)
Paused = shape("Paused", is_paused=bool)
Sleeping = shape("Sleeping", is_sleeping=bool)
Loaded = shape(
    "Loaded",
    status=Literal["ok"],
    success=Literal[True],
    error_message=None,
    loaded_adapters=says(dict[str, str], "All adapters, and their folders."),
)
NotLoaded = shape("NotLoaded", success=Literal[False], error_message=str, error=_ERROR)
WeightInfo = shape("WeightInfo", weight_version=str)
Load = shape("Load", server_load=Count)
Version = shape("Version", version=str)
_REPLICA_INFO = shape("ReplicaInfo", system_fingerprint=str)
ServerInfo = shape(
    "ServerInfo",
    served_model_name=str,
    version=optional(str),
    model_path=optional(says(str, "As in /model_info.")),
    tp_size=optional(Count),
    pp_size=optional(Count),
    ep_size=optional(Count),
    dp_size=optional(says(Count, "Replicas.")),
    num_gpus=optional(says(Count, "Ranks of all replicas.")),
    dtype=optional(str | None),
    kv_cache_dtype=optional(str | None),
    quantization=optional(str | None),
    enable_memory_saver=optional(says(bool, "Whether it can sleep.")),
    enable_return_routed_experts=optional(bool),
    weight_bytes=optional(
        says(dict[str, Count], "What one rank's weights take, by format, once the engine is there.")
    ),
    system_fingerprint=optional(
        says(str | None, "As in answers that begin now; null where those of replicas differ.")
    ),
    fingerprint=optional(
        says(dict[str, dict[str, Any]], "What it is made of: device, versions, mode, model.")
    ),
    engines=optional(
        says(dict[str, _REPLICA_INFO], "With several replicas: each of them, by its number.")
    ),
)
ModelInfo = shape(
    "ModelInfo",
    model_path=says(str, "The folder of its tokenizer, on the server's machine."),
    tokenizer_path=str,
    is_generation=Literal[True],
    has_image_understanding=Literal[False],
    has_audio_understanding=Literal[False],
    weight_version=says(str | None, "What /get_weight_version says; null while the engine loads."),
)
RunningOrWaiting = shape("RunningOrWaiting", load=Count)
Loads = shape(
    "Loads",
    timestamp=says(str, "As ISO 8601 has it."),
    dp_rank_count=Count,
    loads=list[  # type: ignore[misc]
        shape(
            "ReplicaLoad",
            dp_rank=says(Count, "The replica's number."),
            num_running_reqs=Count,
            num_waiting_reqs=Count,
            num_total_reqs=Count,
            num_used_tokens=says(Count, "Of KV that running requests hold."),
            max_total_num_tokens=says(Count, "Of KV in all."),
            token_usage=says(float, "The share in use of KV or of states, what is more; 0-1."),
        )
    ],
)
RenderedPrompt = shape(
    "RenderedPrompt",
    request_id=str,
    token_ids=list[Count],
    model=str,
    stream=bool,
    cache_salt=says(str | None, "As KV events have it: with the key's own, if that has one."),
    priority=int,
)
# OpenAPI says what else there is.
Description = Annotated[dict[str, Any], Meta(extra_json_schema={"required": ["openapi", "paths"]})]

_REPLICA = shape(
    "ReplicaHealth",
    status=Literal["ok", "paused", "loading", "draining", "down"],
    pid=optional(Count),
)
Health = shape(
    "Health",
    status=Literal["ok", "paused"],
    engine_pid=says(Count, "The process id of the engine, or of the first one that lives."),
    engines=optional(
        says(dict[str, _REPLICA], "With several replicas: each of them, by its number.")
    ),
)

# Counters since the start: plain numbers, and numbers by reason, cause or kind.
COUNTERS = """
    steps requests_admitted prompt_tokens computed_tokens skipped_tokens recomputed_tokens
    reskipped_tokens matched_tokens decode_tokens generated_tokens preemptions twins_waited
    twin_deferrals twin_tokens_saved drafts draft_tokens accepted_tokens checkpoints_skipped
    kv_evictions state_evictions
""".split()
COUNTERS_BY_NAME = (
    """
    requests_finished lost_tokens checkpoints_published checkpoints_read accepted_by_position
""".split()
    + tier.COUNTERS
)
_COUNTERS: dict[str, Any] = {
    **dict.fromkeys(COUNTERS, Count),
    **dict.fromkeys(COUNTERS_BY_NAME, dict[str, int]),
}
# Of adapters: all that were asked for, and those of now.
LORA_REQUESTS = ("lora_requests", "lora_requests_running", "lora_requests_waiting")
_QUANTILE = says(float | None, "null without observations.")
Histogram = shape(
    "Histogram",
    count=Count,
    sum=float,
    p50=_QUANTILE,
    p95=_QUANTILE,
    buckets=says(list[tuple[float, int]], "Upper bounds, and how many do not exceed them."),
)
Figures = shape(
    "Figures",
    more=True,
    **dict.fromkeys(("requests_running", "requests_waiting", "epoch", *Occupancy._fields), Count),
    paused=bool,
    weight_version=str,
    weight_updates=says(dict[str, Count], "By outcome: done, refused, lost."),
    weight_update_seconds=Histogram,
    lora_slots=says(Count, "What --max-loras says."),
    lora_slots_used=says(Count, "Of adapters that are loaded, or whose requests still run."),
    lora_adapters=says(Count, "Those that requests may have."),
    **dict.fromkeys(LORA_REQUESTS, says(dict[str, Count], "Answers, by the adapter's name.")),
    sleeping=says(dict[str, bool], "What memory is given back, if any can be."),
    sleeping_bytes=Count,
    started=says(float, "By the machine's monotonic clock."),
    **_COUNTERS,
    kv_cached_by_age=list[tuple[str, int]],
    state_cached_by_age=list[tuple[str, int]],
    latency=shape("Latency", **dict.fromkeys(LATENCIES, Histogram)),
    iteration_tokens=Histogram,
    **dict.fromkeys(tier.GAUGES, dict[str, Count]),
    weight_bytes=says(dict[str, Count], "What one rank's weights take, by their format."),
    start_seconds=says(dict[str, float], "Of the start, by part."),
    last_step=says(shape("LastStep", step=Count, **_COUNTERS), "What the last step added."),
    engines=optional(
        says(dict[str, Any], "With several replicas: the figures of each of them, by its number.")
    ),
)
Stats = shape(
    "Stats",
    engine=Figures,
    time=says(float, "Seconds since 1970."),
    model=str,
    uptime=says(float, "Seconds since the engine was built."),
)
