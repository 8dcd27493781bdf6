"""What GET /health and /stats answer, as JSON Schema; docs/server_metrics.md has the meanings."""

from __future__ import annotations

from megatron_hybrid.server.http.field_types import JsonSchema
from megatron_hybrid.server.http.openapi_answers import (
    INTEGER,
    STRING,
    array,
    fixed_object,
    reference,
)

# Counters since the start: plain numbers, and numbers by reason, cause or kind.
COUNTERS = (
    "steps",
    "requests_admitted",
    "prompt_tokens",
    "computed_tokens",
    "skipped_tokens",
    "recomputed_tokens",
    "reskipped_tokens",
    "matched_tokens",
    "decode_tokens",
    "generated_tokens",
    "preemptions",
    "twins_waited",
    "twin_deferrals",
    "twin_tokens_saved",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "checkpoints_skipped",
    "kv_evictions",
    "state_evictions",
)
COUNTERS_BY_NAME = (
    "requests_finished",
    "lost_tokens",
    "checkpoints_published",
    "checkpoints_read",
    "accepted_by_position",
)
_GAUGES = (
    "requests_running",
    "requests_waiting",
    "epoch",
    "kv_blocks",
    "kv_free",
    "kv_used",
    "kv_cached",
    "kv_evictable",
    "state_slots",
    "state_free",
    "state_live",
    "state_used",
    "state_cached",
    "state_evictable",
)
_LATENCIES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
)
_NUMBER: JsonSchema = {"type": "number"}
_QUANTILE: JsonSchema = {"type": ["number", "null"], "description": "null without observations."}


def figures_schemas() -> dict[str, JsonSchema]:
    """By name, to stand under components/schemas."""
    return {
        "Health": fixed_object(
            {
                "status": {"enum": ["ok", "paused"]},
                "engine_pid": {
                    **INTEGER,
                    "description": "The process id of the engine, or of the first one that lives.",
                },
                "engines": {
                    "type": "object",
                    "additionalProperties": fixed_object(
                        {
                            "status": {"enum": ["ok", "paused", "loading", "draining", "down"]},
                            "pid": INTEGER,
                        },
                        "pid",
                    ),
                    "description": "With several replicas: each of them, by its number.",
                },
            },
            "engines",
        ),
        "Histogram": fixed_object(
            {
                "count": INTEGER,
                "sum": _NUMBER,
                "p50": _QUANTILE,
                "p95": _QUANTILE,
                "buckets": {
                    **array(_pair(_NUMBER)),
                    "description": "Upper bounds, and how many do not exceed them.",
                },
            }
        ),
        "Figures": _figures(),
        "Stats": fixed_object(
            {
                "engine": reference("Figures"),
                "time": {**_NUMBER, "description": "Seconds since 1970."},
                "model": STRING,
                "uptime": {**_NUMBER, "description": "Seconds since the engine was built."},
            }
        ),
    }


def _figures() -> JsonSchema:
    counters = {
        **dict.fromkeys(COUNTERS, INTEGER),
        **dict.fromkeys(
            COUNTERS_BY_NAME, {"type": "object", "additionalProperties": {"type": "integer"}}
        ),
    }
    histogram = reference("Histogram")
    properties: dict[str, JsonSchema] = {
        **dict.fromkeys(_GAUGES, INTEGER),
        "paused": {"type": "boolean"},
        "started": {**_NUMBER, "description": "By the machine's monotonic clock."},
        **counters,
        "kv_cached_by_age": array(_pair(STRING)),
        "state_cached_by_age": array(_pair(STRING)),
        "latency": fixed_object(dict.fromkeys(_LATENCIES, histogram)),
        "iteration_tokens": histogram,
        "last_step": {
            **fixed_object({"step": INTEGER, **counters}),
            "description": "What the last step added.",
        },
    }
    required = list(properties)
    properties["engines"] = {
        "type": "object",
        "description": "With several replicas: the figures of each of them, by its number.",
    }
    return {"type": "object", "properties": properties, "required": required}


def _pair(first: JsonSchema) -> JsonSchema:
    """[first, number] as a list of two."""
    return {
        "type": "array",
        "prefixItems": [first, {"type": "integer"}],
        "minItems": 2,
        "maxItems": 2,
    }
