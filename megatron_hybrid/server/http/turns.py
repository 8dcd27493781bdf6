"""Turns for the other greenlets of a worker while one of them has much to do."""

from __future__ import annotations

import time

_A_MOMENT = 1e-6


def let_others_run() -> None:
    """Call it every few milliseconds. Where nobody else is ready, it costs a few microseconds.

    Not `sleep(0)`, which only queues the caller once more: gevent looks at sockets and timers after
    as many as 50 such turns, so whoever works for 3 ms between them keeps the others off for 150.
    """
    time.sleep(_A_MOMENT)
