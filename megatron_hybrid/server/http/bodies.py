"""The body of the current request, read in pieces."""

from __future__ import annotations

from typing import TypeVar

from flask import request
from werkzeug.exceptions import RequestEntityTooLarge

from megatron_hybrid.server.http.protocol.parsing import Body, parse_body, read

MAX_SMALL_BODY_BYTES = 2**16  # of routes whose fields are short
_PIECE = 2**16
T = TypeVar("T", bound=Body)


def read_body() -> list[bytes]:
    """The pieces of a body of any size that is served."""
    pieces, length, most = [], 0, request.max_content_length
    while piece := request.stream.read(_PIECE):
        pieces.append(piece)
        length += len(piece)
        if most is not None and length > most:  # in chunks, whose sum nobody has announced
            raise RequestEntityTooLarge
    return pieces


def small_body(kind: type[T]) -> T:
    """A body that has few fields; without a body, none of them is given. Raises FieldError."""
    request.max_content_length = MAX_SMALL_BODY_BYTES
    data = b"".join(read_body())
    return read(kind, parse_body(data) if data else {})
