"""The routes besides OpenAI's: health, figures, tokens, and what ends or forgets something."""

from __future__ import annotations

import time

from flask import Flask, Response, g

from megatron_hybrid.server.http.bodies import read_body, small_body
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.protocol.requests import AbortRequest, ResumeRequest
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire


def install(app: Flask, serving: Serving) -> None:
    """GET /health, /metrics, /stats and /server_info; POST /tokenize, /detokenize, /abort and
    /reset_prefix_cache."""

    @app.get("/health")
    def health() -> Response:
        return json_response(serving.health())

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(serving.metrics.page(), mimetype="text/plain; version=0.0.4")

    @app.get("/stats")
    def stats() -> Response:
        """The engine's figures as JSON, for the page at /; docs/server_metrics.md has the keys."""
        figures = serving.client.stats()
        return json_response(
            {
                "engine": figures,
                "time": time.time(),
                "model": serving.options.model_name,
                "uptime": time.monotonic() - figures["started"],
            }
        )

    @app.get("/server_info")
    def server_info() -> Response:
        """As SGLang has it: its router asks for the model's name here."""
        return json_response({"served_model_name": serving.options.model_name})

    @app.post("/tokenize")
    def tokenize() -> Response:
        return _json(serving.prepare("tokenize", read_body(), g.caller))

    @app.post("/detokenize")
    def detokenize() -> Response:
        return _json(serving.prepare("detokenize", read_body()))

    @app.post("/abort")
    def abort() -> Response:
        request_id = small_body(AbortRequest).request_id
        return json_response(serving.client.ask(wire.AbortAnswers, request_id))

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> Response:
        small_body(ResumeRequest)
        serving.client.ask(wire.ResetPrefixCache)
        return json_response({"status": "ok"})


def _json(body: bytes) -> Response:
    return Response(body, mimetype="application/json")
