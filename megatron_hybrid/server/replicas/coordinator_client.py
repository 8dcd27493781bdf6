"""A front-end worker's connection to the coordinator; it is never waited for long."""

from __future__ import annotations

import itertools
import queue
import threading
import time

from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_link import EngineLink

# Beyond that a worker places by itself. Where other work keeps the machine busy, one answer in 15
# takes longer than 0.05 s, and a prompt in the wrong place costs more than the wait.
PLACE_SECONDS = 0.25
PAUSE_SECONDS = 1.0  # without questions, after one that nobody has answered yet


class CoordinatorClient:
    """Asks the coordinator at `endpoint` for places. Thread-safe."""

    def __init__(self, endpoint: str) -> None:
        self._link = EngineLink(endpoint, self)
        self._connected = False
        self._silent_until = 0.0
        self._lock = threading.Lock()
        self._place_ids = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[int | None]] = {}
        self._running: dict[str, wire.Moved] = {}  # requests that have a place, by their ids

    def start(self) -> None:
        """Begin to look for the coordinator."""
        self._link.start()

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def place(self, wanted: wire.Wanted, replicas: list[int]) -> int | None:
        """One of these replicas; None without an answer in PLACE_SECONDS."""
        if not self._connected or time.monotonic() < self._silent_until:
            return None
        answer: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        place_id = next(self._place_ids)
        with self._lock:
            self._waiting[place_id] = answer
        self._link.send(wire.Place(place_id, wanted, replicas))
        try:
            replica = answer.get(timeout=PLACE_SECONDS)
            if replica in replicas:
                self._note(wanted, replica)
            return replica
        except queue.Empty:
            self._silent_until = time.monotonic() + PAUSE_SECONDS
            return None
        finally:
            with self._lock:
                self._waiting.pop(place_id, None)

    def moved(self, wanted: wire.Wanted, replica: int) -> None:
        """The request goes to this replica, which the coordinator has not chosen."""
        self._link.send(self._note(wanted, replica))

    def started(self, request_id: str) -> None:
        """The first event of an engine request has come: its prompt is computed."""
        self._link.send(wire.Started(request_id))

    def ended(self, request_id: str, tokens: int | None) -> None:
        """An HTTP request is over; its answers together had so many tokens, None if they did not
        come to their end."""
        with self._lock:
            self._running.pop(request_id, None)
        self._link.send(wire.Ended(request_id, tokens))

    def _note(self, wanted: wire.Wanted, replica: int) -> wire.Moved:
        where = wire.Moved(wanted.request_id, replica, wanted.answers)
        with self._lock:
            self._running[wanted.request_id] = where
        return where

    # What the link says, in its thread.

    def connected(self) -> list[wire.Command]:
        """The coordinator is there. What ran before it came counts, too."""
        self._connected = True
        self._silent_until = 0.0
        with self._lock:
            return list(self._running.values())

    def received(self, replies: list[wire.AnyReply]) -> None:
        """Places that were asked for."""
        for reply in replies:
            if isinstance(reply, wire.Placed):
                self._silent_until = 0.0  # late perhaps, but it answers
                with self._lock:
                    answer = self._waiting.get(reply.place_id)
                if answer is not None:
                    answer.put(reply.replica)

    def lost(self) -> None:
        """The coordinator is gone, and will be started again."""
        self._connected = False
        with self._lock:
            waiting = list(self._waiting.values())
        for answer in waiting:
            answer.put(None)

    def tick(self) -> None:
        """Nothing has to be looked at."""
