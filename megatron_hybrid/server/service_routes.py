"""The routes besides OpenAI's: health, figures, tokens, and what ends or forgets something."""

from __future__ import annotations

import time
from functools import partial

from flask import Flask, Response, request

from megatron_hybrid.request import validate_prompt
from megatron_hybrid.server.answer_memory import ChatKeys
from megatron_hybrid.server.chat_messages import MAX_NAME_LENGTH, parse_messages
from megatron_hybrid.server.chat_turn import encode_chat
from megatron_hybrid.server.fields import Fields, parse_body
from megatron_hybrid.server.http_errors import json_response
from megatron_hybrid.server.serving import Serving
from megatron_hybrid.server.tool_calls.fields import parse_tools

MAX_TEXT_LENGTH = 64 * 2**20
MAX_TOKENIZED = 10_000_000


def install(app: Flask, serving: Serving) -> None:
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
        fields = Fields(parse_body(request.get_data()))
        if fields.given("messages"):
            messages = parse_messages(fields)
            arguments = fields.object("chat_template_kwargs")
            tools = parse_tools(fields)
            keys = ChatKeys(fields.text("cache_salt", MAX_NAME_LENGTH), messages)
            fields.finish()
            tokens = encode_chat(serving, messages, arguments, tools, keys).token_ids
        else:
            if not fields.given("prompt"):
                raise fields.missing("prompt")
            prompt = fields.text("prompt", MAX_TEXT_LENGTH)
            special = fields.boolean("add_special_tokens", True)
            fields.finish()
            encode = partial(serving.tokenizer.encode, prompt, add_special_tokens=special)
            tokens = serving.offload(len(prompt), encode)
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
