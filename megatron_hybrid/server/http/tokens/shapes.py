"""What the routes for tokens answer, for /openapi.json."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Any, Literal

from megatron_hybrid.server.http.protocol.answers import Count, Usage, optional, says, shape

_ENTRY = says(
    tuple[float | None, Count, str | None], "Log-probability, token id, and its text if asked for."
)
_SPANS = says(
    list[shape("WeightSpan", version=str, start=Count, end=Count)],  # type: ignore[misc]
    "Which weights have computed which tokens, once it has ended.",
)
_LOGPROBS = "Only if return_logprob was true."
_TOPS = "Only if top_logprobs_num was given, too."
Generated = shape(
    "Generated",
    index=optional(says(Count, "In events of several answers: which one.")),
    text=str,
    output_ids=list[Count],
    prompt_token_ids=optional(says(list[Count], "Only if return_prompt_token_ids was true.")),
    meta_info=shape(
        "MetaInfo",
        id=says(str, "What /abort_request takes."),
        finish_reason=says(
            shape(
                "GenerateEnd",
                type=Literal["stop", "length", "abort"],
                matched=optional(says(int | str | None, "The id or the string that ended it.")),
                length=optional(Count),
                message=optional(str),
                status_code=optional(None),
                err_type=optional(None),
            )
            | None,
            "null in events before the last.",
        ),
        prompt_tokens=Count,
        completion_tokens=Count,
        cached_tokens=optional(says(Count, "Prompt tokens that were not computed.")),
        weight_version=says(str, "Of the weights that have computed its last token."),
        weight_versions=optional(_SPANS),
        routed_experts=optional(
            says(
                str,
                "Once it has ended, if return_routed_experts was true: int32 in base64, "
                "[prompt_tokens + completion_tokens - 1 - start, num_hidden_layers, top_k].",
            )
        ),
        routed_experts_start_len=optional(says(Count, "The start, beside them.")),
        e2e_latency=optional(says(float, "Seconds, once it has ended.")),
        input_token_logprobs=optional(says(list[_ENTRY], _LOGPROBS)),
        output_token_logprobs=optional(says(list[_ENTRY], _LOGPROBS)),
        output_token_logprobs_length=optional(says(Count, _LOGPROBS)),
        input_top_logprobs=optional(says(list[list[_ENTRY] | None], _TOPS)),
        output_top_logprobs=optional(says(list[list[_ENTRY]], _TOPS)),
    ),
)
GeneratedOrList = Generated | says(list[Generated], "Of several prompts, or with n above 1.")

_TOKEN: dict[str, Any] = {
    "token": says(str, "token_id:N, as older clients want it."),
    "token_id": Count,
    "logprob": float,
    "rank": says(Count | None, "Among the likeliest that were asked for."),
    "bytes": None,
}
_CHOICE: dict[str, Any] = {
    "index": Count,
    "token_ids": list[Count],
    "logprobs": shape(
        "InferenceLogprobs",
        content=list[  # type: ignore[misc]
            shape(
                "InferenceToken",
                **_TOKEN,
                top_logprobs=list[shape("InferenceLikely", **_TOKEN)],  # type: ignore[misc]
            )
        ],
    )
    | None,
    "stop_reason": says(int | str | None, "The id or the string that ended it."),
    "weight_versions": _SPANS | None,
    "routed_experts": says(
        shape(
            "RoutedExperts",
            data=says(str, "In base64, in C order."),
            shape=says(tuple[Count, Count, Count], "Positions, num_hidden_layers, top_k."),
            start=says(Count, "The first position."),
            dtype=Literal["uint8", "uint16"],
        )
        | None,
        "Once it has ended, with --enable-return-routed-experts.",
    ),
}
_REASON = Literal["stop", "length", "abort"]
_HEAD: dict[str, Any] = {
    "request_id": says(str, "What /abort and /abort_request take."),
    "output_mode": Literal["tokens"],
}
_OF_PROMPT = shape("PromptLogprob", logprob=float, rank=Count | None, decoded_token=None)
Inferred = shape(
    "Inferred",
    **_HEAD,
    model=str,
    created=Count,
    choices=list[shape("InferenceChoice", **_CHOICE, finish_reason=_REASON)],  # type: ignore[misc]
    usage=Usage,
    prompt_token_ids=says(list[Count] | None, "Only if return_token_ids was true."),
    prompt_logprobs=says(
        list[dict[str, _OF_PROMPT] | None] | None,
        "By token id, the prompt's own first; only if prompt_logprobs was given.",
    ),
    kv_transfer_params=shape("InferenceHandedOver", peer=str) | None,
)
InferredChunk = shape(
    "InferredChunk",
    **_HEAD,
    choices=list[  # type: ignore[misc]
        shape("InferenceChunkChoice", **_CHOICE, finish_reason=_REASON | None)
    ],
    usage=Usage | None,
    prompt_token_ids=optional(says(list[Count], "In the first event, if it was asked for.")),
)
WeightVersion = shape("WeightVersion", weight_version=str)
Healthy = shape("Healthy", status=Literal["ok"])
