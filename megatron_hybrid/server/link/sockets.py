"""ZMQ sockets: the module that fits this process, and the binding end.

Where gevent has patched threading, gevent's module is needed: an ordinary zmq call blocks its
thread, and with it every greenlet of a front-end worker.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq


def zmq_module() -> Any:
    """`zmq.green` in a process that gevent has patched, `zmq` elsewhere."""
    if is_patched():
        import zmq.green

        return zmq.green
    import zmq

    return zmq


def is_patched() -> bool:
    """Whether this process runs greenlets for threads; needs no gevent to say no."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def bind_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The engine's end of the connection. Nothing is dropped: a lost event would be lost text."""
    import zmq

    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says so when a front-end worker is gone
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.bind(endpoint)
    return socket
