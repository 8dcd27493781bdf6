"""Exceptions as OpenAI's error objects."""

from __future__ import annotations

import logging
from typing import Any

from flask import Flask, Response
from msgspec import json
from werkzeug.exceptions import HTTPException

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.body_reader import BodyBroken, BodyStalled
from megatron_hybrid.server.http.fields import FieldError
from megatron_hybrid.server.http.generation import ClientGone, GenerationFailed, TimedOut
from megatron_hybrid.server.http.preparation import UnknownModel
from megatron_hybrid.server.http.preparers import PreparationLost
from megatron_hybrid.server.link.engine_client import QueryFailed
from megatron_hybrid.server.link.subscription import EngineUnavailable, Overloaded

logger = logging.getLogger(__name__)

_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}
CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is there to read it


class WrongKey(PermissionError):
    """The client sent no bearer key, or not the right one."""


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the error object of an exception."""
    if isinstance(error, InvalidRequestError):
        # OpenAI answers 400 to a prompt that is too long, and tells it apart by the code.
        too_long = error.status == 413
        code = error.code if isinstance(error, FieldError) else "invalid_value"
        return 400 if too_long else error.status, _error_object(
            str(error),
            "invalid_request_error",
            error.field,
            "context_length_exceeded" if too_long else code,
        )
    if isinstance(error, UnknownModel):
        return 404, _error_object(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, WrongKey):
        return 401, _error_object(str(error), "invalid_request_error", None, "invalid_api_key")
    if isinstance(error, Overloaded):
        return 429, _error_object(str(error), "rate_limit_error", None, "queue_full")
    if isinstance(error, EngineUnavailable):
        return 503, _error_object(str(error), "server_error", None, "engine_unavailable")
    if isinstance(error, PreparationLost):
        return 503, _error_object(str(error), "server_error", "body", "preparation_lost")
    if isinstance(error, GenerationFailed):
        return 500, _error_object(str(error), "server_error", None, "engine_error")
    if isinstance(error, TimedOut):
        return 504, _error_object(str(error), "timeout_error", None, "timeout")
    if isinstance(error, BodyStalled):
        return 408, _error_object(str(error), "timeout_error", "body", "request_timeout")
    if isinstance(error, BodyBroken):
        return 400, _error_object(str(error), "invalid_request_error", "body", "broken_body")
    if isinstance(error, QueryFailed):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return error.status, _error_object(str(error), kind, None, "refused_by_engine")
    if isinstance(error, ClientGone):
        return CLIENT_CLOSED_REQUEST, _error_object("The client has gone.", "client_closed", None)
    if isinstance(error, HTTPException):
        status = error.code or 500
        return status, _error_object(
            f"{error.name}: {error.description}", "invalid_request_error", None, _CODES.get(status)
        )
    logger.error("A request failed inside the server.", exc_info=error)
    return 500, _error_object("The server failed; its log says why.", "server_error", None)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(json.encode(value), status, mimetype="application/json")


def install(app: Flask) -> None:
    """Answer every exception, also Flask's own, with an error object."""

    app.errorhandler(Exception)(error_response)


def error_response(error: Exception) -> Response:
    status, body = describe(error)
    response = json_response(body, status)
    if isinstance(error, HTTPException):
        for name, value in error.get_headers():
            if name.lower() == "allow":
                response.headers[name] = value
    if status in (429, 503):
        response.headers["Retry-After"] = "1"
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _error_object(
    message: str, kind: str, param: str | None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
