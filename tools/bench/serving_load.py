"""When requests are sent: at a rate, with a limit on how many are open at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np

from bench.serving_requests import OpenAIServer, Outcome, ServingRequest


def arrival_times(
    count: int, rate: float, burstiness: float, generator: np.random.Generator
) -> list[float]:
    """Seconds from the start, ascending, for `count` requests at `rate` requests a second.

    The gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is evener. They are scaled so that the last request comes at count / rate, as
    `vllm bench serve` does: runs with different seeds have the same mean rate. An infinite rate
    sends everything at 0.
    """
    if not rate > 0:
        raise ValueError(f"The request rate is {rate}; it must be more than 0.")
    if not burstiness > 0:
        raise ValueError(f"The burstiness is {burstiness}; it must be more than 0.")
    if np.isinf(rate):
        return [0.0] * count
    times = np.cumsum(generator.gamma(burstiness, 1.0, size=count))
    if count and times[-1] > 0:
        times *= count / rate / times[-1]
    return [float(when) for when in times]


async def send_at(
    server: OpenAIServer,
    requests: Sequence[ServingRequest],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_finish: Callable[[Outcome], object] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Send each request at its time, or as soon after that as `max_concurrency` lets it.

    Returns what became of them, in the order of `requests`, and the seconds until the last was
    done.
    """
    gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start = time.perf_counter()

    async def send(request: ServingRequest, due: float) -> Outcome:
        async with gate:
            outcome = await server.send(request, due)
        on_finish(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    try:
        for request, when in zip(requests, times, strict=True):
            due = start + when
            # Measured against the start, so that late wake-ups don't add up.
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send(request, due)))
        outcomes = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    end = max((outcome.finished for outcome in outcomes), default=start)
    return outcomes, end - start
