"""A front-end worker: gunicorn's process with gevent's greenlets, one for each connection.

What gunicorn's own lacks: it looks every second whether it shall end, waits for idle connections
until their time is up, and takes no new ones while others hold all places.
"""

from __future__ import annotations

import contextlib
import http
import logging
import os
import resource
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import gevent
from gevent import monkey, socket
from gevent.pool import Pool
from gevent.server import StreamServer
from gevent.ssl import SSLContext, SSLSocket
from gunicorn import util
from gunicorn.glogging import Logger
from gunicorn.http import errors
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from megatron_hybrid.server.addresses import Addresses
from megatron_hybrid.server.http.connection import (
    BodyBroken,
    BodyReader,
    BodyStalled,
    Pace,
    let_others_run,
)
from megatron_hybrid.server.http.root_path import without_root
from megatron_hybrid.server.link.subscription import Overloaded
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.processes.connections import Connection, Connections
from megatron_hybrid.server.tls import load_certificate

logger = logging.getLogger(__name__)

HEADER_SECONDS = 20.0  # for a request line and headers
KEEP_ALIVE_SECONDS = 75.0  # between requests; more than the minute of common proxies
STALLED_CLIENT_SECONDS = 120.0  # for the next piece of a body, or until it reads on
BODY_SECONDS = 30.0  # for a body, and one more for every
BODY_BYTES_A_SECOND = 2**14  # that came: 64 MiB may take 69 minutes
NOTIFY_SECONDS = 1.0
POLL_SECONDS = 0.05
REPORT_SECONDS = 10.0  # between lines on connections that were closed or refused
LAST_WORDS_SECONDS = 1.0  # to read why a connection is refused

# Places besides --http-connections. Half of them are for requests other than answers, the other
# half for connections that can be closed at any time.
SPARE_CONNECTIONS = 512
BRIEF_ROUTES = ("/health", "/ping", "/metrics")  # these are served while everything else is refused
FILES_BESIDE = 256  # that a worker may have open besides its connections

_STATUSES: dict[type[Exception], int] = {
    errors.LimitRequestLine: 414,
    errors.ExpectationFailed: 417,
    errors.LimitRequestHeaders: 431,
    errors.UnsupportedTransferCoding: 501,
}


class FrontEndWorker(GeventWorker):
    """Serves the one listener until told to end; then lets open requests finish."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sockets: list[Any]
        options: ServerOptions = self.app.server_options
        self._options = options
        self._addresses = Addresses(options.trusted_proxies)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        places = options.connections_a_worker + SPARE_CONNECTIONS
        if files != resource.RLIM_INFINITY:
            places = max(2, min(places, files - FILES_BESIDE))
        self._connections = Connections(
            places=places,
            requests=max(places // 2, places - SPARE_CONNECTIONS // 2),
            an_address=options.connections_an_address,
            header_seconds=HEADER_SECONDS,
            idle_seconds=KEEP_ALIVE_SECONDS,
        )
        self._accepts = True
        self._tls: TlsSockets | None = None

    def patch(self) -> None:
        """Called first of all in the worker's process. The master is never patched."""
        monkey.patch_all(ssl=False)  # used here by nobody, and imported already
        self.sockets = [
            socket.socket(listener.FAMILY, socket.SOCK_STREAM, fileno=listener.sock.detach())
            for listener in self.sockets
        ]
        if self.cfg.is_ssl:
            self._tls = TlsSockets(self.cfg.certfile, self.cfg.keyfile)

    def timeout_ctx(self) -> contextlib.AbstractContextManager[None]:
        """Called before each request of a connection; `_connections` ends it when it waits too
        long."""
        connection: Connection = gevent.getcurrent().connection
        if connection.requests:
            self._connections.end(connection)
            let_others_run()  # a client that sends one request upon the other is not alone
        connection.requests += 1
        connection.client.settimeout(None)
        return contextlib.nullcontext()

    def opened(self, client: Any, addr: Any) -> Connection:
        """A connection that has just been accepted, in its place."""
        connection = Connection(client, self._addresses.counted(addr[0]))
        self._connections.open(connection)
        return connection

    def handle(self, listener: Any, client: Any, addr: Any, connection: Connection) -> None:
        """A connection's life, in its greenlet."""
        gevent.getcurrent().connection = connection
        try:
            seconds = LAST_WORDS_SECONDS if connection.is_refused else HEADER_SECONDS
            if self._tls is not None and not self._tls.accept(connection, seconds):
                return
            if connection.is_refused:
                self._refuse_address(connection.client, addr)
            else:
                AsyncWorker.handle(self, listener, connection.client, addr)
        finally:
            self._connections.close(connection)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        """One request: refused, or read and answered."""
        connection: Connection = gevent.getcurrent().connection
        path = without_root(req.path, self._options.root_path)
        brief = req.method in ("GET", "HEAD") and path in BRIEF_ROUTES
        if not self._connections.begin(connection, brief=brief):
            self._refuse_request(req, sock, addr)
            raise StopIteration
        sock.settimeout(STALLED_CLIENT_SECONDS)
        req.unreader.sock = connection
        pace = Pace(
            patience=STALLED_CLIENT_SECONDS,
            seconds=BODY_SECONDS,
            bytes_a_second=BODY_BYTES_A_SECOND,
        )
        req.body.reader = BodyReader(req, connection, pace)
        try:
            return super().handle_request(listener_name, req, sock, addr)
        except TimeoutError:  # the client does not read its answer
            raise StopIteration from None

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer what is not HTTP; stay silent where nobody is left to be answered."""
        # An idle connection that is closed for the shutdown, or one whose client breaks off in a
        # body that was not needed any more, or breaks TLS: there is nothing to answer and nothing
        # to log.
        if isinstance(exc, (gevent.GreenletExit, BodyStalled, BodyBroken, ssl.SSLError)):
            return
        if isinstance(exc, errors.ParseException):
            self._refuse_headers(client, addr, exc)
        else:
            super().handle_error(req, client, addr, exc)

    # What the application never sees. Imported in the functions: what they use must be gevent's.

    def _refuse_address(self, client: Any, addr: Any) -> None:
        reason = (
            f"{self._options.connections_an_address} connections are open from {addr[0]}; that is "
            "the limit (--http-connections-per-address, divided by --http-workers; "
            "--trusted-proxies have none). Try again later."
        )
        self._refuse(client, addr, Overloaded(reason))

    def _refuse_request(self, req: Any, client: Any, addr: Any) -> None:
        reason = (
            f"{self._connections.requests} requests are being read or answered; that is the limit "
            "(--http-connections, divided by --http-workers). Try again later."
        )
        self._refuse(client, addr, Overloaded(reason), req)

    def _refuse_headers(self, client: Any, addr: Any, error: Exception) -> None:
        from werkzeug.exceptions import default_exceptions

        kind = default_exceptions[_STATUSES.get(type(error), 400)]
        self._refuse(client, addr, kind(f"The request is not HTTP as it is served here: {error}"))

    def _refuse(self, client: Any, addr: Any, error: Exception, req: Any = None) -> None:
        """Answer this error, and hang up when the client had time to read it."""
        from megatron_hybrid.server.http.access_log import REQUEST_ID, log_request, request_id
        from megatron_hybrid.server.http.http_errors import error_response

        response = error_response(error)
        headers = {} if req is None else dict(req.headers)
        identity = request_id(headers.get(REQUEST_ID.upper()))
        response.headers[REQUEST_ID] = identity
        response.headers["Connection"] = "close"
        phrase = http.HTTPStatus(response.status_code).phrase
        head = f"HTTP/1.1 {response.status_code} {phrase}\r\n{response.headers}"
        with contextlib.suppress(OSError):
            client.settimeout(LAST_WORDS_SECONDS)
            client.sendall(head.encode("latin-1") + response.get_data())
        self._connections.end(gevent.getcurrent().connection)
        log_request(
            identity,
            self._addresses.client(addr[0], headers.get("X-FORWARDED-FOR")),
            "-" if req is None else req.method,
            "-" if req is None else req.path,
            response.status_code,
        )
        util.close_graceful(client, timeout=LAST_WORDS_SECONDS)

    def run(self) -> None:
        """Accept connections until told to end, and let open requests finish then."""
        listener = self.sockets[0]
        listener.setblocking(1)
        pool = Pool(None)
        name = listener.getsockname()  # still asked for when it is closed
        named = SimpleNamespace(getsockname=lambda: name)
        server = _Listener(listener, handle=partial(self.handle, named), spawn=pool)
        server.full, server.opened = self._is_full, self.opened
        if self.cfg.workers > 1:
            server.max_accept = 1  # leaves connections to workers with less to do
        server.start()
        last_notified = last_reported = 0.0
        while self.alive:
            now = time.monotonic()
            if now - last_notified > NOTIFY_SECONDS:
                last_notified = now
                self.notify()
            if now - last_reported > REPORT_SECONDS and self._report():
                last_reported = now
            self._connections.close_overdue()
            if not self._accepts and not self._is_full():
                server.start_accepting()
            gevent.sleep(POLL_SECONDS)
        server.close()  # no more connections; those that are open go on
        deadline = time.monotonic() + self.cfg.graceful_timeout
        while len(pool) and time.monotonic() < deadline:
            self.notify()
            self._connections.close_waiting()
            gevent.sleep(POLL_SECONDS)
        pool.kill(timeout=1.0)

    def _is_full(self) -> bool:
        """Asked before each connection that is taken; until it is not, none is."""
        self._accepts = self._connections.has_place()
        return not self._accepts

    def _report(self) -> bool:
        """Whether there was something to report."""
        made_room, refused = self._connections.made_room, self._connections.refused
        self._connections.made_room = self._connections.refused = 0
        if made_room or refused:
            logger.warning(
                "All %d connections of a worker were taken, or those of an address: %d that waited "
                "for their client were closed, and %d requests refused.",
                self._connections.places,
                made_room,
                refused,
            )
        return bool(made_room or refused)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """SIGQUIT: end at once."""
        # Without a word to anybody: whoever sends it has waited long enough.
        sys.stderr.flush()
        os._exit(0)


class _Listener(StreamServer):
    """Has connections counted when they are accepted: their greenlets may begin much later."""

    opened: Callable[[Any, Any], Connection]

    def do_handle(self, client: Any, addr: Any) -> None:
        super().do_handle(client, addr, self.opened(client, addr))


class _TlsSocket(SSLSocket):
    def close(self) -> None:
        # Tells the client that nothing was cut off, and does not wait for its reply.
        with contextlib.suppress(OSError, ValueError):
            self.settimeout(0.0)
            self.unwrap()
        super().close()


class TlsSockets:
    """Makes encrypted connections of plain ones."""

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        self._context = SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.sslsocket_class = _TlsSocket
        self._context.set_alpn_protocols(["http/1.1"])
        load_certificate(self._context, certfile, keyfile)

    def accept(self, connection: Connection, seconds: float) -> bool:
        """Encrypt it, before anything is read. False, and its socket is closed, unless both sides
        agree in time."""
        agreed = False
        # A client without TLS, one that does not trust us, one that is gone: nothing to log.
        with contextlib.suppress(OSError):
            try:
                # Already now, for whoever may have to hang up meanwhile.
                connection.client = self._context.wrap_socket(
                    connection.client, server_side=True, do_handshake_on_connect=False
                )
                with gevent.Timeout(seconds, TimeoutError):
                    connection.client.do_handshake()
                agreed = True
            finally:
                if not agreed:
                    connection.client.close()
        return agreed


class ServerLog(Logger):
    """gunicorn's log, in the form that all other lines have."""

    def setup(self, cfg: Any) -> None:
        """Called by gunicorn: its errors go where all our lines go."""
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True
