"""A request's connection: its body as it comes, from a client that may stall or break off, whether
the client is still there, and turns for the other greenlets of a worker.

What gunicorn raises would be a failure of the server to Flask, or no failure at all: a body that
ends early looks complete.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gunicorn.http.errors import ParseException

from megatron_hybrid.errors import RequestError

MOST_BYTES_OF_CHUNKS = 1024  # at once: there may be one in each chunk, which Python takes apart
PAUSE_BYTES = 2**16
_A_MOMENT = 1e-6
TCP_ESTABLISHED = 1  # Linux's number
POLL_SECONDS = 0.1  # a look costs a system call, which not every token needs


class BodyStalled(RequestError):
    """Nothing more of a body came for too long, or all of it came too slowly."""

    status, kind, code, field = 408, "timeout_error", "request_timeout", "body"


class BodyBroken(RequestError):
    """A body ended early, or its chunks are not as HTTP wants them."""

    status, kind, code, field = 400, "invalid_request_error", "broken_body", "body"


@dataclass(kw_only=True)
class Pace:
    """How long a body may take: `seconds`, and one more for every `bytes_a_second` that came;
    never more than `patience` seconds for the next piece."""

    patience: float
    seconds: float
    bytes_a_second: float
    clock: Callable[[], float] = time.monotonic
    received: int = 0

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._is_slow = False

    def seconds_left(self) -> float:
        """For the next piece; TimeoutError if none are left."""
        left = self._begun + self.seconds + self.received / self.bytes_a_second - self.clock()
        self._is_slow = left < self.patience
        if left <= 0:
            raise TimeoutError
        return min(left, self.patience)

    def complaint(self) -> str:
        """What to tell a client whose next piece was not in time."""
        if not self._is_slow:
            return f"Nothing more of the body came for {self.patience:g} seconds."
        return (
            f"The body comes too slowly: {self.received} bytes in "
            f"{self.clock() - self._begun:.0f} seconds; it may take {self.seconds:g} seconds, "
            f"and one more for every {self.bytes_a_second:g} bytes that came."
        )


class Connection(Protocol):
    """What is needed of a connection: while a body is read, it waits no longer than `pace` says."""

    pace: Pace | None


class BodyReader:
    """Takes the place of the reader in gunicorn's body of one request.

    After a failure nobody knows where the next request on the connection would begin, so it is
    closed after the answer.
    """

    def __init__(self, request: Any, connection: Connection, pace: Pace) -> None:
        """request: gunicorn's."""
        self._request = request
        self._reader = request.body.reader
        self._connection = connection
        self._pace = pace
        self._length: int | None = getattr(self._reader, "length", None)  # None: in chunks
        self._received = 0
        self._next_pause = 0

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size` of them; none at the body's end. Other greenlets have a
        turn now and then, however fast the client is, and also where nobody wants the body.

        Raises BodyStalled or BodyBroken.
        """
        self._connection.pace = self._pace
        if self._length is None:
            size = min(size, MOST_BYTES_OF_CHUNKS)
        if self._received >= self._next_pause:
            self._next_pause = self._received + (0 if self._length is None else PAUSE_BYTES)
            let_others_run()
        try:
            data: bytes = self._reader.read(size)
        except TimeoutError as error:
            self._request.force_close()
            raise BodyStalled(self._pace.complaint()) from error
        except (OSError, ParseException) as error:
            self._request.force_close()
            raise BodyBroken(f"The body could not be read: {error}.") from error
        finally:
            self._connection.pace = None
        self._received += len(data)
        if len(data) < size and self._length is not None and self._received < self._length:
            self._request.force_close()
            raise BodyBroken(f"The body ended after {self._received} of {self._length} bytes.")
        return data


def client_gone(environ: dict[str, Any]) -> Callable[[], bool]:
    """A cheap question about the connection of this WSGI request, for once a token.

    Without a socket (requests in tests, another WSGI server) the client counts as there.
    """
    connection = environ.get("gunicorn.socket")
    if connection is None:
        return lambda: False
    # gevent's sockets wait for bytes whatever the flags say; the plain one inside does not.
    plain = getattr(connection, "_sock", connection)
    next_look = 0.0
    gone = False

    def look() -> bool:
        nonlocal next_look, gone
        now = time.monotonic()
        if now >= next_look and not gone:
            next_look = now + POLL_SECONDS
            gone = _is_closed(plain)
        return gone

    return look


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed, or half closed, the connection."""
    try:
        if sys.platform == "linux":
            # Not by a look at what is to be read: bytes before the end, such as those with which
            # TLS says goodbye, would hide it.
            state: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return state != TCP_ESTABLISHED
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def let_others_run() -> None:
    """Call it every few milliseconds. Where nobody else is ready, it costs a few microseconds.

    Not `sleep(0)`, which only queues the caller once more: gevent looks at sockets and timers after
    as many as 50 such turns, so whoever works for 3 ms between them keeps the others off for 150.
    """
    time.sleep(_A_MOMENT)
