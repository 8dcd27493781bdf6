"""Who may steer the engine for everybody."""

from __future__ import annotations

from flask import g, request
from werkzeug.exceptions import Forbidden

from megatron_hybrid.server.options import ServerOptions


def check_control(options: ServerOptions) -> None:
    """Raise Forbidden unless this server has the routes that steer it for everybody, and the
    caller of the current request may use them."""
    if not options.serves_control:
        raise Forbidden(
            f"{request.path} is off: this server listens on {options.host}, where "
            "others can reach it. --enable-control-routes switches it on."
        )
    check_admin(options)


def check_admin(options: ServerOptions) -> None:
    """Raise Forbidden where control needs a key of its own, and the caller has another one."""
    if any(key.admin for key in options.api_keys) and not g.caller.admin:
        raise Forbidden(f"{request.path} needs a key of --admin-api-key; this one is none.")
