"""Prometheus figures: what the front end measures, and the engine's counters beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "megatron_hybrid:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)

# Prometheus name: the engine's name for it (docs/prefix_cache.md), and what it counts.
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests"),
    "prompt_tokens_cached": ("skipped_tokens", "Prompt tokens that were not computed"),
    "generation_tokens": ("generated_tokens", "Tokens of the answers"),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the KV cache"),
    "prefix_cache_hits": ("matched_tokens", "Prompt tokens whose KV was found"),
    "state_cache_queries": ("matched_tokens", "Prompt tokens with KV, for which a state is needed"),
    "state_cache_hits": ("skipped_tokens", "Prompt tokens that a cached state let us skip"),
}
_LABELLED_COUNTERS = {
    "state_checkpoints_published": ("checkpoints_published", "kind", "States kept"),
    "state_checkpoints_read": ("checkpoints_read", "kind", "States used"),
    "prefix_lost_tokens": ("lost_tokens", "cause", "Tokens that matched but were computed again"),
}
_GAUGES = {
    "num_requests_running": ("requests_running", "Requests that run"),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for memory or a row"),
}
_SHARES = {
    "kv_cache_usage_perc": ("kv_used", "kv_blocks", "Share of KV blocks in use by requests"),
    "state_cache_usage_perc": ("state_used", "state_slots", "Share of state slots in use"),
}


class ServerMetrics:
    """One front end's figures, in a registry of their own."""

    def __init__(self, engine_stats: Callable[[], Mapping[str, Any] | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine_stats))
        self._success = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by reason.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._first_token = self._histogram("time_to_first_token_seconds", _SECONDS)
        self._inter_token = self._histogram("inter_token_latency_seconds", _TOKEN_SECONDS)
        self._end_to_end = self._histogram("e2e_request_latency_seconds", _SECONDS)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._success.labels(reason).inc()
        self._end_to_end.observe(seconds)

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        return Histogram(f"{PREFIX}{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector:
    """Asks the engine at each scrape; shows nothing of it while it is not there."""

    def __init__(self, engine_stats: Callable[[], Mapping[str, Any] | None]) -> None:
        self._engine_stats = engine_stats

    def describe(self) -> list[Metric]:
        return []  # so that registering does not ask the engine

    def collect(self) -> Iterator[Metric]:
        values = self._engine_stats()
        if values is None:
            return
        for name, (key, text) in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=values[key])
        for name, (key, label, text) in _LABELLED_COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=[label])
            for kind, value in values[key].items():
                family.add_metric([kind], value)
            yield family
        for name, (key, text) in _GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=values[key])
        for name, (part, whole, text) in _SHARES.items():
            share = values[part] / values[whole] if values[whole] else 0.0
            yield GaugeMetricFamily(PREFIX + name, text, value=share)
