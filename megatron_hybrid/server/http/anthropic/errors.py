"""Errors as Anthropic's error objects."""

from __future__ import annotations

from typing import Any

from flask import Response, g

from megatron_hybrid.server.http.http_errors import error_response

OVERLOADED = (
    529  # Anthropic's number where others have 429: it is not this client that asks too much
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def as_anthropic(status: int, body: dict[str, Any], request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error that has these in OpenAI's form."""
    if status == 429:
        status = OVERLOADED
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error, message = body["error"], body["error"]["message"]
    if error["code"] == "context_length_exceeded":  # by these words clients know that they have to
        message = f"prompt is too long: {message}"  # shorten the chat
    said: dict[str, Any] = {"type": kind, "message": message}
    if error["code"] is not None:
        said["details"] = {"error_code": error["code"]}
    return status, {"type": "error", "error": said, "request_id": request_id}


def anthropic_error_response(error: Exception) -> Response:
    """The answer to a request that ended so."""
    return error_response(error, lambda status, body: as_anthropic(status, body, g.request_id))
