"""Anthropic's routes, as clients of its Messages API ask them."""

from __future__ import annotations

from functools import partial

from flask import Blueprint, Flask, Response, g

from megatron_hybrid.server.http.answering import answered, request_body
from megatron_hybrid.server.http.anthropic.answers import MessageAnswers
from megatron_hybrid.server.http.anthropic.errors import anthropic_error_response
from megatron_hybrid.server.http.generation import new_id
from megatron_hybrid.server.http.prepared import PreparedChat
from megatron_hybrid.server.http.serving import Serving

REQUEST_ID = "request-id"  # where Anthropic's clients look for it


def install(app: Flask, serving: Serving) -> None:
    """Whatever goes wrong on these routes, also before they are reached, is said in their form."""
    routes = Blueprint("anthropic", __name__)
    routes.errorhandler(Exception)(anthropic_error_response)

    @routes.post("/v1/messages")
    def messages() -> Response:
        chat: PreparedChat = serving.prepare("messages", request_body(), g.caller)
        begin = partial(MessageAnswers, serving, chat, g.request_id)
        return answered(serving, new_id("msg_"), chat.generation, begin)

    @routes.post("/v1/messages/count_tokens")
    def count_tokens() -> Response:
        tokens = serving.prepare("count_tokens", request_body(), g.caller)
        return Response(tokens, mimetype="application/json")

    @routes.after_request
    def name(response: Response) -> Response:
        response.headers[REQUEST_ID] = g.request_id
        return response

    app.register_blueprint(routes)
