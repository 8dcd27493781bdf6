"""A front end's socket to an engine process, or the coordinator, through its deaths and returns.

One thread (a greenlet in a front-end worker) owns the socket. Each life of the process gets a
socket of its own, so that nothing meant for one that died reaches the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.sockets import zmq_module

if TYPE_CHECKING:
    from megatron_hybrid.server.link.engine_client import EngineClient

T = TypeVar("T")
logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
RECONNECT_MILLISECONDS = 50
_HANDSHAKE = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)


class EngineLink:
    """Sends commands to the engine, or the coordinator, at `endpoint`; tells the client what
    happens, in the link's thread."""

    def __init__(self, endpoint: str, client: EngineClient) -> None:
        self._endpoint = endpoint
        self._client = client
        self._outgoing: queue.SimpleQueue[wire.Command] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._closing = False
        self._zmq = zmq_module()
        self._context = self._zmq.Context()
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)

    def start(self) -> None:
        """Begin to look for the engine."""
        self._thread.start()

    def send(self, command: wire.Command) -> None:
        """From any thread. What is sent while there is no engine is dropped."""
        self._outgoing.put(command)
        self._wake()

    def close(self) -> None:
        """End the thread and give up the socket."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread just as well
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._live_with_one_engine()
        except Exception:
            logger.exception("The connection to the engine broke.")
            self._client.lost()
        finally:
            self._context.destroy(linger=0)

    def _live_with_one_engine(self) -> None:
        """From the search for an engine process until its connection breaks."""
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        monitor = _uninterrupted(lambda: socket.get_monitor_socket(_HANDSHAKE | _DISCONNECTED))
        socket.connect(self._endpoint)
        poller = self._zmq.Poller()
        for source in (socket, monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        is_connected = False
        try:
            while not self._closing:
                ready = dict(poller.poll(int(1000 * TICK_SECONDS)))
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                if is_connected:
                    self._send(socket, self._take_outgoing())
                    self._receive(socket)
                else:
                    self._take_outgoing()  # nobody will want it
                if monitor in ready:
                    event = parse_monitor_message(monitor.recv_multipart())["event"]
                    if event == _HANDSHAKE:
                        is_connected = True
                        self._take_outgoing()
                        self._send(socket, self._client.connected())
                    elif event == _DISCONNECTED and is_connected:
                        self._receive(socket)  # its last words may say why
                        return
                self._client.tick()
        finally:
            _uninterrupted(socket.disable_monitor)
            monitor.close(linger=0)
            socket.close(linger=0)
            if is_connected and not self._closing:
                self._client.lost()

    def _take_outgoing(self) -> list[wire.Command]:
        commands: list[wire.Command] = []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._outgoing.get_nowait())
        return commands

    def _send(self, socket: Any, commands: Sequence[wire.Command]) -> None:
        if commands:
            socket.send(wire.encode(commands))

    def _receive(self, socket: Any) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._client.received(wire.decode_replies(socket.recv(zmq.NOBLOCK)))


def _uninterrupted(call: Callable[[], T]) -> T:
    """What it gives. pyzmq repeats calls that a signal interrupts, but not those of monitors."""
    while True:
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return call()
