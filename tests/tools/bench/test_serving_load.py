from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bench.serving_http import HttpClient
from bench.serving_load import arrival_times, send_at
from bench.serving_requests import OpenAIServer, Outcome, ServingRequest
from tests.tools.bench.scripted_server import ScriptedServer


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_the_mean_rate_is_the_one_asked_for(burstiness: float) -> None:
    times = arrival_times(500, 20.0, burstiness, generator())
    assert len(times) == 500 and times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(500 / 20.0)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    """Gamma-distributed with shape k: the deviation is the mean by the root of k."""
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(arrival_times(20000, 1.0, burstiness, generator()))
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(3, float("inf"), 1.0, generator()) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 5.0, 1.0, generator()) == []


def test_bad_rates_are_refused() -> None:
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="must be more than 0"):
            arrival_times(3, rate, burstiness, generator())


def send(
    server: ScriptedServer, times: list[float], max_concurrency: int | None = None
) -> tuple[list[Outcome], float]:
    async def main() -> tuple[list[Outcome], float]:
        async with server.serve():
            measured = OpenAIServer(HttpClient(server.url), "/v1/completions", "m", chat=False)
            requests = [ServingRequest(f"r{i}", [1, 2], 2) for i in range(len(times))]
            result = await send_at(measured, requests, times, max_concurrency)
            measured.client.close()
            return result

    return asyncio.run(main())


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_than_max_concurrency_are_open(limit: int) -> None:
    server = ScriptedServer(seconds=0.02)
    outcomes, duration = send(server, [0.0] * 9, limit)
    assert server.peak == limit and len(server.bodies) == 9
    assert duration >= 0.02 * 9 / limit
    assert [outcome.request_id for outcome in outcomes] == [f"r{i}" for i in range(9)]
    # What waited here does not count as the server's time.
    assert outcomes[-1].sent - outcomes[-1].due > 0.02


def test_without_a_limit_all_are_open() -> None:
    server = ScriptedServer(seconds=0.2)
    send(server, [0.0] * 9)
    assert server.peak == 9


def test_requests_are_sent_when_they_are_due() -> None:
    times = [0.0, 0.05, 0.15]
    outcomes, duration = send(ScriptedServer(), times)
    for outcome, when in zip(outcomes, times, strict=True):
        assert outcome.due - outcomes[0].due == pytest.approx(when)
        assert outcome.sent >= outcome.due
    assert duration >= 0.15
