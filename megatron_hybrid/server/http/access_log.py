"""An id for every request, and a line in the log when it has ended.

The id is not the one in the answer's body, which ends the request for whoever sends it to /abort:
those who see logs and headers must not be able to.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from functools import partial

from flask import Flask, Response, g, request

from megatron_hybrid.server.addresses import Addresses
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.log_format import ACCESS_LOG, log_fields

logger = logging.getLogger(ACCESS_LOG)

REQUEST_ID = "x-request-id"
# Asked by machines all the time: in the log only if they fail, or at its level DEBUG.
QUIET_ROUTES = tuple("/health /ping /health_generate /liveness /load /metrics /stats".split())
MOST_OF_A_PATH = 256  # characters
_GIVEN_ID = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")


def request_id(given: str | None) -> str:
    """The client's id if it is at most 128 printable ASCII characters, else one of ours."""
    if given is not None and _GIVEN_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(16)}"


def install(app: Flask, addresses: Addresses) -> None:
    """Before everything else in the application: what refuses a request has an id, too."""

    @app.before_request
    def begin() -> None:
        g.request_id = request_id(request.headers.get(REQUEST_ID))
        g.started = time.monotonic()

    @app.after_request
    def end(response: Response) -> Response:
        response.headers[REQUEST_ID] = g.request_id
        route = request.url_rule.rule if request.url_rule is not None else request.path
        if logger.isEnabledFor(_level(route, response.status_code)):
            forwarded = request.headers.get("X-Forwarded-For")
            entry = partial(
                log_request,
                g.request_id,
                addresses.client(request.remote_addr or "", forwarded),
                request.method,
                route,
                key_name=g.get("key_name"),
                started=g.started,
                generation=g.get("generation"),
            )
            if response.direct_passthrough:  # a file of the page; nobody says when it was sent
                entry(response.status_code)
            else:  # when the last of it was sent, or its client has gone
                response.call_on_close(lambda: entry(response.status_code))
        return response


def log_request(
    identity: str,
    client: str,
    method: str,
    route: str,
    status: int,
    *,
    key_name: str | None = None,
    started: float | None = None,
    generation: Generation | None = None,
) -> None:
    """The line of a request that has ended. started: when it came, by `time.monotonic`."""
    fields: dict[str, object] = {"id": identity, "client": client}
    if key_name is not None:
        fields["key"] = key_name
    if generation is not None:
        status = generation.outcome(status)
    fields |= {"method": method, "route": route[:MOST_OF_A_PATH], "status": status}
    if started is not None:
        if generation is not None:
            fields |= generation.figures()
        fields["seconds"] = round(time.monotonic() - started, 4)
    log_fields(logger, _level(route, status), "request", fields)


def _level(route: str, status: int) -> int:
    return logging.DEBUG if route in QUIET_ROUTES and status < 400 else logging.INFO
