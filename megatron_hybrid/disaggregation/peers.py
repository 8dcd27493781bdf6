"""Peers: questions to servers that compute prompts."""

from __future__ import annotations

import itertools
import threading
import time

import msgspec
import zmq

from megatron_hybrid.cache.calls import Calls
from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.remote_memory import FLAG
from megatron_hybrid.errors import ConfigurationError, StoreError

PAUSE_SECONDS = 5.0  # in which one that did not answer is not asked again
CONNECT_MILLISECONDS = 3000  # a packet that was lost is sent again after a second
_SLICE = 200  # milliseconds, after which it is looked whether the peer is still there


def addresses_of(text: str, flag: str = FLAG) -> list[str]:
    """Of HOST:PORT,HOST:PORT. Raises ConfigurationError."""
    found = [part.strip() for part in text.split(",")]
    for one in found:
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(f"{flag} is {text}: {one!r} is not HOST:PORT.")
    return found


class Peers:
    """Any thread may call it: each has sockets of its own."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._own = threading.local()
        self._numbers = itertools.count(1)
        self._silent: dict[str, float] = {}  # by address: until when it is left alone
        self._calls = Calls()

    def ask(self, peer: str, question: wire.Question, seconds: float) -> wire.Message:
        """The answer. Raises StoreError, if there is none in time, and for a while after that."""
        if time.monotonic() < self._silent.get(peer, 0.0):
            raise StoreError(f"{peer} did not answer a moment ago and is not asked ({FLAG}).")
        with self._calls.call():
            answer = self._answer(peer, question, time.monotonic() + seconds)
        if answer is not None:
            return answer
        self._silent[peer] = time.monotonic() + PAUSE_SECONDS
        raise StoreError(
            f"{peer} does not answer. See whether a server with --role prefill runs there ({FLAG})."
            f" It is left alone for {PAUSE_SECONDS:g} s."
        )

    def tell(self, peer: str, message: wire.Done) -> None:
        """Without an answer; lost, if there is nobody."""
        with self._calls.call():
            socket = self._socket(peer)
            if socket.poll(CONNECT_MILLISECONDS, zmq.POLLOUT):
                socket.send(wire.encode(message))

    def number(self) -> int:
        """Of the next question."""
        return next(self._numbers)

    def close(self) -> None:
        """Questions end with a StoreError, within a moment."""
        self._calls.close(f"The connections to {FLAG} are closed.")
        self._context.destroy(0)

    def _answer(self, peer: str, question: wire.Question, deadline: float) -> wire.Message | None:
        """None: there is none, or the connection is lost."""
        socket = self._socket(peer)
        if not socket.poll(CONNECT_MILLISECONDS, zmq.POLLOUT):
            return None
        socket.send(wire.encode(question))
        while time.monotonic() < deadline and not self._calls.closed:
            if not socket.poll(_SLICE):
                if not socket.poll(0, zmq.POLLOUT):
                    return None  # nobody is there any more
                continue
            try:
                answer = wire.decode_answer(socket.recv())
            except msgspec.MsgspecError as error:
                raise StoreError(
                    f"{peer} ({FLAG}) answers what this version does not understand: {error}"
                ) from error
            if answer.number == question.number:  # else of a question that was given up
                return answer
        return None

    def _socket(self, peer: str) -> zmq.Socket[bytes]:
        sockets: dict[str, zmq.Socket[bytes]] = self._own.__dict__
        if peer not in sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for one that is not there
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MOST_BYTES)
            socket.connect(f"tcp://{peer}")
            sockets[peer] = socket
        return sockets[peer]
