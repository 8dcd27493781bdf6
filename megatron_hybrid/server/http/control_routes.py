"""The routes that steer the engine, for a trainer beside it: pause, resume, new weights.

They stop the server for everybody and read files of the server's machine, so a server that others
can reach has them only with --enable-control-routes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from flask import Flask, Response, request
from werkzeug.exceptions import Forbidden

from megatron_hybrid.engine.pause import PauseMode
from megatron_hybrid.server.http.bodies import small_body
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.protocol.complaints import FieldError
from megatron_hybrid.server.http.protocol.parsing import Body
from megatron_hybrid.server.http.protocol.requests import (
    PauseRequest,
    ResumeRequest,
    UpdateWeightsRequest,
)
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import QueryFailed

T = TypeVar("T", bound=Body)


def install(app: Flask, serving: Serving) -> None:
    """POST /pause, /resume and /update_weights. Each is answered with the weights' epoch when it
    is done, which may take as long as the requests that run."""

    @app.post("/pause")
    def pause() -> Response:
        mode = body(PauseRequest).mode or PauseMode.FINISH
        return answer(wire.Pause, mode.value)

    @app.post("/resume")
    def resume() -> Response:
        body(ResumeRequest)
        return answer(wire.Resume)

    @app.post("/update_weights")
    def update_weights() -> Response:
        wanted = body(UpdateWeightsRequest)
        mode = "" if wanted.mode is None else wanted.mode.value
        try:
            return answer(wire.UpdateWeights, wanted.path, mode)
        except QueryFailed as error:
            if error.status != 400:
                raise
            raise FieldError("path", str(error)) from error

    def body(kind: type[T]) -> T:
        if not serving.options.serves_control:
            raise Forbidden(
                f"{request.path} is off: this server listens on {serving.options.host}, where "
                "others can reach it. --enable-control-routes switches it on."
            )
        return small_body(kind)

    def answer(kind: type[wire.AnyQuery], *arguments: Any) -> Response:
        values = serving.client.ask(kind, *arguments, timeout=None)
        return json_response({"status": "ok", **values})
