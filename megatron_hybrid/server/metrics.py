"""The page that Prometheus scrapes: the engine's figures, asked for at each scrape.

Everything is measured in the engine process, so it is the same whichever front end answers.
docs/server_metrics.md describes the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

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
from megatron_hybrid.server.subscription import EngineUnavailable

PREFIX = "megatron_hybrid:"

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
    "kv_blocks_evicted": ("kv_evictions", "KV blocks that made room for others"),
    "states_evicted": ("state_evictions", "Cached states that made room for others"),
}
_LABELLED_COUNTERS = {
    "request_success": ("requests_finished", "finished_reason", "Answers that ended, by reason"),
    "state_checkpoints_published": ("checkpoints_published", "kind", "States kept"),
    "state_checkpoints_read": ("checkpoints_read", "kind", "States used"),
    "prefix_lost_tokens": ("lost_tokens", "cause", "Tokens that matched but were computed again"),
}
# There from the start, or the first of its kind would be no increase to Prometheus.
_LABEL_VALUES = {
    "request_success": tuple(reason.value for reason in FinishReason),
    "state_checkpoints_published": KINDS,
    "state_checkpoints_read": KINDS,
    "prefix_lost_tokens": LOST_CAUSES,
}
_GAUGES = {
    "num_requests_running": ("requests_running", "Requests that run"),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for memory or a row"),
    "paused": ("paused", "Whether no request is begun (POST /pause)"),
    "kv_blocks": ("kv_blocks", "KV blocks in all"),
    "state_slots": ("state_slots", "Slots for recurrent states in all"),
}
_SHARES = {
    "kv_cache_usage_perc": ("kv_used", "kv_blocks", "Share of KV blocks in use by requests, 0-1"),
    "state_cache_usage_perc": ("state_used", "state_slots", "Share of state slots in use, 0-1"),
}
_BY_AGE = {
    "kv_blocks_cached": ("kv_cached_by_age", "Cached KV blocks that nobody uses, by age"),
    "state_slots_cached": ("state_cached_by_age", "Cached states, by age"),
}
_LATENCIES = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "From one token of an answer to the next",
    "e2e_request_latency_seconds": "From a request's arrival to its end",
    "request_queue_time_seconds": "From a request's arrival to its admission",
    "request_prefill_time_seconds": "From a request's admission to its first token",
}


class StatsSource(Protocol):
    """What is asked of the engine's client. Both raise EngineUnavailable."""

    def stats(self) -> Mapping[str, Any]:
        """The engine's figures; it may be too busy to answer."""

    def check(self) -> object:
        """Only tells whether the engine takes requests."""


class ServerMetrics:
    """Renders the figures of one engine."""

    def __init__(self, engine: StatsSource) -> None:
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
        values = self._stats()
        up = values is not None or self._is_up()
        yield GaugeMetricFamily(PREFIX + "up", "Whether the engine takes requests", value=up)
        if values is not None:
            yield from _families(values)

    def _stats(self) -> Mapping[str, Any] | None:
        try:
            return self._engine.stats()
        except EngineUnavailable:
            return None

    def _is_up(self) -> bool:
        try:
            self._engine.check()
        except EngineUnavailable:
            return False
        return True


def _families(values: Mapping[str, Any]) -> Iterator[Metric]:
    for name, (key, text) in _COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=values[key])
    for name, (key, label, text) in _LABELLED_COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=[label])
        for kind, count in {**dict.fromkeys(_LABEL_VALUES[name], 0), **values[key]}.items():
            counter.add_metric([kind], count)
        yield counter
    for name, (key, text) in _GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=values[key])
    for name, (part, whole, text) in _SHARES.items():
        share = values[part] / values[whole] if values[whole] else 0.0
        yield GaugeMetricFamily(PREFIX + name, text, value=share)
    for name, (key, text) in _BY_AGE.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["age"])
        for age, count in values[key]:
            gauge.add_metric([age], count)
        yield gauge
    for name, text in _LATENCIES.items():
        yield _histogram(name, text, values["latency"][name])
    text = "Tokens that a step computes, prompts' and answers'"
    yield _histogram("iteration_tokens_total", text, values["iteration_tokens"])


def _histogram(name: str, text: str, figures: Mapping[str, Any]) -> HistogramMetricFamily:
    buckets = [(repr(float(bound)), count) for bound, count in figures["buckets"]]
    buckets.append(("+Inf", figures["count"]))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=figures["sum"])
