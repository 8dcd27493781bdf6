"""The routes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flask import Flask, Response, g, request

from megatron_hybrid.server.http.bodies import read_body
from megatron_hybrid.server.http.chat import answer_chat
from megatron_hybrid.server.http.completions import answer_completion
from megatron_hybrid.server.http.connection import client_gone
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.preparation import PreparedChat, PreparedCompletion, UnknownModel
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.serving import Serving


def install(app: Flask, serving: Serving) -> None:
    """The answers' routes, streamed or whole, and the list of models."""

    @app.post("/v1/chat/completions")
    def chat_completions() -> Response:
        chat: PreparedChat = serving.prepare("chat", read_body(), g.caller)
        with _generation(serving, "chatcmpl", chat.generation) as generation:
            return _closing(answer_chat(serving, chat, generation), generation)

    @app.post("/v1/completions")
    def completions() -> Response:
        completion: PreparedCompletion = serving.prepare("completion", read_body(), g.caller)
        with _generation(serving, "cmpl", completion.generation) as generation:
            return _closing(answer_completion(serving, completion, generation), generation)

    @app.get("/v1/models")
    def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(serving)]})

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        if name != serving.options.model_name:
            raise UnknownModel(f"The model {name!r} is not served here.")
        return json_response(_model_card(serving))


def _model_card(serving: Serving) -> dict[str, Any]:
    ready = serving.client.ready
    return {
        "id": serving.options.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "megatron_hybrid",
        "max_model_len": ready.max_seq_length if ready is not None else None,
    }


@contextmanager
def _generation(serving: Serving, prefix: str, wanted: GenerationRequest) -> Iterator[Generation]:
    """A place for the current request, given up at once if it fails."""
    gone = client_gone(request.environ)
    generation = g.generation = serving.open(prefix, wanted, gone, g.started)
    try:
        yield generation
    except BaseException:
        generation.close()
        raise


def _closing(response: Response, generation: Generation) -> Response:
    """Close once the response was sent, or now if it is complete."""
    if response.is_streamed:
        response.call_on_close(generation.close)
    else:
        generation.close()
    return response
