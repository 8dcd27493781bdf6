"""A small HTTP/1.1 client for thousands of streams at once.

A benchmark's client must not be what it measures. So bytes are handled where the event loop
delivers them, without waking a task for each piece: one stream's token costs a few microseconds
here, and its time is taken when it arrives. Connections are kept and used again. No proxies, no
redirects, no compression: it talks to a server that the user names.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEAD = 2**16  # bytes of a response's status line and headers


class HttpError(Exception):
    """The connection failed, or what came is not HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `prefix` comes before every path, such as "/api" or nothing."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError for what is no http(s) URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server, such as http://127.0.0.1:5000.")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


class ResponseParser:
    """One response, from pieces of any size.

    `feed` returns what the piece adds to the body (chunks' frames removed); `complete` says that
    nothing more belongs to this response.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.complete = False
        self.reusable = True  # the connection, for another request
        self._buffer = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # bytes of the body, or of the chunk, to come; None: unknown
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Raises HttpError for what is not HTTP."""
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if self._in_head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD:
                    raise HttpError(f"the response's headers have more than {MAX_HEAD} bytes")
                self._buffer = data
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
            if self._in_head:  # it was an interim response
                return self.feed(data)
        if self.complete:
            return b""
        return self._read_chunks(data) if self._chunked else self._read_plain(data)

    def end(self) -> None:
        """The server closed the connection. Raises HttpError if something is missing."""
        self.reusable = False
        if self.complete:
            return
        if self._in_head or self._chunked or self._left is not None:
            raise HttpError("the server closed the connection before the end of its answer")
        self.complete = True

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpError(f"the answer begins with {status_line[:40]!r}, which is not HTTP/1.1")
        self.status = int(rest[:3])
        if self.status < 200:
            return
        self._in_head = False
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.reusable = connection != "close" and (
            version != "HTTP/1.0" or connection == "keep-alive"
        )
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._chunked:
            return
        length = self.headers.get("content-length")
        if length is not None and not length.isdigit():
            raise HttpError(f"Content-Length is {length!r}")
        if self.status in (204, 304):
            length = "0"
        self._left = None if length is None else int(length)
        self.complete = self._left == 0

    def _read_plain(self, data: bytes) -> bytes:
        if self._left is None:  # until the connection closes
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.complete = self._left == 0
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        position = 0
        while True:
            if self._left:  # inside a chunk: its data and the line end behind it
                available = len(data) - position
                take = min(self._left, available)
                # The last two bytes of what is left are the line end.
                visible = min(take, max(self._left - 2, 0))
                if visible:
                    pieces.append(data[position : position + visible])
                position += take
                self._left -= take
                if self._left:
                    break
            end = data.find(b"\r\n", position)
            if end < 0:
                self._buffer = data[position:]
                break
            line = data[position:end]
            position = end + 2
            if self._in_trailer:
                if not line:
                    self.complete = True
                    break
                continue
            try:
                size = int(line.split(b";", 1)[0], 16)
            except ValueError:
                raise HttpError(f"{line[:20]!r} is no size of a chunk") from None
            self._in_trailer = size == 0
            self._left = size + 2 if size else 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Connection(asyncio.Protocol):
    """One connection and the response that is awaited on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.used = False
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[ResponseParser] | None = None
        self._on_data: Callable[[ResponseParser, bytes], None] = lambda parser, data: None

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def answered(self) -> bool:
        """Whether anything came back for the present request."""
        return self._parser is not None and self._parser.status > 0

    def exchange(
        self, request: bytes, on_data: Callable[[ResponseParser, bytes], None]
    ) -> asyncio.Future[ResponseParser]:
        """Send a request; `on_data` gets the body as it comes, the future the end."""
        assert self.transport is not None
        self._parser = ResponseParser()
        self._on_data = on_data
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            self.close()  # nothing was asked
            return
        try:
            body = parser.feed(data)
            if body:
                self._on_data(parser, body)
        except Exception as error:
            done.set_exception(error)
            self.close()
            return
        if parser.complete:
            done.set_result(parser)

    def connection_lost(self, error: Exception | None) -> None:
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            return
        try:
            if error is not None:
                raise HttpError(f"the connection was lost: {error}") from error
            parser.end()
        except HttpError as problem:
            done.set_exception(problem)
        else:
            done.set_result(parser)


class HttpClient:
    """Requests to one server over as many connections as are needed at once."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str] | None = None, *, insecure: bool = False
    ) -> None:
        """insecure: take any certificate. Raises ValueError for a bad URL or header."""
        self.address = Address.parse(base_url)
        self._ssl: ssl.SSLContext | None = None
        if self.address.scheme == "https":
            self._ssl = ssl.create_default_context()
            if insecure:
                self._ssl.check_hostname = False
                self._ssl.verify_mode = ssl.CERT_NONE
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        lines = {"Host": f"{host}:{self.address.port}", "Content-Type": "application/json"}
        lines.update(headers or {})
        for name, value in lines.items():
            if any(letter in name + value for letter in "\r\n"):
                raise ValueError(f"The header {name!r} has a line break.")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        on_data: Callable[[ResponseParser, bytes], None] | None = None,
    ) -> tuple[ResponseParser, bytes]:
        """The response and its body; with `on_data`, which gets the body, an empty one.

        Raises HttpError or OSError when there is no complete response.
        """
        received: list[bytes] = []
        handler = on_data or (lambda parser, data: received.append(data))
        message = (
            f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        while True:
            connection = await self._connect()
            reused, connection.used = connection.used, True
            finished = False
            try:
                response = await connection.exchange(message, handler)
                finished = True
            except HttpError:
                # An idle connection may have been closed while nobody looked: that is no failure.
                if not reused or connection.answered:
                    raise
                continue
            finally:
                if not finished:
                    connection.close()
            if response.reusable and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()
            return response, b"".join(received)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self.address.host, self.address.port, ssl=self._ssl
        )
        return connection
