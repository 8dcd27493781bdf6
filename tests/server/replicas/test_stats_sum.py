"""The figures of several replicas as those of one."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.engine.latency import Histogram
from megatron_hybrid.server.replicas.replica_set import sum_stats


def histogram(*observed: float) -> dict[str, Any]:
    one = Histogram((1.0, 2.0, 4.0))
    for value in observed:
        one.observe(value)
    return one.as_dict()


def test_counters_add_up_and_what_holds_for_all_is_said_of_all() -> None:
    first = {"steps": 3, "paused": True, "epoch": 2, "started": 10.0, "by": {"a": 1, "b": 2}}
    second = {"steps": 4, "paused": False, "epoch": 1, "started": 5.0, "by": {"b": 5}}
    assert sum_stats([first, second]) == {
        "steps": 7,
        "paused": False,
        "epoch": 1,
        "started": 5.0,
        "by": {"a": 1, "b": 7},
    }
    assert sum_stats([first, first])["paused"] is True


def test_ages_add_up_by_label_in_their_order() -> None:
    one = {"kv_cached_by_age": [["<10 s", 1], ["older", 2]]}
    other = {"kv_cached_by_age": [["<10 s", 3], ["older", 0]]}
    assert sum_stats([one, other]) == {"kv_cached_by_age": [["<10 s", 4], ["older", 2]]}


def test_histograms_become_the_one_of_all_observations() -> None:
    summed = sum_stats([{"latency": histogram(0.5, 3.0)}, {"latency": histogram(1.5, 9.0, 9.0)}])
    assert summed["latency"] == histogram(0.5, 3.0, 1.5, 9.0, 9.0)
