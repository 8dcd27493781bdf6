"""The Flask application: routes, keys and errors."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import Flask, Response, request

from megatron_hybrid.request import validate_prompt
from megatron_hybrid.server import http_errors
from megatron_hybrid.server.chat import answer_chat
from megatron_hybrid.server.completions import answer_completion
from megatron_hybrid.server.fields import Fields, parse_body
from megatron_hybrid.server.generation import Generation
from megatron_hybrid.server.http_errors import WrongKey, json_response
from megatron_hybrid.server.openai_protocol import (
    GenerationRequest,
    parse_chat,
    parse_completion,
    parse_messages,
)
from megatron_hybrid.server.serving import Serving, UnknownModel

MAX_BODY_BYTES = 64 * 2**20
MAX_TEXT_LENGTH = MAX_BODY_BYTES
MAX_TOKENIZED = 10_000_000
_OPEN_ROUTES = ("/health", "/metrics")  # for load balancers and scrapers, which hold no key


def create_app(serving: Serving) -> Flask:
    app = Flask("megatron_hybrid")
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    http_errors.install(app)
    _install_key_check(app, serving.options.api_key)
    _install_openai_routes(app, serving)
    _install_service_routes(app, serving)
    return app


def _install_key_check(app: Flask, api_key: str | None) -> None:
    if api_key is None:
        return
    expected = f"Bearer {api_key}".encode()

    @app.before_request
    def check_key() -> None:
        if request.path in _OPEN_ROUTES:
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, expected):
            raise WrongKey("The Authorization header must be 'Bearer' and this server's API key.")


def _install_openai_routes(app: Flask, serving: Serving) -> None:
    @app.post("/v1/chat/completions")
    def chat_completions() -> Response:
        body = parse_chat(parse_body(request.get_data()))
        with _generation(serving, "chatcmpl", body.generation) as generation:
            return _closing(answer_chat(serving, body, generation), generation)

    @app.post("/v1/completions")
    def completions() -> Response:
        body = parse_completion(parse_body(request.get_data()))
        with _generation(serving, "cmpl", body.generation) as generation:
            return _closing(answer_completion(serving, body, generation), generation)

    @app.get("/v1/models")
    def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(serving)]})

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Response:
        if name != serving.options.model_name:
            raise UnknownModel(f"The model {name!r} is not served here.")
        return json_response(_model_card(serving))


def _install_service_routes(app: Flask, serving: Serving) -> None:
    @app.get("/health")
    def health() -> Response:
        serving.client.check()
        return json_response({"status": "ok"})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(serving.metrics.page(), mimetype="text/plain; version=0.0.4")

    @app.post("/tokenize")
    def tokenize() -> Response:
        fields = Fields(parse_body(request.get_data()))
        if fields.given("messages"):
            messages = parse_messages(fields)
            arguments = fields.object("chat_template_kwargs")
            fields.finish()
            tokens = serving.tokenizer.encode_chat(messages, arguments)
        else:
            if not fields.given("prompt"):
                raise fields.missing("prompt")
            prompt = fields.text("prompt", MAX_TEXT_LENGTH)
            special = fields.boolean("add_special_tokens", True)
            fields.finish()
            tokens = serving.tokenizer.encode(prompt, add_special_tokens=special)
        limit = serving.client.check().max_seq_length
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    @app.post("/detokenize")
    def detokenize() -> Response:
        fields = Fields(parse_body(request.get_data()))
        if not fields.given("tokens"):
            raise fields.missing("tokens")
        tokens = fields.list("tokens", MAX_TOKENIZED)
        fields.finish()
        for token in tokens:
            fields.check_integer("tokens", token, 0, 2**31 - 1)
        if tokens:
            validate_prompt(tokens, serving.client.check().vocab_size, MAX_TOKENIZED + 1, "tokens")
        text = serving.tokenizer.decode(tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    @app.post("/abort")
    def abort() -> Response:
        fields = Fields(parse_body(request.get_data()))
        if not fields.given("request_id"):
            raise fields.missing("request_id")
        request_id = fields.text("request_id", 1024)
        fields.finish()
        return json_response({"aborted": serving.client.abort(request_id)})

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> Response:
        serving.client.reset_prefix_cache()
        return json_response({"status": "ok"})


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
    serving.check_model(wanted.model)
    # Whether the client has gone, as far as the WSGI server knows.
    disconnected: Callable[[], bool] = request.environ.get(
        "waitress.client_disconnected", lambda: False
    )
    generation = serving.open(prefix, wanted, disconnected)
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
