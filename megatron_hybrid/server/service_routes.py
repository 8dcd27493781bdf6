"""The routes besides OpenAI's: health, figures, tokens, and what ends or forgets something."""

from __future__ import annotations

from flask import Flask, Response, request

from megatron_hybrid.request import validate_prompt
from megatron_hybrid.server.fields import Fields, parse_body
from megatron_hybrid.server.http_errors import json_response
from megatron_hybrid.server.openai_protocol import parse_messages
from megatron_hybrid.server.serving import Serving

MAX_TEXT_LENGTH = 64 * 2**20
MAX_TOKENIZED = 10_000_000


def install(app: Flask, serving: Serving) -> None:
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
