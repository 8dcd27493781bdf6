"""Every route but the page's and /openapi.json, which says what each takes and gives."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from flask import Flask, Response, g

from megatron_hybrid import __version__
from megatron_hybrid.server.http.adapters import install as install_adapters
from megatron_hybrid.server.http.answering import answered, request_body, small_body
from megatron_hybrid.server.http.chat import ChatAnswers
from megatron_hybrid.server.http.completions import CompletionAnswers
from megatron_hybrid.server.http.for_routers import install as install_for_routers
from megatron_hybrid.server.http.generation import new_id
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.prepared import (
    PreparedChat,
    PreparedCompletion,
    PreparedScores,
    UnknownModel,
)
from megatron_hybrid.server.http.protocol.requests import AbortRequest
from megatron_hybrid.server.http.protocol.weights import ResumeRequest
from megatron_hybrid.server.http.responses.routes import install as install_responses
from megatron_hybrid.server.http.scores import Scores
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.sleeping import install as install_sleeping
from megatron_hybrid.server.http.tokens.routes import install as install_tokens
from megatron_hybrid.server.http.weights import install as install_weights
from megatron_hybrid.server.link import messages as wire


def install(app: Flask, serving: Serving) -> None:
    """OpenAI's routes, those that look after the server, and those that steer the engine."""
    _install_answers(app, serving)
    install_responses(app, serving)
    install_tokens(app, serving)
    _install_service(app, serving)
    install_for_routers(app, serving)
    install_weights(app, serving)
    install_sleeping(app, serving)
    install_adapters(app, serving)


def _install_answers(app: Flask, serving: Serving) -> None:
    @app.post("/v1/chat/completions")
    def chat_completions() -> Response:
        chat: PreparedChat = serving.prepare("chat", request_body(), g.caller)
        begin = partial(ChatAnswers, serving, chat)
        return answered(serving, new_id("chatcmpl-"), chat.generation, begin)

    @app.post("/v1/completions")
    def completions() -> Response:
        completion: PreparedCompletion = serving.prepare("completion", request_body(), g.caller)
        begin = partial(CompletionAnswers, serving, completion)
        return answered(serving, new_id("cmpl-"), completion.generation, begin)

    @app.post("/score_tokens")
    def score_tokens() -> Response:
        scores: PreparedScores = serving.prepare("score", request_body(), g.caller)
        begin = partial(Scores, serving, scores)
        return answered(serving, new_id("score-"), scores.generation, begin)

    @app.get("/v1/models")
    def models() -> Response:
        names = serving.options.model_names
        pages = {"has_more": False, "first_id": names[0], "last_id": [*names, *adapters()][-1]}
        data = [*map(card, names), *map(adapter_card, adapters())]
        return json_response({"object": "list", "data": data, **pages})

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        if name in adapters():
            return json_response(adapter_card(name))
        if name not in serving.options.model_names:
            raise UnknownModel(f"The model {name!r} is not served here.")
        return json_response(card(name))

    def adapters() -> dict[str, str]:
        ready = serving.client.ready
        return {} if ready is None else ready.adapters

    def adapter_card(name: str) -> dict[str, Any]:
        return {**card(name), "root": adapters()[name], "parent": serving.options.model_name}

    def card(name: str) -> dict[str, Any]:
        ready = serving.client.ready
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "megatron_hybrid",
            "max_model_len": ready.max_seq_length if ready is not None else None,
            # What Anthropic's clients look for.
            "type": "model",
            "root": serving.options.tokenizer_folder,
            "parent": None,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }


def _install_service(app: Flask, serving: Serving) -> None:
    @app.get("/ping")
    @app.get("/health")
    def health() -> Response:
        engine = serving.client.check()
        health = {"status": serving.client.state, "engine_pid": engine.pid}
        states = serving.client.states()
        return json_response({**health, "engines": states} if len(states) > 1 else health)

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

    @app.get("/load")
    def load() -> Response:
        """As vLLM has it, for autoscalers."""
        figures = serving.client.stats()
        return json_response(
            {"server_load": figures["requests_running"] + figures["requests_waiting"]}
        )

    @app.get("/version")
    def version() -> Response:
        return json_response({"version": __version__})

    @app.post("/tokenize")
    def tokenize() -> Response:
        tokens = serving.prepare("tokenize", request_body(), g.caller)
        return Response(tokens, mimetype="application/json")

    @app.post("/detokenize")
    def detokenize() -> Response:
        return Response(serving.prepare("detokenize", request_body()), mimetype="application/json")

    @app.post("/abort")
    def abort() -> Response:
        request_id = small_body(AbortRequest).request_id
        return json_response(serving.client.ask(wire.AbortAnswers, request_id))

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> Response:
        small_body(ResumeRequest)
        serving.client.ask(wire.ResetPrefixCache)
        return json_response({"status": "ok"})
