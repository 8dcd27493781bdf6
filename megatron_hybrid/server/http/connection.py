"""Whether the client of an HTTP request is still there."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

TCP_ESTABLISHED = 1  # Linux's number
POLL_SECONDS = 0.1  # a look costs a system call, which not every token needs


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
