"""The figures of several replicas as those of one engine, for the page at / and GET /stats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hybrid.engine.latency import Histogram

_LOWEST = ("epoch", "started")  # what every replica has reached; when the first one began


def sum_stats(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of at least one engine's stats(): counters, gauges and histograms are added up.

    `paused` is true if all of them are, `epoch` is the lowest, `started` the earliest. A key that
    only some have is added up over those.
    """
    names = dict.fromkeys(name for stats in each for name in stats)
    return {name: _sum(name, [stats[name] for stats in each if name in stats]) for name in names}


def _sum(name: str, values: list[Any]) -> Any:
    first = values[0]
    if name in _LOWEST:
        return min(values)
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, Mapping):
        return _merged(values) if "buckets" in first else sum_stats(values)
    if isinstance(first, (list, tuple)):
        return _sum_pairs(values)
    return sum(values)


def _sum_pairs(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """[[label, number], ...] by label, in the first one's order; other lists one after another."""
    rows = [row for one in lists for row in one]
    if not all(isinstance(row, (list, tuple)) and len(row) == 2 for row in rows):
        return rows
    totals: dict[Any, Any] = {}
    for label, number in rows:
        totals[label] = totals.get(label, 0) + number
    return [[label, number] for label, number in totals.items()]


def _merged(histograms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one histogram with all of these observations says; they have the same bounds."""
    bounds = [bound for bound, _ in histograms[0]["buckets"]]
    merged = Histogram(bounds)
    for one in histograms:
        cumulative = [count for _, count in one["buckets"]]
        merged.add_counts(np.diff([0, *cumulative, one["count"]]), one["sum"])
    return merged.as_dict()
