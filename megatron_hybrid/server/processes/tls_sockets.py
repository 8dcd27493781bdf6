"""Encrypted connections of a front-end worker. For a process that gevent has patched."""

from __future__ import annotations

import contextlib
import ssl

import gevent
from gevent.ssl import SSLContext, SSLSocket

from megatron_hybrid.server.processes.connections import Connection
from megatron_hybrid.server.tls import load_certificate


class _Connection(SSLSocket):
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
        self._context.sslsocket_class = _Connection
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
