"""Exceptions as OpenAI's error objects."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flask import Response
from msgspec import json
from werkzeug.exceptions import HTTPException

from megatron_hybrid.errors import RequestError

logger = logging.getLogger(__name__)

_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


class WrongKey(RequestError):
    """The client sent no bearer key, or not the right one."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the error object of an exception."""
    message, kind, field, code = "The server failed; its log says why.", "server_error", None, None
    status = 500
    if isinstance(error, RequestError):
        # OpenAI answers 400 to a prompt that is too long, and tells it apart by the code.
        status = 400 if error.status == 413 else error.status
        message, kind, field, code = str(error), error.kind, error.field, error.code
    elif isinstance(error, HTTPException):
        status = error.code or 500
        message, kind = f"{error.name}: {error.description}", "invalid_request_error"
        code = _CODES.get(status)
    else:
        logger.error("A request failed inside the server.", exc_info=error)
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}}


def json_response(value: Any, status: int = 200) -> Response:
    """The value as a JSON answer."""
    return Response(json.encode(value), status, mimetype="application/json")


def error_response(
    error: Exception,
    shaped: Callable[[int, dict[str, Any]], tuple[int, dict[str, Any]]] | None = None,
) -> Response:
    """The answer to a request that ended so. shaped: makes another interface's status and body of
    OpenAI's."""
    status, body = describe(error)
    response = json_response(*(body, status) if shaped is None else shaped(status, body)[::-1])
    if isinstance(error, HTTPException):
        for name, value in error.get_headers():
            if name.lower() == "allow":
                response.headers[name] = value
    if status in (429, 503):  # also where another interface has another number
        response.headers["Retry-After"] = "1"
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
