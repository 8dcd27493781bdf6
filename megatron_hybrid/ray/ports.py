"""Ports for servers that are started later."""

from __future__ import annotations

import contextlib
import random
import socket

# Above Ray's workers' ports, and below those that the system gives to sockets that don't care: a
# port of these, free now, may be somebody's connection by the time that a server has loaded its
# model and listens. Some programs read ports as 16 bits with a sign, too.
FIRST, LAST = 20_000, 29_999


def free_port() -> int:
    """One of this machine that nobody has now."""
    choose = random.SystemRandom()  # the same one twice is no use, whatever else was seeded
    while True:
        port = choose.randint(FIRST, LAST)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
