"""Peers: questions to servers that compute prompts."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.remote_memory import FLAG
from megatron_hybrid.errors import ConfigurationError, StoreError

PAUSE_SECONDS = 5.0  # in which one that did not answer is not asked again
CONNECT_MILLISECONDS = 3000  # a packet that was lost is sent again after a second
_LOOK_SECONDS = 0.2  # after which it is looked whether the peer is still there
_CLOSED = f"The connections to {FLAG} are closed."

Answered: TypeAlias = "Future[wire.Message]"


def addresses_of(text: str, flag: str = FLAG) -> list[str]:
    """Of HOST:PORT,HOST:PORT. Raises ConfigurationError."""
    found = [part.strip() for part in text.split(",")]
    for one in found:
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(f"{flag} is {text}: {one!r} is not HOST:PORT.")
    return found


class Peers:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}  # by address
        self._is_closed = False

    def ask(self, peer: str, question: wire.Question, seconds: float) -> wire.Message:
        """The answer. Raises StoreError, if there is none in time, and for a while after that."""
        return self.begin(peer, question, seconds).result()

    def begin(self, peer: str, question: wire.Question, seconds: float) -> Answered:
        """What `ask` returns or raises, once it is known."""
        answered: Answered = Future()
        try:
            self._line(peer).ask(_Asked(question, time.monotonic() + seconds, answered))
        except StoreError as error:
            answered.set_exception(error)
        return answered

    def tell(self, peer: str, message: wire.Done) -> None:
        """Without an answer; lost, if there is nobody. Raises StoreError, if it is closed."""
        self._line(peer).tell(message)

    def number(self) -> int:
        """Of the next question."""
        return next(self._numbers)

    def close(self) -> None:
        """Questions end with a StoreError, within some seconds."""
        with self._lock:
            self._is_closed = True
        for line in self._lines.values():
            line.close()
        self._context.destroy(0)

    def _line(self, peer: str) -> _Line:
        with self._lock:
            if self._is_closed:
                raise StoreError(_CLOSED)
            if peer not in self._lines:
                self._lines[peer] = _Line(self._context, peer)
            return self._lines[peer]


class _Asked(NamedTuple):
    message: wire.Message
    until: float
    answered: Answered | None  # None: nobody waits for an answer


class _Line:
    """To one peer. A thread of its own sends what others leave for it, and gives them the answers:
    so that a question takes no thread, however long its answer takes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peer: str) -> None:
        self._peer = peer
        self._silent_until = 0.0
        self._left: SimpleQueue[_Asked] = SimpleQueue()
        self._open: dict[int, tuple[Answered, float]] = {}  # by number; until when
        self._looked = 0.0
        self._lock = threading.Lock()
        self._is_closed = False
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # else many questions look like nobody there
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for one that is not there
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MOST_BYTES)
        self._socket.connect(f"tcp://{peer}")
        self._thread = threading.Thread(target=self._run, name=f"peer {peer}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------- the others' threads

    def ask(self, asked: _Asked) -> None:
        """Raises StoreError for a peer that is left alone."""
        if time.monotonic() < self._silent_until:
            raise StoreError(f"{self._peer} did not answer a moment ago and is not asked ({FLAG}).")
        self._leave(asked)

    def tell(self, message: wire.Message) -> None:
        """Without an answer."""
        self._leave(_Asked(message, 0.0, None))

    def close(self) -> None:
        """Questions end."""
        with self._lock:
            self._is_closed = True
            self._ring()
        self._thread.join()
        self._bell.close()
        self._rung.close()

    def _leave(self, asked: _Asked) -> None:
        with self._lock:
            if self._is_closed:
                raise StoreError(_CLOSED)
            self._left.put(asked)
            self._ring()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it was rung often enough
            self._bell.send(b"!")

    # --------------------------------------------------------------- its thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._rung, zmq.POLLIN)
        while not self._is_closed:
            if self._rung.fileno() in dict(poller.poll(int(1e3 * _LOOK_SECONDS))):
                self._rung.recv(4096)
            self._send()
            self._receive()
            if time.monotonic() > self._looked + _LOOK_SECONDS:
                self._give_up()
        self._socket.close()
        while not self._left.empty():
            self._take()
        self._fail(list(self._open), _CLOSED)

    def _send(self) -> None:
        while not self._left.empty():
            message = self._take()
            is_left_alone = time.monotonic() < self._silent_until
            if self._socket.poll(0 if is_left_alone else CONNECT_MILLISECONDS, zmq.POLLOUT):
                self._socket.send(wire.encode(message))
            else:
                self._were_not_answered(list(self._open))

    def _take(self) -> wire.Message:
        message, until, answered = self._left.get()
        if answered is not None:
            self._open[message.number] = answered, until
        return message

    def _receive(self) -> None:
        while self._socket.poll(0):
            try:
                answer = wire.decode_answer(self._socket.recv())
            except msgspec.MsgspecError as error:
                self._fail(
                    list(self._open),
                    f"{self._peer} ({FLAG}) answers what this version does not understand: {error}",
                )
                continue
            if answer.number in self._open:  # else of a question that was given up
                answered, _ = self._open.pop(answer.number)
                answered.set_result(answer)

    def _give_up(self) -> None:
        self._looked = now = time.monotonic()
        is_there = self._socket.poll(0, zmq.POLLOUT)
        late = [n for n, (_, until) in self._open.items() if not is_there or now > until]
        if late:
            self._were_not_answered(late)

    def _were_not_answered(self, numbers: Sequence[int]) -> None:
        self._silent_until = time.monotonic() + PAUSE_SECONDS
        self._fail(
            numbers,
            f"{self._peer} does not answer. See whether a server with --role prefill runs there"
            f" ({FLAG}). It is left alone for {PAUSE_SECONDS:g} s.",
        )

    def _fail(self, numbers: Sequence[int], reason: str) -> None:
        for number in numbers:
            answered, _ = self._open.pop(number)
            answered.set_exception(StoreError(reason))
