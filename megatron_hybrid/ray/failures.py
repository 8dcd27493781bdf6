"""What clients get when a replica is gone, in the form of the route that they asked."""

from __future__ import annotations

from typing import Any

from msgspec import json

from megatron_hybrid.ray.messages import Whole
from megatron_hybrid.server.http.anthropic.errors import as_anthropic

_CODES = {404: "not_found", 503: "engine_unavailable"}


def failed(status: int, message: str) -> Whole:
    """Where nothing has been said yet."""
    headers = [("Content-Type", "application/json")]
    if status == 503:
        headers.append(("Retry-After", "1"))
    return Whole("", status, headers, json.encode(_error(status, message)))


def broken_stream(route: str, message: str) -> bytes:
    """What ends a stream that has begun."""
    error = _error(503, message)
    if route == "/v1/messages":
        _, said = as_anthropic(503, error, "")
        return b"event: error\ndata: " + json.encode(said) + b"\n\n"
    if route == "/v1/responses":
        said = {"type": "error", "code": "server_error", "message": message, "param": None}
        return b"event: error\ndata: " + json.encode(said) + b"\n\n"
    return b"data: " + json.encode(error) + b"\n\ndata: [DONE]\n\n"


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": _CODES[status]}}
