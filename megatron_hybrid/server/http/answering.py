"""What every route that answers does: it reads a body, and gives its place up when all is sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from flask import Response, g, request
from werkzeug.exceptions import RequestEntityTooLarge

from megatron_hybrid.server.http.connection import client_gone
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.protocol.parsing import Body, parse_body, read
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Answers

MAX_SMALL_BODY_BYTES = 2**16  # of routes whose fields are short
_PIECE = 2**16
T = TypeVar("T", bound=Body)


def request_body() -> list[bytes]:
    """The pieces of the current request's body."""
    pieces, length, most = [], 0, request.max_content_length
    while piece := request.stream.read(_PIECE):
        pieces.append(piece)
        length += len(piece)
        if most is not None and length > most:  # in chunks, whose sum nobody has announced
            raise RequestEntityTooLarge
    return pieces


def read_body(kind: type[T]) -> T:
    """The current request's; without a body, none of its fields is given. Raises
    InvalidRequestError."""
    data = b"".join(request_body())
    return read(kind, parse_body(data) if data else {})


def small_body(kind: type[T]) -> T:
    """As `read_body`, of one that has few fields."""
    request.max_content_length = MAX_SMALL_BODY_BYTES
    return read_body(kind)


def answered(
    serving: Serving,
    request_id: str,
    wanted: GenerationRequest,
    begin: Callable[[Generation], Answers],
) -> Response:
    """Answered from a place that is given up when all is sent, or complete, or fails. request_id:
    the answer's id."""
    gone = client_gone(request.environ)
    generation = g.generation = Generation(
        serving, wanted, request_id, disconnected=gone, arrived=g.started
    )
    with ExitStack() as place:
        place.callback(generation.close)
        response = begin(generation).respond()
        if response.is_streamed:
            response.call_on_close(place.pop_all().close)
        return response
