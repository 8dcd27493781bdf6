from __future__ import annotations

import numpy as np
import pytest

from bench.measurements import Arrival
from bench.serving_metrics import (
    format_table,
    is_good,
    metric_samples,
    parse_goodput,
    peak_concurrency,
    summarize_serving,
    tokens_per_second,
)
from bench.serving_requests import Outcome


def outcome(sent: float, arrivals: list[float], **more: object) -> Outcome:
    made = Outcome("r", sent, sent, arrivals[-1], [Arrival(when, 1) for when in arrivals])
    made.prompt_tokens, made.output_tokens, made.cached_tokens = 10, len(arrivals), 4
    for name, value in more.items():
        setattr(made, name, value)
    return made


def random_outcomes(count: int) -> list[Outcome]:
    generator = np.random.default_rng(1)
    made = []
    for _ in range(count):
        sent = float(generator.uniform(0, 5))
        gaps = generator.exponential(0.1, size=int(generator.integers(2, 9)))
        made.append(outcome(sent, [sent + float(when) for when in np.cumsum(gaps)]))
    return made


def test_percentiles_are_numpys() -> None:
    outcomes = random_outcomes(50)
    result = summarize_serving(outcomes, 10.0, percentiles=(25, 99, 99.9))
    itl = [1e3 * float(gap) for o in outcomes for gap in np.diff([a.when for a in o.arrivals])]
    expected = {
        "ttft": [1e3 * (o.arrivals[0].when - o.sent) for o in outcomes],
        "itl": itl,
        "e2el": [1e3 * (o.arrivals[-1].when - o.sent) for o in outcomes],
        "tpot": [
            1e3 * (o.arrivals[-1].when - o.arrivals[0].when) / (len(o.arrivals) - 1)
            for o in outcomes
        ],
    }
    for name, values in expected.items():
        assert result[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert result[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert result[f"std_{name}_ms"] == pytest.approx(np.std(values))
        for key, percentile in (("p25", 25), ("p99", 99), ("p99.9", 99.9)):
            assert result[f"{key}_{name}_ms"] == pytest.approx(np.percentile(values, percentile))


def test_totals_and_rates() -> None:
    outcomes = [outcome(0.0, [0.5, 0.6]), outcome(1.0, [1.1, 1.2, 1.3])]
    result = summarize_serving(outcomes, 2.0)
    assert (result["completed"], result["failed"], result["failures"]) == (2, 0, {})
    assert (result["total_input_tokens"], result["total_cached_tokens"]) == (20, 8)
    assert result["cached_share"] == pytest.approx(0.4)
    assert result["total_output_tokens"] == 5
    assert result["request_throughput"] == pytest.approx(1.0)
    assert result["output_throughput"] == pytest.approx(2.5)
    assert result["total_token_throughput"] == pytest.approx(12.5)
    assert result["request_goodput"] is None


def test_failed_requests_count_as_failures_and_in_nothing_else() -> None:
    outcomes = [
        outcome(0.0, [0.5]),
        outcome(0.0, [9.0], failure="HTTP 503", error="first"),
        outcome(0.0, [9.0], failure="HTTP 503", error="second"),
        outcome(0.0, [9.0], failure="timeout"),
    ]
    result = summarize_serving(outcomes, 1.0)
    assert (result["completed"], result["failed"]) == (1, 3)
    assert result["failures"] == {
        "HTTP 503": {"count": 2, "first": "first"},
        "timeout": {"count": 1, "first": ""},
    }
    assert result["mean_ttft_ms"] == pytest.approx(500) and result["total_input_tokens"] == 10
    table = format_table(result)
    assert "HTTP 503:" in table and "first" in table


def test_a_server_that_does_not_report_cached_tokens_has_none() -> None:
    result = summarize_serving([outcome(0.0, [1.0], cached_tokens=None)], 1.0)
    assert result["total_cached_tokens"] is None
    assert "Cached" not in format_table(result)


def test_goodput_counts_requests_within_all_limits() -> None:
    fast, slow_start = outcome(0.0, [0.1, 0.2]), outcome(0.0, [0.9, 1.0])
    slow_tokens = outcome(0.0, [0.1, 0.9])
    outcomes = [fast, slow_start, slow_tokens, outcome(0.0, [0.1, 0.2], failure="timeout")]
    limits = parse_goodput(["ttft:500", "tpot:200"])
    assert [is_good(o, limits) for o in outcomes] == [True, False, False, False]
    result = summarize_serving(outcomes, 2.0, goodput=limits)
    assert result["request_goodput"] == pytest.approx(0.5)
    assert is_good(slow_tokens, {"e2el": 900.0}) and not is_good(slow_tokens, {"e2el": 899.0})


@pytest.mark.parametrize("pair", ["ttft", "itl:5", "ttft:fast", "tpot:-1", "ttft:nan"])
def test_bad_goodput_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput([pair])


def test_one_token_has_no_time_between_tokens() -> None:
    samples = metric_samples([outcome(0.0, [0.1])])
    assert samples["tpot"] == [] and samples["itl"] == []
    assert summarize_serving([outcome(0.0, [0.1])], 1.0)["mean_tpot_ms"] is None


def test_peak_concurrency() -> None:
    spans = [(0, 2), (1, 3), (1, 2), (2, 4)]  # the last begins when two have ended
    outcomes = [outcome(float(begin), [float(end)]) for begin, end in spans]
    assert peak_concurrency(outcomes) == 3
    assert peak_concurrency([]) == 0


def test_throughput_over_time_holds_every_token() -> None:
    two_a_time = outcome(10.0, [10.5, 12.5], output_tokens=4)
    assert tokens_per_second([two_a_time, outcome(10.0, [10.9])]) == [3.0, 0.0, 2.0]
    outcomes = random_outcomes(20)
    assert sum(tokens_per_second(outcomes)) == pytest.approx(sum(o.output_tokens for o in outcomes))


def test_the_table_has_the_chosen_metrics() -> None:
    result = summarize_serving(random_outcomes(5), 1.0, metrics=("ttft",), percentiles=(50, 95))
    table = format_table(result)
    for words in ("Mean TTFT (ms):", "P50 TTFT (ms):", "P95 TTFT (ms):", "Time to First Token"):
        assert words in table
    assert "ITL" not in table and "E2EL" not in table
