"""The routes that steer the engine, for a trainer beside it: pause, resume, new weights.

They stop the server for everybody and read files of the server's machine, so a server that others
can reach has them only with --enable-control-routes.
"""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, request
from werkzeug.exceptions import Forbidden

from megatron_hybrid.engine.pause import PAUSE_MODES
from megatron_hybrid.server.http.bodies import small_body
from megatron_hybrid.server.http.fields import FieldError, Fields
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import QueryFailed

MAX_PATH_LENGTH = 4096


def install(app: Flask, serving: Serving) -> None:
    """POST /pause, /resume and /update_weights. Each is answered with the weights' epoch when it
    is done, which may take as long as the requests that run."""

    @app.post("/pause")
    def pause() -> Response:
        fields = body()
        mode = _mode(fields, "finish")
        fields.finish()
        return answer(wire.Pause, mode)

    @app.post("/resume")
    def resume() -> Response:
        body().finish()
        return answer(wire.Resume)

    @app.post("/update_weights")
    def update_weights() -> Response:
        fields = body()
        if not fields.given("path"):
            raise fields.missing("path")
        path = fields.text("path", MAX_PATH_LENGTH)
        # Left out: as the pause that holds, else "finish".
        mode = _mode(fields, "")
        fields.finish()
        try:
            return answer(wire.UpdateWeights, path, mode)
        except QueryFailed as error:
            if error.status != 400:
                raise
            raise FieldError("path", str(error)) from error

    def body() -> Fields:
        if not serving.options.serves_control:
            raise Forbidden(
                f"{request.path} is off: this server listens on {serving.options.host}, where "
                "others can reach it. --enable-control-routes switches it on."
            )
        return small_body()

    def answer(kind: type[wire.AnyQuery], *arguments: Any) -> Response:
        values = serving.client.ask(kind, *arguments, timeout=None)
        return json_response({"status": "ok", **values})


def _mode(fields: Fields, default: str) -> str:
    """The mode that is asked for; the default where none is."""
    if not fields.given("mode"):
        fields.any("mode")  # null
        return default
    mode = fields.text("mode", 64)
    if mode not in PAUSE_MODES:
        raise fields.wrong_value("mode", mode, f"it can be {', '.join(PAUSE_MODES)}")
    return mode
