"""A front-end worker's connection to the coordinator; it is never waited for long."""

from __future__ import annotations

import time

from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import EngineClient
from megatron_hybrid.server.link.subscription import EngineUnavailable

COORDINATOR = "coordinator"  # the name of its socket
# Beyond that a worker places by itself. Where other work keeps the machine busy, one answer in 15
# takes longer than 0.05 s, and a prompt in the wrong place costs more than the wait.
PLACE_SECONDS = 0.25
PAUSE_SECONDS = 1.0  # without questions, after one that nobody has answered yet


class CoordinatorClient(EngineClient):
    """Asks the coordinator at `endpoint`, which answers queries as an engine does, for places.
    Thread-safe."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._connected = False
        self._silent_until = 0.0
        self._running: dict[str, wire.Moved] = {}  # requests that have a place, by their ids

    def place(self, wanted: wire.Wanted, replicas: list[int]) -> int | None:
        """One of these replicas; None without an answer in PLACE_SECONDS."""
        if not self._connected or time.monotonic() < self._silent_until:
            return None
        answer = self.begin(wire.Place, wanted, replicas)
        try:
            replica: int = answer.result(PLACE_SECONDS)["replica"]
        except TimeoutError:
            answer.cancel()
            self._silent_until = time.monotonic() + PAUSE_SECONDS
            return None
        except EngineUnavailable:
            return None
        if replica in replicas:
            self._note(wanted, replica)
        return replica

    def moved(self, wanted: wire.Wanted, replica: int) -> None:
        """The request goes to this replica, which the coordinator has not chosen."""
        self.send(self._note(wanted, replica))

    def started(self, request_id: str) -> None:
        """The first event of an engine request has come: its prompt is computed."""
        self.send(wire.Started(request_id))

    def ended(self, request_id: str, tokens: int | None) -> None:
        """An HTTP request is over; its answers together had so many tokens, None if they did not
        come to their end."""
        with self._lock:
            self._running.pop(request_id, None)
        self.send(wire.Ended(request_id, tokens))

    def _note(self, wanted: wire.Wanted, replica: int) -> wire.Moved:
        where = wire.Moved(wanted.request_id, replica, wanted.answers)
        with self._lock:
            self._running[wanted.request_id] = where
        return where

    # What the link says, in its thread.

    def connected(self) -> list[wire.Command]:
        """The coordinator is there. What ran before it came counts, too."""
        super().connected()
        self._connected = True
        self._silent_until = 0.0
        with self._lock:
            return list(self._running.values())

    def received(self, replies: list[wire.AnyReply]) -> None:
        """Places that were asked for, or a sign of life."""
        if any(isinstance(reply, wire.Result) for reply in replies):
            self._silent_until = 0.0  # late perhaps, but it answers
        super().received(replies)

    def lost(self) -> None:
        """The coordinator is gone, and will be started again."""
        self._connected = False
        super().lost()
