"""Failures of SGLang's control routes, as its clients read them."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response

from megatron_hybrid.server.http.http_errors import error_response


def failing_as_sglang(name: str, words: str) -> Blueprint:
    """For routes of this name: whatever goes wrong there, `success` is false and the field `words`
    says why, beside OpenAI's error object. Statuses stay."""
    routes = Blueprint(name, __name__)

    def shaped(status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return status, {"success": False, words: body["error"]["message"], **body}

    @routes.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        return error_response(error, shaped)

    return routes
