"""The Flask application: who may come in, and where the routes are."""

from __future__ import annotations

from collections.abc import Callable

from flask import Flask, Response, g, request
from werkzeug.exceptions import UnsupportedMediaType

from megatron_hybrid.server.addresses import Addresses
from megatron_hybrid.server.http import access_log, dashboard, openapi, routes, tracing
from megatron_hybrid.server.http.anthropic import routes as anthropic_routes
from megatron_hybrid.server.http.browsers import BrowserRules
from megatron_hybrid.server.http.control import check_admin
from megatron_hybrid.server.http.http_errors import WrongKey, error_response
from megatron_hybrid.server.http.root_path import behind_root
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import CONTROL_PATHS, NOBODY, KeyRing
from megatron_hybrid.server.link.traces import RequestTrace
from megatron_hybrid.server.options import ServerOptions

MAX_BODY_BYTES = 64 * 2**20


def create_app(
    serving: Serving,
    address: str | None = None,
    send_trace: Callable[[RequestTrace], None] | None = None,
) -> Flask:
    """address: that the listener is bound to; left out: as --host says. send_trace: where traces of
    requests go, if anywhere."""
    app = Flask("megatron_hybrid")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    access_log.install(app, Addresses(serving.options.trusted_proxies))
    if send_trace is not None:
        tracing.install(app, send_trace)
    app.errorhandler(Exception)(error_response)  # Flask's own, too
    _install_checks(app, serving.options, address)
    routes.install(app, serving)
    anthropic_routes.install(app, serving)
    dashboard.install(app)
    openapi.install(app, serving)
    if root := serving.options.root_path:
        app.wsgi_app = behind_root(app.wsgi_app, root)  # type: ignore[assignment, method-assign]
    return app


def _install_checks(app: Flask, options: ServerOptions, address: str | None) -> None:
    """Before any route: which page asks, whose request it is (g.caller; g.key_name, None without a
    key, is for the log), and what its body is."""
    rules = BrowserRules(options, options.host if address is None else address)
    keys = KeyRing(options.api_keys, salted=options.cache_salt_per_key)

    @app.before_request
    def check() -> Response | None:
        g.caller, g.key_name = NOBODY, None
        preflight = rules.check(request)
        if preflight is None:
            _check_key(keys, options)
            _check_content_type()
        return preflight

    @app.after_request
    def add_headers(response: Response) -> Response:
        return rules.add_headers(request, response)


def _check_key(keys: KeyRing, options: ServerOptions) -> None:
    if not len(keys):
        return
    caller = keys.find(request.headers.get("Authorization", ""))
    if caller is None and (key := request.headers.get("x-api-key")):  # Anthropic's clients
        caller = keys.find(f"Bearer {key}")
    if caller is not None:
        g.caller, g.key_name = caller, caller.key_name
    elif request.path not in openapi.OPEN_ROUTES and request.blueprint != dashboard.NAME:
        raise WrongKey(
            "The Authorization header must be 'Bearer' and a key of this server's, or x-api-key "
            "such a key."
        )
    if request.path in CONTROL_PATHS:
        check_admin(options)


def _check_content_type() -> None:
    # A page of another site can make a browser send forms and plain text without asking, even
    # with an older browser that does not say which page it is; but not JSON.
    kind = request.mimetype
    has_body = bool(request.content_length) or "Transfer-Encoding" in request.headers
    if request.method == "POST" and (kind or has_body) and kind != "application/json":
        raise UnsupportedMediaType(
            f"The Content-Type is {kind or 'missing'}; the body must be application/json."
        )
