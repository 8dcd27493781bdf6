"""Clients that hold conversations: every answer becomes part of the next prompt.

The settings are those of vLLM's benchmarks/multi_turn/benchmark_serving_multi_turn.py. A client
sends one request at a time. It keeps several conversations going, takes their turns in rotation or
at random, and takes a new conversation when one is over.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.serving_conversations import Conversation
from bench.serving_datasets import DatasetError
from bench.serving_requests import (
    Message,
    OpenAIServer,
    Outcome,
    ServingRequest,
)

SAMPLINGS = ("round_robin", "random")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """max_turns: messages of both sides. max_active_conversations, max_num_requests: of all
    clients. request_rate: a client's requests a second, Poisson; infinite: no pauses. early_stop:
    all clients end when the first has nothing left to do, so that the load is the same until the
    end."""

    num_clients: int = 1
    max_active_conversations: int | None = None
    max_num_requests: int | None = None
    max_turns: int | None = None
    sampling: str = "round_robin"
    request_rate: float = float("inf")
    limit_max_tokens: int | None = None
    limit_min_tokens: int | None = None
    early_stop: bool = True


@dataclass(slots=True)
class _Running:
    """A conversation so far."""

    plan: Conversation
    messages: list[Message] = field(default_factory=list)
    turn: int = 0


class Clients:
    """All clients of one run; `outcomes` are in the order in which they ended."""

    def __init__(
        self,
        server: OpenAIServer,
        conversations: Sequence[Conversation],
        settings: ClientSettings,
        seed: int = 0,
        on_finish: Callable[[Outcome], object] = lambda outcome: None,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.histories: dict[str, list[Message]] = {}
        self._server = server
        self._settings = settings
        self._queue = deque(conversations)
        self._on_finish = on_finish
        self._seed = seed
        self._started = 0
        self._stop = asyncio.Event()
        total = settings.max_active_conversations or settings.num_clients
        if total < settings.num_clients:
            raise DatasetError(
                f"--max-active-conversations is {total}, fewer than --num-clients "
                f"({settings.num_clients}); every client needs one."
            )
        if settings.limit_max_tokens is None and any(
            turn.max_tokens is None for one in conversations for turn in one.turns
        ):
            raise DatasetError(
                "The answers' lengths are not known: give --limit-max-tokens, or --tokenizer to "
                "take them from the file."
            )
        base, more = divmod(total, settings.num_clients)
        self._active = [base + (number < more) for number in range(settings.num_clients)]

    async def run(self) -> float:
        """Seconds until the last answer."""
        start = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for number, active in enumerate(self._active):
                clients.create_task(self._client(number, active))
        return max((outcome.finished for outcome in self.outcomes), default=start) - start

    async def _client(self, number: int, active: int) -> None:
        generator = np.random.default_rng([self._seed, number])
        running: deque[_Running] = deque()
        while not self._stop.is_set():
            while len(running) < active and self._queue:
                running.append(self._begin(self._queue.popleft()))
            if not running:
                break
            limit = self._settings.max_num_requests
            if limit is not None and self._started >= limit:
                break
            self._started += 1
            if self._settings.sampling == "random":
                running.rotate(-int(generator.integers(len(running))))
            one = running.popleft()
            if await self._take_turn(one):
                running.append(one)
            if np.isfinite(self._settings.request_rate):
                await self._pause(float(generator.exponential(1 / self._settings.request_rate)))
        if self._settings.early_stop:
            self._stop.set()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _begin(self, plan: Conversation) -> _Running:
        running = _Running(plan)
        if plan.system is not None:
            running.messages.append({"role": "system", "content": plan.system})
        self.histories[plan.conversation_id] = running.messages
        return running

    async def _take_turn(self, one: _Running) -> bool:
        """Whether the conversation goes on."""
        settings, turn = self._settings, one.plan.turns[one.turn]
        max_tokens = settings.limit_max_tokens or turn.max_tokens
        assert max_tokens is not None, "looked at before the run"
        fields: dict[str, Any] = {}
        if settings.limit_min_tokens is not None:
            fields["min_tokens"] = min(settings.limit_min_tokens, max_tokens)
        one.messages.append({"role": "user", "content": turn.text})
        request_id = f"{one.plan.conversation_id}.{one.turn}"
        outcome = await self._server.send(
            ServingRequest(request_id, list(one.messages), max_tokens, fields)
        )
        self.outcomes.append(outcome)
        self._on_finish(outcome)
        one.messages.append({"role": "assistant", "content": outcome.text})
        one.turn += 1
        messages = 2 * one.turn
        return (
            outcome.failure is None  # a broken history is not continued
            and one.turn < len(one.plan.turns)
            and (settings.max_turns is None or messages < settings.max_turns)
        )


def planned_requests(conversations: Sequence[Conversation], settings: ClientSettings) -> int:
    """How many requests there are at most."""
    turns = [
        one.num_messages
        if settings.max_turns is None
        else min(one.num_messages, settings.max_turns)
        for one in conversations
    ]
    planned = sum((count + 1) // 2 for count in turns)
    limit = settings.max_num_requests
    return planned if limit is None else min(planned, limit)
