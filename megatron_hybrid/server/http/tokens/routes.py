"""The routes of SGLang's and of vLLM's that take token ids, and those that trainers call beside
them."""

from __future__ import annotations

from functools import partial

from flask import Flask, Response, g, request
from werkzeug.exceptions import Forbidden

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.answering import answered, request_body, small_body
from megatron_hybrid.server.http.control import check_control
from megatron_hybrid.server.http.generation import new_id
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.tokens.control_bodies import AbortRequestBody
from megatron_hybrid.server.http.tokens.generate_answers import GenerateAnswers
from megatron_hybrid.server.http.tokens.generate_parsing import PreparedGenerate
from megatron_hybrid.server.http.tokens.health import generates
from megatron_hybrid.server.http.tokens.inference_answers import InferenceAnswers
from megatron_hybrid.server.http.tokens.inference_body import PreparedInference
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.subscription import EngineUnavailable

LIVENESS_SECONDS = 30.0
# What a browser says of a request that it sends for a page of another site.
_OTHER_SITES = ("cross-site", "same-site")


def install(app: Flask, serving: Serving) -> None:
    """Answers, their end, and what is asked of the engine meanwhile."""
    _install_answers(app, serving)
    _install_control(app, serving)
    _install_health(app, serving)


def _install_answers(app: Flask, serving: Serving) -> None:
    @app.post("/generate")
    def generate() -> Response:
        prepared: PreparedGenerate = serving.prepare("generate", request_body(), g.caller)
        begin = partial(GenerateAnswers, serving, prepared)
        return answered(serving, new_id("gen-"), prepared.prompts[0].generation, begin)

    @app.post("/inference/v1/generate")
    def inference() -> Response:
        prepared: PreparedInference = serving.prepare("inference", request_body(), g.caller)
        begin = partial(InferenceAnswers, serving, prepared)
        return answered(serving, new_id("gen-"), prepared.prompts[0].generation, begin)


def _install_control(app: Flask, serving: Serving) -> None:
    @app.post("/abort_request")
    def abort_request() -> Response:
        body = small_body(AbortRequestBody)
        if body.abort_all:
            check_control(serving.options)
            return json_response(serving.client.ask(wire.AbortAll))
        if not body.rid:
            raise InvalidRequestError("rid", "rid is needed, unless abort_all is true.")
        return json_response(serving.client.ask(wire.AbortAnswers, body.rid))

    @app.route("/flush_cache", methods=["GET", "POST"])
    def flush_cache() -> Response:
        if request.headers.get("Sec-Fetch-Site") in _OTHER_SITES:
            # An image's address is enough for a GET; nothing else of ours changes by one.
            raise Forbidden("A page of another site asks for it.")
        serving.client.ask(wire.ResetPrefixCache, True)
        return Response("Cache flushed.\n", mimetype="text/plain")


def _install_health(app: Flask, serving: Serving) -> None:
    @app.route("/health_generate", methods=["GET", "POST"])
    def health_generate() -> Response:
        if not generates(serving, g.started):
            raise EngineUnavailable("The engine has generated no token for too long.")
        return json_response({"status": "ok"})

    @app.get("/liveness")
    def liveness() -> Response:
        """As prime-rl has it: whether the engine's process answers."""
        serving.client.ask(wire.GetStats, timeout=LIVENESS_SECONDS)
        return json_response({"status": "ok"})

    @app.get("/weight_version")
    @app.get("/get_weight_version")
    def weight_version() -> Response:
        serving.client.check()
        return json_response({"weight_version": serving.client.weight_version()})
