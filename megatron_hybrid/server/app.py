"""The Flask application: who may come in, and where the routes are."""

from __future__ import annotations

import hmac

from flask import Flask, request
from werkzeug.exceptions import UnsupportedMediaType

from megatron_hybrid.server import (
    access_log,
    control_routes,
    dashboard,
    http_errors,
    openai_routes,
    openapi,
    service_routes,
)
from megatron_hybrid.server.addresses import Addresses
from megatron_hybrid.server.http_errors import WrongKey
from megatron_hybrid.server.serving import Serving

MAX_BODY_BYTES = 64 * 2**20


def create_app(serving: Serving) -> Flask:
    app = Flask("megatron_hybrid")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    access_log.install(app, Addresses(serving.options.trusted_proxies))
    http_errors.install(app)
    _install_key_check(app, serving.options.api_key)
    _install_content_type_check(app)
    openai_routes.install(app, serving)
    service_routes.install(app, serving)
    control_routes.install(app, serving)
    dashboard.install(app, serving)
    openapi.install(app, serving)
    return app


def _install_key_check(app: Flask, api_key: str | None) -> None:
    if api_key is None:
        return
    expected = f"Bearer {api_key}".encode()

    @app.before_request
    def check_key() -> None:
        if request.path in openapi.OPEN_ROUTES or request.blueprint == dashboard.NAME:
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, expected):
            raise WrongKey("The Authorization header must be 'Bearer' and this server's API key.")


def _install_content_type_check(app: Flask) -> None:
    @app.before_request
    def check_content_type() -> None:
        # A page of another site can make a browser send forms and plain text here, but not JSON.
        kind = request.mimetype
        if request.method == "POST" and kind and kind != "application/json":
            raise UnsupportedMediaType(
                f"The Content-Type is {kind}; the body must be application/json."
            )
