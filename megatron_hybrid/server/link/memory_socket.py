"""What front ends share: a memory in one process, with a thread and a socket of its own, so that
nobody waits for a step of the engine; and a front end's connection to it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from megatron_hybrid.server.link.sockets import zmq_module

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # without questions, after one that nobody answered
_NUMBER = struct.Struct("!Q")  # of a question, by which its answer is known


class MemoryServer:
    """Serves a memory at `endpoint` in a thread, until it is closed.

    serve: what is answered to a client's bytes; None: nothing.
    """

    def __init__(self, endpoint: str, name: str, serve: Callable[[bytes], bytes | None]) -> None:
        self._name = name
        self._serve = serve
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """End the thread and close its socket."""
        self._context.term()  # which waits until the thread has seen it

    def _run(self) -> None:
        with self._socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                frames = self._socket.recv_multipart()
                try:
                    client, number, payload = frames
                    if (answer := self._serve(payload)) is not None:
                        self._socket.send_multipart([client, number, answer])
                except zmq.ContextTerminated:
                    raise
                except Exception:  # whoever asks goes on without it
                    logger.exception("The memory of %s could not serve a front end.", self._name)


class MemoryClient:
    """A front end's connection to the memory at `endpoint`; safe in threads and in greenlets, but
    greenlets' and other threads' calls must not be mixed."""

    def __init__(self, endpoint: str, seconds: float) -> None:
        """seconds: how long an answer is waited for."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._silent_until = 0.0
        self._context: Any = zmq_module().Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def tell(self, payload: bytes) -> None:
        """Send what is not answered; it is dropped if the memory does not read."""
        with self._lock:
            self._send(next(self._numbers), payload)

    def ask(self, payload: bytes) -> bytes | None:
        """The answer; None if there is none soon."""
        if time.monotonic() < self._silent_until:
            return None
        with self._lock:
            if time.monotonic() < self._silent_until:  # who had the lock has found out
                return None
            number = next(self._numbers)
            deadline = time.monotonic() + self._seconds
            if not self._send(number, payload):
                return None
            while (left := deadline - time.monotonic()) > 0:
                if not self._socket.poll(max(1, int(1000 * left))):
                    break
                answered, answer = self._socket.recv_multipart()
                if _NUMBER.unpack(answered) == (number,):  # else: it came too late
                    return bytes(answer)
            self._silent_until = time.monotonic() + PAUSE_SECONDS
        return None

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._socket.close(linger=0)
            self._context.term()

    def _send(self, number: int, payload: bytes) -> bool:
        try:
            self._socket.send_multipart([_NUMBER.pack(number), payload], zmq.DONTWAIT)
        except zmq.Again:  # a full queue: the memory is gone, or stands still
            return False
        return True
