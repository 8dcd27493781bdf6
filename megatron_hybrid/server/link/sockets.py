"""ZMQ sockets: the module that fits this process, and the binding end.

Where gevent has patched threading, gevent's module is needed: an ordinary zmq call blocks its
thread, and with it every greenlet of a front-end worker.
"""

from __future__ import annotations

import sys
from typing import Any

import zmq

from megatron_hybrid.server.link import messages as wire


def zmq_module() -> Any:
    """`zmq.green` in a process that gevent has patched, `zmq` elsewhere, which needs no gevent."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return zmq
    import zmq.green as green

    return green


def bind_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The engine's end of the connection. Nothing is dropped: a lost event would be lost text."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says so when a front-end worker is gone
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.bind(endpoint)
    return socket


def send(socket: zmq.Socket[bytes], client: bytes, reply: wire.Reply) -> bool:
    """From such a socket to one of its clients; False if that is gone."""
    try:
        socket.send_multipart([client, wire.encode([reply])])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True
