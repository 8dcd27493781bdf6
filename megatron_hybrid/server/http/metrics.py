"""The page that Prometheus scrapes: the engine's figures, asked for at each scrape.

Everything is measured in the engine processes, so it is the same whichever front end answers.
docs/server_metrics.md describes the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from megatron_hybrid.cache.checkpoint_placement import KINDS
from megatron_hybrid.cache.prefix_store import LOST_CAUSES
from megatron_hybrid.request import FinishReason
from megatron_hybrid.server.replicas.replica_set import ReplicaSet

PREFIX = "megatron_hybrid:"
TAKES_REQUESTS = ("ok", "paused")

# Prometheus name: the engine's name for it (docs/prefix_cache.md), and what it counts.
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests"),
    "prompt_tokens_cached": ("skipped_tokens", "Prompt tokens that were not computed"),
    "prompt_tokens_computed": ("computed_tokens", "Prompt tokens that were computed"),
    "prompt_tokens_recomputed": ("recomputed_tokens", "Computed again after a preemption"),
    "generation_tokens": ("generated_tokens", "Tokens of the answers"),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the KV cache"),
    "prefix_cache_hits": ("matched_tokens", "Prompt tokens whose KV was found"),
    "state_cache_queries": ("matched_tokens", "Prompt tokens with KV, for which a state is needed"),
    "state_cache_hits": ("skipped_tokens", "Prompt tokens that a cached state let us skip"),
    "num_preemptions": ("preemptions", "Times that a running request had to make room"),
    "spec_decode_num_drafts": ("drafts", "Steps of requests that had drafts"),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Drafted tokens"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that held"),
    "kv_blocks_evicted": ("kv_evictions", "KV blocks that made room for others"),
    "states_evicted": ("state_evictions", "Cached states that made room for others"),
}
# The label's values are there from the start, or the first of its kind would be no increase to
# Prometheus.
_LABELLED_COUNTERS = {
    "request_success": (
        "requests_finished",
        "finished_reason",
        tuple(reason.value for reason in FinishReason),
        "Answers that ended, by reason",
    ),
    "state_checkpoints_published": ("checkpoints_published", "kind", KINDS, "States kept"),
    "state_checkpoints_read": ("checkpoints_read", "kind", KINDS, "States used"),
    "prefix_lost_tokens": (
        "lost_tokens",
        "cause",
        LOST_CAUSES,
        "Tokens that matched but were computed again",
    ),
    "tier_writes": ("tier_writes", "tier", (), "Prefixes written to memory behind the device's"),
    "tier_fetches": ("tier_fetches", "tier", (), "Prefixes fetched from there"),
    "tier_bytes_written": ("tier_bytes_written", "tier", (), "Bytes written there"),
    "tier_bytes_fetched": ("tier_bytes_fetched", "tier", (), "Bytes fetched from there"),
    "tier_tokens_fetched": ("tier_tokens_fetched", "tier", (), "Tokens that this let us skip"),
    "tier_refused": ("tier_refused", "reason", (), "Prefixes that were not moved, by reason"),
    "spec_decode_num_accepted_tokens_per_pos": (
        "accepted_by_position",
        "position",
        (),
        "Drafted tokens that held, by their place in the draft",
    ),
    "lora_requests": ("lora_requests", "lora_name", (), "Answers that were asked of an adapter"),
    "weight_updates": ("weight_updates", "outcome", (), "Updates of the weights"),
}
_GAUGES = {
    "num_requests_running": ("requests_running", "Requests that run"),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for memory or a row"),
    "paused": ("paused", "Whether no request is begun (POST /pause)"),
    "kv_blocks": ("kv_blocks", "KV blocks in all"),
    "state_slots": ("state_slots", "Slots for recurrent states in all"),
    "lora_slots": ("lora_slots", "Adapters that the device has room for"),
    "lora_slots_used": ("lora_slots_used", "Of these, loaded ones and those still in use"),
    "lora_adapters": ("lora_adapters", "Adapters that requests may have"),
    "weight_epoch": ("epoch", "How often the weights were updated"),
}
_LABELLED_GAUGES = {
    "tier_bytes": ("tier_bytes", "tier", (), "Memory behind the device's"),
    "tier_bytes_used": ("tier_bytes_used", "tier", (), "What of it holds something"),
    "tier_states": ("tier_states", "tier", (), "Cached states there"),
    "tier_rate": ("tier_rate", "tier", (), "Bytes a second that come from there, as measured"),
    "weight_bytes": ("weight_bytes", "format", (), "Memory of one rank's weights"),
    "lora_requests_running": ("lora_requests_running", "lora_name", (), "Of an adapter, that run"),
    "lora_requests_waiting": ("lora_requests_waiting", "lora_name", (), "Of an adapter, that wait"),
    "start_seconds": ("start_seconds", "part", (), "What the engine's start took"),
}
_SHARES = {
    "kv_cache_usage_perc": ("kv_used", "kv_blocks", "Share of KV blocks in use by requests, 0-1"),
    "state_cache_usage_perc": ("state_used", "state_slots", "Share of state slots in use, 0-1"),
    "window_cache_usage_perc": ("window_used", "window_blocks", "Share of window blocks in use"),
}
_BY_AGE = {
    "kv_blocks_cached": ("kv_cached_by_age", "Cached KV blocks that nobody uses, by age"),
    "state_slots_cached": ("state_cached_by_age", "Cached states, by age"),
}
LATENCIES = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "From one token of an answer to the next",
    "e2e_request_latency_seconds": "From a request's arrival to its end",
    "request_queue_time_seconds": "From a request's arrival to its admission",
    "request_prefill_time_seconds": "From a request's admission to its first token",
}


class ServerMetrics:
    """Renders the figures of one engine, or of each of several with its number as the label
    `engine`, as vLLM has it."""

    def __init__(self, engine: ReplicaSet) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """The text that Prometheus scrapes. While the engine is down: `up 0` and nothing else."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each page."""
        # Without an answer, no figures of an earlier one: those of several front ends would
        # differ, and a counter that falls looks like a restart.
        values = self._engine.stats_by_engine()
        states = self._engine.states()
        labels = ["engine"] if len(states) > 1 else []

        def family(kind: Any, name: str, text: str, samples: Iterable[Any], *own: str) -> Metric:
            """samples: the engine with the metric's own labels, and what there is to say of it."""
            made = kind(PREFIX + name, text, labels=[*labels, *own])
            for named, *sample in samples:
                made.add_metric(named if labels else named[1:], *sample)
            return cast(Metric, made)

        def histogram(name: str, text: str, found: list[tuple[str, Any]]) -> Metric:
            samples = [([engine], _buckets(one), one["sum"]) for engine, one in found]
            return family(HistogramMetricFamily, name, text, samples)

        up = [([e], e in values or one["status"] in TAKES_REQUESTS) for e, one in states.items()]
        yield family(GaugeMetricFamily, "up", "Whether the engine takes requests", up)
        if not values:
            return
        each = values.items()
        for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, (key, text) in table.items():
                yield family(kind, name, text, [([e], one[key]) for e, one in each])
        for kind, labelled in (
            (CounterMetricFamily, _LABELLED_COUNTERS),
            (GaugeMetricFamily, _LABELLED_GAUGES),
        ):
            for name, (key, label, known, text) in labelled.items():
                counts = [(e, dict.fromkeys(known, 0) | dict(one[key])) for e, one in each]
                samples = [([e, value], n) for e, named in counts for value, n in named.items()]
                yield family(kind, name, text, samples, label)
        for name, (part, whole, text) in _SHARES.items():
            shares = [([e], one[part] / one[whole] if one[whole] else 0.0) for e, one in each]
            yield family(GaugeMetricFamily, name, text, shares)
        if (ready := self._engine.ready) is not None and (size := ready.cache.block_size):
            # As vLLM has it: routers read the labels.
            text = "How the KV cache is cut, in labels"
            sizes = [([e, str(size), str(one["kv_blocks"])], 1) for e, one in each]
            own = ("block_size", "num_gpu_blocks")
            yield family(GaugeMetricFamily, "cache_config_info", text, sizes, *own)
        # As vLLM has it: routers read the labels, and of several samples the latest.
        text = "Adapters that requests may have, in labels"
        loaded = [
            ([e, str(one["lora_slots"]), ",".join(one["lora_requests"]), ""], time.time())
            for e, one in each
        ]
        named = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        yield family(GaugeMetricFamily, "lora_requests_info", text, loaded, *named)
        for name, (key, text) in _BY_AGE.items():
            samples = [([e, age], count) for e, one in each for age, count in one[key]]
            yield family(GaugeMetricFamily, name, text, samples, "age")
        for name, text in LATENCIES.items():
            yield histogram(name, text, [(e, one["latency"][name]) for e, one in each])
        text = "Tokens that a step computes, prompts' and answers'"
        found = [(e, one["iteration_tokens"]) for e, one in each]
        yield histogram("iteration_tokens_total", text, found)
        text = "From the beginning of an update of the weights to its end"
        found = [(e, one["weight_update_seconds"]) for e, one in each]
        yield histogram("weight_update_seconds", text, found)


def _buckets(figures: Mapping[str, Any]) -> list[tuple[str, int]]:
    counted = [(repr(float(bound)), count) for bound, count in figures["buckets"]]
    return [*counted, ("+Inf", figures["count"])]
