"""Wakes the other replicas of a lockstep group.

An idle engine loop sleeps until its own front ends say something. Replicas in lockstep step
together, so one that has got a request must not wait until the others have slept enough.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from megatron_hybrid.parallel import ParallelContext


class Waker:
    """The first rank of each replica has one. All ranks of the group call `of` at the same time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.PULL)  # readable when another replica wakes this one
        self._others: list[zmq.Socket[bytes]] = []
        self._context = context

    @classmethod
    def of(
        cls, context: zmq.Context[zmq.Socket[bytes]] | None, parallel: ParallelContext
    ) -> Waker | None:
        """`context`: None on ranks that are not the first of a replica, which have no waker;
        neither has a replica that nobody steps with."""
        if parallel.experts.replicas.size == 1:
            return None
        waker, address = None, None
        if context is not None:
            waker = cls(context)
            port = waker.socket.bind_to_random_port("tcp://*")
            address = f"tcp://{_own_address()}:{port}"
        addresses = parallel.lockstep.gather_objects(address)
        if waker is not None:
            waker._connect([other for other in addresses if other not in (None, address)])
        return waker

    def wake_others(self) -> None:
        """Let the other replicas look up, if they sleep."""
        for other in self._others:
            with contextlib.suppress(zmq.Again):  # it has enough to wake up from
                other.send(b"", zmq.NOBLOCK)

    def wait(self, front_ends: zmq.Socket[bytes], milliseconds: int) -> None:
        """Until a front end has said something, another replica wakes us, or the time is up."""
        poller = zmq.Poller()
        poller.register(front_ends, zmq.POLLIN)
        poller.register(self.socket, zmq.POLLIN)
        poller.poll(milliseconds)
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)

    def _connect(self, addresses: list[str | None]) -> None:
        for address in addresses:
            assert address is not None
            other = self._context.socket(zmq.PUSH)
            other.setsockopt(zmq.SNDHWM, 10)
            other.setsockopt(zmq.LINGER, 0)
            other.connect(address)
            self._others.append(other)


def _own_address() -> str:
    """Of this host, as the other nodes of torchrun's job reach it."""
    targets = [os.environ.get("MASTER_ADDR", "127.0.0.1")]
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        # For a host whose own name stands for a loopback address: the way out of it. That address
        # is reserved for documentation, and nothing is sent to it.
        targets.append("192.0.2.1")
    address = "127.0.0.1"
    for target in targets:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
            contextlib.suppress(OSError),
        ):
            probe.connect((target, 1))  # sends nothing: it only looks for the way there
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            break
    return address
