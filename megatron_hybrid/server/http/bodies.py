"""The body of the current request, read in pieces."""

from __future__ import annotations

from flask import request
from werkzeug.exceptions import RequestEntityTooLarge

from megatron_hybrid.server.http.fields import Fields, parse_body

MAX_SMALL_BODY_BYTES = 2**16  # of routes whose fields are short
_PIECE = 2**16


def read_body() -> list[bytes]:
    """The pieces of a body of any size that is served."""
    pieces, length, most = [], 0, request.max_content_length
    while piece := request.stream.read(_PIECE):
        pieces.append(piece)
        length += len(piece)
        if most is not None and length > most:  # in chunks, whose sum nobody has announced
            raise RequestEntityTooLarge
    return pieces


def small_body() -> Fields:
    """The fields of a body that has few of them; none if there is no body."""
    request.max_content_length = MAX_SMALL_BODY_BYTES
    data = b"".join(read_body())
    return Fields(parse_body(data) if data else {})
