"""The zmq module that fits this process: gevent's where gevent has patched threading.

An ordinary zmq call blocks its thread, and with it every greenlet of a front-end worker.
"""

from __future__ import annotations

import sys
from typing import Any


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
