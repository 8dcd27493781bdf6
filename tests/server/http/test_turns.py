"""Turns that a greenlet with much to do gives to the others of its worker."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
from gevent import monkey
monkey.patch_all()
import socket
import gevent
from megatron_hybrid.server.http.connection import let_others_run

ours, theirs = socket.socketpair()
answered_at = []

def answer():
    for _ in range(3):
        theirs.recv(1)
        answered_at.append(turn)

turn = 0
gevent.spawn(answer)
let_others_run()
for _ in range(3):
    ours.send(b"?")
    for turn in range(turn + 1, turn + 10):
        let_others_run()
print(*answered_at)
"""


def test_whoever_waits_for_a_socket_has_the_next_turn() -> None:
    """After `sleep(0)` sockets are looked at once in 50 turns."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    answered_at = [int(turn) for turn in done.stdout.split()]
    assert len(answered_at) == 3
    assert all(
        turn - question <= 3 for turn, question in zip(answered_at, (1, 10, 19), strict=True)
    )
