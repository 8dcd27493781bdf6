"""/health_generate: whether the engine generates tokens."""

from __future__ import annotations

import time

from megatron_hybrid.request import MAX_PRIORITY, SamplingParams
from megatron_hybrid.server.http.choice import Choice
from megatron_hybrid.server.http.generation import Generation, TimedOut, new_id
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link.subscription import Overloaded

HEALTH_SECONDS = 20.0
LOOK_SECONDS = 0.5
_WANTED = GenerationRequest(
    model=None,
    params=SamplingParams(temperature=0.0, max_tokens=1),
    max_tokens_field="max_tokens",
    stream=False,
    include_usage=False,
    continuous_usage=False,
    cache_salt="",
    priority=-MAX_PRIORITY,  # before all that wait
    cache_checkpoints=(),
    timeout=HEALTH_SECONDS,
)


def generates(serving: Serving, arrived: float) -> bool:
    """Whether a token comes in time: for a prompt of ours, or for others that it waits behind. A
    paused engine is left alone: it is well. Raises EngineUnavailable."""
    serving.client.check()
    if serving.client.state == "paused":
        return True
    before = _generated(serving)
    try:
        generation = Generation(
            serving, _WANTED, new_id("health-"), disconnected=lambda: False, arrived=arrived
        )
        try:
            generation.start([[0]], lambda index: Choice(index, None, _WANTED))
            return any(generation.deltas())
        finally:
            generation.close()
    except (TimedOut, Overloaded):
        while _generated(serving) == before and time.monotonic() < arrived + HEALTH_SECONDS:
            time.sleep(LOOK_SECONDS)
        return _generated(serving) > before


def _generated(serving: Serving) -> int:
    return int(serving.client.stats()["generated_tokens"])
