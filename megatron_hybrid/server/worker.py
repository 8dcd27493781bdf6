"""A front-end worker: gunicorn's process with gevent's greenlets, one for each connection.

What gunicorn's own lacks: it looks every second whether it shall end, and waits for idle
connections until their time is up.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import gevent
from gevent import monkey, socket
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from megatron_hybrid.server.body_reader import BodyBroken, BodyReader, BodyStalled

HEADER_SECONDS = 20.0  # for a new connection's first request line and headers
KEEP_ALIVE_SECONDS = 75.0  # between requests; more than the minute of common proxies
STALLED_CLIENT_SECONDS = 120.0  # for the next piece of a body, or until it reads on
NOTIFY_SECONDS = 1.0
POLL_SECONDS = 0.05


class FrontEndWorker(GeventWorker):
    """Serves the one listener until told to end; then lets open requests finish."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sockets: list[Any]
        self._idle: set[Any] = set()  # greenlets that wait for a request's first line

    def patch(self) -> None:
        """Called first of all in the worker's process. The master is never patched."""
        monkey.patch_all(ssl=False)  # used here by nobody, and imported already
        self.sockets = [
            socket.socket(listener.FAMILY, socket.SOCK_STREAM, fileno=listener.sock.detach())
            for listener in self.sockets
        ]

    def timeout_ctx(self) -> gevent.Timeout:
        """Limits the wait for the next request of the connection whose greenlet calls."""
        connection = gevent.getcurrent()
        is_new = not hasattr(connection, "had_request")
        connection.had_request = True
        self._idle.add(connection)
        return gevent.Timeout(HEADER_SECONDS if is_new else KEEP_ALIVE_SECONDS, False)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        client.settimeout(STALLED_CLIENT_SECONDS)
        try:
            AsyncWorker.handle(self, listener, client, addr)
        finally:
            self._idle.discard(gevent.getcurrent())

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        self._idle.discard(gevent.getcurrent())
        req.body.reader = BodyReader(req, STALLED_CLIENT_SECONDS)
        return super().handle_request(listener_name, req, sock, addr)

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        # An idle connection that is closed for the shutdown, or one whose client breaks off in a
        # body that was not needed any more: there is nothing to answer and nothing to log.
        if not isinstance(exc, (gevent.GreenletExit, BodyStalled, BodyBroken)):
            super().handle_error(req, client, addr, exc)

    def run(self) -> None:
        listener = self.sockets[0]
        listener.setblocking(1)
        pool = Pool(self.worker_connections)
        server = StreamServer(listener, handle=partial(self.handle, listener), spawn=pool)
        if self.cfg.workers > 1:
            server.max_accept = 1  # leaves connections to workers with less to do
        server.start()
        last_notified = 0.0
        while self.alive:
            if time.monotonic() - last_notified > NOTIFY_SECONDS:
                last_notified = time.monotonic()
                self.notify()
            gevent.sleep(POLL_SECONDS)
        server.close()  # no more connections; those that are open go on
        deadline = time.monotonic() + self.cfg.graceful_timeout
        while len(pool) and time.monotonic() < deadline:
            self.notify()
            gevent.killall(list(self._idle), block=False)
            gevent.sleep(POLL_SECONDS)
        pool.kill(timeout=1.0)

    def handle_quit(self, sig: int, frame: Any) -> None:
        # Without a word to anybody: whoever sends it has waited long enough.
        sys.stderr.flush()
        os._exit(0)
