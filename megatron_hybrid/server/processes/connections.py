"""The open connections of one worker: what each waits for, and which make room for new ones.

A client that is quick is never in the way of another. Connections that wait for a request, and
those that ask how the server is, can be closed at any time; requests that do more are limited to
fewer than there are places. So a new connection always finds a place, however many clients stall.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.server.http.connection import Pace

CANDIDATES = 8  # looked at for one that makes room


class Phase(enum.Enum):
    """What a connection does."""

    HEADERS = "its first request, or the rest of the next one's headers, is awaited"
    IDLE = "nothing of its next request has come"
    BRIEF = "it is asked how the server is, or is being refused"
    BUSY = "a request is read or answered"


# How long a phase must have lasted before it may end for a new connection's sake. In the last two
# cases the client is unlikely to be slow: it has sent nothing, or does not read.
MAKES_ROOM_AFTER = {Phase.HEADERS: 0.1, Phase.IDLE: 0.1, Phase.BRIEF: 5.0}  # seconds; in this order


@dataclass(eq=False)
class Connection:
    """One client's connection, as what gunicorn reads requests from."""

    client: Any
    counted: str | None  # under what it counts, where an address has a limit; None: nowhere
    phase: Phase = Phase.HEADERS
    since: float = 0.0
    on_data: Callable[[], None] = lambda: None  # called when something comes while idle
    pace: Pace | None = None  # while a body is read
    requests: int = 0  # awaited so far
    is_refused: bool = False  # its address has too many

    def recv(self, size: int) -> bytes:
        """Raises TimeoutError when a body is too slow, and what the socket raises."""
        if self.pace is None:
            data: bytes = self.client.recv(size)
            if data and self.phase is Phase.IDLE:
                self.on_data()
            return data
        before = self.client.gettimeout()
        self.client.settimeout(self.pace.seconds_left())
        try:
            data = self.client.recv(size)
        finally:
            self.client.settimeout(before)
        self.pace.received += len(data)
        return data

    def hang_up(self) -> None:
        """End it, for whoever reads from it or writes to it."""
        with contextlib.suppress(OSError):
            self._plain.shutdown(socket.SHUT_RDWR)

    def has_unread(self) -> bool:
        """Whether something came that nobody had the time to read."""
        try:
            return bool(self._plain.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    @property
    def _plain(self) -> Any:
        return getattr(self.client, "_sock", self.client)  # gevent's would wait


@dataclass(eq=False, kw_only=True)
class Connections:
    """All of one worker, each in its phase."""

    places: int  # for connections of all kinds
    requests: int  # how many of these may be busy with one
    an_address: int  # the most from one address; 0: any number
    header_seconds: float  # that a client has for a request's headers
    idle_seconds: float  # and between requests
    clock: Callable[[], float] = time.monotonic
    made_room: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._seconds = {Phase.HEADERS: self.header_seconds, Phase.IDLE: self.idle_seconds}
        # Each in the order in which they came to that phase.
        self._open: dict[Phase, OrderedDict[Connection, None]] = {
            phase: OrderedDict() for phase in Phase
        }
        self._from: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def has_place(self) -> bool:
        """Whether a new connection finds a place; the stalest one is closed for it if need be."""
        while len(self) >= self.places:
            stalest = self._stalest()
            if stalest is None:
                return False
            self.made_room += 1
            self.close(stalest)
        return True

    def open(self, connection: Connection) -> None:
        """Take it in, if only to refuse it."""
        counted = connection.counted
        if counted is not None:
            self._from[counted] += 1
            connection.is_refused = 0 < self.an_address < self._from[counted]
        self.refused += connection.is_refused
        connection.on_data = lambda: self._move(connection, Phase.HEADERS)
        self._enter(connection, Phase.BRIEF if connection.is_refused else Phase.HEADERS)

    def begin(self, connection: Connection, *, brief: bool) -> bool:
        """A request has come over it. False: there are too many, and it is to be refused."""
        full = not brief and len(self._open[Phase.BUSY]) >= self.requests
        self.refused += full
        self._move(connection, Phase.BRIEF if brief or full else Phase.BUSY)
        return not full

    def end(self, connection: Connection) -> None:
        """Its request is answered."""
        self._move(connection, Phase.IDLE)

    def close(self, connection: Connection) -> None:
        """Forget it, and end it; it may have been closed before."""
        if connection not in self._open[connection.phase]:
            return
        del self._open[connection.phase][connection]
        counted = connection.counted
        if counted is not None:
            self._from[counted] -= 1
            if not self._from[counted]:
                del self._from[counted]
        connection.hang_up()

    def close_overdue(self) -> None:
        """End those whose next request takes too long."""
        now = self.clock()
        for phase, seconds in self._seconds.items():
            while (first := next(iter(self._open[phase]), None)) is not None:
                if now - first.since < seconds:
                    break
                self.close(first)

    def close_waiting(self) -> None:
        """End those over which no request has come."""
        for phase in self._seconds:
            for connection in list(self._open[phase]):
                self.close(connection)

    def _stalest(self) -> Connection | None:
        now = self.clock()
        for phase, seconds in MAKES_ROOM_AFTER.items():
            waiting = self._open[phase]
            for _ in range(min(CANDIDATES, len(waiting))):
                first = next(iter(waiting))
                if now - first.since < seconds:
                    break
                if phase is Phase.BRIEF or not first.has_unread():
                    return first
                waiting.move_to_end(first)  # it is this worker that is slow
                first.since = now
        return None

    def _move(self, connection: Connection, phase: Phase) -> None:
        """To another phase, unless it was closed."""
        if connection in self._open[connection.phase]:
            del self._open[connection.phase][connection]
            self._enter(connection, phase)

    def _enter(self, connection: Connection, phase: Phase) -> None:
        connection.phase = phase
        connection.since = self.clock()
        self._open[phase][connection] = None
