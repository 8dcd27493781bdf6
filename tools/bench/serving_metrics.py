"""From what each request did to the figures of a serving benchmark.

Names and definitions are those of `vllm bench serve`, so that results can be compared:

ttft   from sending a request to the first event with text or a token
tpot   the rest of a request's time by its number of tokens after the first
itl    the times between a request's events with tokens, all requests together
e2el   from sending a request to its last token

Percentiles are numpy's (linear between neighbours).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.serving_requests import Outcome

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_WIDTH = 50


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] to limits in milliseconds. Raises ValueError with a sentence."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT_METRICS:
            raise ValueError(
                f"--goodput {pair!r} names {name!r}; it knows {', '.join(GOODPUT_METRICS)}."
            )
        try:
            limits[name] = float(text)
        except ValueError:
            raise ValueError(
                f"--goodput {pair!r} needs milliseconds after the colon, as in {name}:500."
            ) from None
        if not limits[name] >= 0:
            raise ValueError(f"--goodput {pair!r} is below 0 milliseconds.")
    return limits


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all limits (milliseconds)."""
    if outcome.failure is not None:
        return False
    seconds = {
        "ttft": outcome.time_to_first_token,
        # An answer of one token has no time between tokens that could be too long.
        "tpot": outcome.time_per_output_token or 0.0,
        "e2el": outcome.latency,
    }
    return all(1e3 * seconds[name] <= limit for name, limit in limits.items())


def metric_samples(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Milliseconds of every metric, of the requests that succeeded."""
    done = [outcome for outcome in outcomes if outcome.failure is None]
    tpots = [outcome.time_per_output_token for outcome in done]
    return {
        "ttft": [1e3 * outcome.time_to_first_token for outcome in done],
        "tpot": [1e3 * tpot for tpot in tpots if tpot is not None],
        "itl": [1e3 * gap for outcome in done for gap in outcome.inter_token_latencies],
        "e2el": [1e3 * outcome.latency for outcome in done],
    }


def summarize_serving(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    goodput: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99.0,),
    metrics: Sequence[str] = tuple(METRICS),
) -> dict[str, Any]:
    """The figures of one run that took `duration` seconds; rates are per second."""
    done = [outcome for outcome in outcomes if outcome.failure is None]
    prompt = sum(outcome.prompt_tokens for outcome in done)
    output = sum(outcome.output_tokens for outcome in done)
    cached = [outcome.cached_tokens for outcome in done if outcome.cached_tokens is not None]
    per_second = _rate(duration)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "failures": failures_by_kind(outcomes),
        "total_input_tokens": prompt,
        # None: the server does not report them
        "total_cached_tokens": sum(cached) if cached else None,
        "cached_share": sum(cached) / prompt if cached and prompt else None,
        "total_output_tokens": output,
        "request_throughput": per_second(len(done)),
        "request_goodput": None,
        "output_throughput": per_second(output),
        "total_token_throughput": per_second(prompt + output),
        "max_output_tokens_per_s": max(tokens_per_second(outcomes), default=0.0),
        "max_concurrent_requests": peak_concurrency(outcomes),
    }
    if goodput:
        result["request_goodput"] = per_second(sum(is_good(o, goodput) for o in outcomes))
        result["goodput_limits_ms"] = dict(goodput)
    samples = metric_samples(outcomes)
    for name in metrics:
        values = samples[name]
        result[f"mean_{name}_ms"] = float(np.mean(values)) if values else None
        result[f"median_{name}_ms"] = float(np.median(values)) if values else None
        result[f"std_{name}_ms"] = float(np.std(values)) if values else None
        for percentile in percentiles:
            value = float(np.percentile(values, percentile)) if values else None
            result[f"p{percentile:g}_{name}_ms"] = value
    return result


def failures_by_kind(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """For every kind of failure how many there were, and what the first one said."""
    counts = Counter(o.failure for o in outcomes if o.failure is not None)
    first = {o.failure: o.error for o in reversed(outcomes) if o.failure is not None}
    return {kind: {"count": n, "first": first[kind]} for kind, n in counts.most_common()}


def tokens_per_second(outcomes: Sequence[Outcome]) -> list[float]:
    """Tokens that arrived in each second of the run, from the first request on.

    An answer's tokens are spread evenly over its events, since servers may send several at once.
    """
    begin = min((outcome.sent for outcome in outcomes), default=0.0)
    buckets: Counter[int] = Counter()
    totals: dict[int, float] = {}
    for outcome in outcomes:
        if not outcome.arrivals:
            continue
        share = (outcome.output_tokens or len(outcome.arrivals)) / len(outcome.arrivals)
        buckets.clear()
        buckets.update(int(arrival.when - begin) for arrival in outcome.arrivals)
        for second, events in buckets.items():
            totals[second] = totals.get(second, 0.0) + share * events
    return [totals.get(second, 0.0) for second in range(max(totals, default=-1) + 1)]


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were open at one moment."""
    # At equal times the end comes first: -1 sorts before 1.
    steps = sorted((when, step) for o in outcomes for when, step in ((o.sent, 1), (o.finished, -1)))
    running = peak = 0
    for _, step in steps:
        running += step
        peak = max(peak, running)
    return peak


def format_table(result: Mapping[str, Any], title: str = "Serving Benchmark Result") -> str:
    """The table of `vllm bench serve`, with cached tokens and failures by kind."""
    lines = [f" {title} ".center(_WIDTH, "=")]

    def row(label: str, key: str, digits: int | None = None) -> None:
        value = result.get(key)
        if value is not None:
            text = f"{value:.{digits}f}" if digits is not None else str(value)
            lines.append(f"{label:<40} {text:<10}".rstrip())

    row("Successful requests:", "completed")
    row("Failed requests:", "failed")
    for kind, failure in result["failures"].items():
        lines.append(f"  {kind + ':':<38} {failure['count']}")
        lines.append(f"    {failure['first'][:200]}")
    row("Maximum request concurrency:", "max_concurrency")
    row("Request rate configured (RPS):", "request_rate", 2)
    row("Benchmark duration (s):", "duration", 2)
    row("Total input tokens:", "total_input_tokens")
    row("Cached input tokens:", "total_cached_tokens")
    row("Total generated tokens:", "total_output_tokens")
    row("Request throughput (req/s):", "request_throughput", 2)
    row("Request goodput (req/s):", "request_goodput", 2)
    row("Output token throughput (tok/s):", "output_throughput", 2)
    row("Peak output token throughput (tok/s):", "max_output_tokens_per_s", 2)
    row("Peak concurrent requests:", "max_concurrent_requests")
    row("Total token throughput (tok/s):", "total_token_throughput", 2)
    for name, header in METRICS.items():
        if f"mean_{name}_ms" not in result:
            continue
        lines.append(header.center(_WIDTH, "-"))
        row(f"Mean {name.upper()} (ms):", f"mean_{name}_ms", 2)
        row(f"Median {name.upper()} (ms):", f"median_{name}_ms", 2)
        tail = f"_{name}_ms"
        for key in result:
            percentile = key.removesuffix(tail).removeprefix("p")
            if key.endswith(tail) and key.startswith("p"):
                row(f"P{percentile} {name.upper()} (ms):", key, 2)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _rate(duration: float) -> Any:
    return lambda amount: amount / duration if duration > 0 else 0.0
