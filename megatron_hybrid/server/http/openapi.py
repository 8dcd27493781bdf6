"""GET /openapi.json: every route, what it accepts and what it answers (OpenAPI 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response

from megatron_hybrid.server.http.access_log import REQUEST_ID
from megatron_hybrid.server.http.field_types import JsonSchema
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.openapi_answers import (
    INTEGER,
    STRING,
    answer_schemas,
    array,
    fixed_object,
    reference,
)
from megatron_hybrid.server.http.openapi_figures import figures_schemas
from megatron_hybrid.server.http.openapi_requests import request_schemas
from megatron_hybrid.server.http.serving import Serving

# For load balancers and scrapers, which hold no key, and for the page that asks for one.
OPEN_ROUTES = ("/health", "/metrics", "/openapi.json", "/")
_JSON = "application/json"
_NAME = {"$ref": "#/components/headers/RequestId"}
_EVENTS = "text/event-stream"
_SENTENCES = {
    400: "A field is wrong or unknown; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Switched off on this server, not for this key, or not for the web page that asks.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    409: "Not possible in the engine's present state.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    429: "Too many requests are waiting, or connections open.",
    500: "The engine failed.",
    503: "The engine is loading, busy or gone.",
    504: "The request's time is over.",
}
_ASKS_ENGINE = (500, 503)
_GENERATES = (404, 504, *_ASKS_ENGINE)
_CONTROLS = (409, *_ASKS_ENGINE)


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. `contents`: what a 200 holds, by content type, None for a stream of
    events, which OpenAPI 3.1 has no schema for; `errors`: other statuses,
    besides those that every route with a body or a key has."""

    method: str
    path: str
    summary: str
    contents: dict[str, JsonSchema | None]
    body: JsonSchema | None = None
    errors: tuple[int, ...] = ()
    path_parameter: str | None = None
    body_required: bool = True


def routes() -> list[Route]:
    """All operations, in the order of the description."""
    return [
        Route(
            "post",
            "/v1/chat/completions",
            "Answer a chat." + _events("ChatCompletionChunk"),
            {_JSON: reference("ChatCompletion"), _EVENTS: None},
            reference("ChatRequest"),
            _GENERATES,
        ),
        Route(
            "post",
            "/v1/completions",
            "Continue texts." + _events("CompletionChunk"),
            {_JSON: reference("Completion"), _EVENTS: None},
            reference("CompletionRequest"),
            _GENERATES,
        ),
        Route("get", "/v1/models", "The model that is served.", {_JSON: reference("ModelList")}),
        Route(
            "get",
            "/v1/models/{name}",
            "One model.",
            {_JSON: reference("Model")},
            errors=(404,),
            path_parameter="name",
        ),
        Route(
            "get",
            "/health",
            "Whether requests are taken.",
            {_JSON: reference("Health")},
            errors=(503,),
        ),
        Route("get", "/metrics", "Figures for Prometheus.", {"text/plain": STRING}),
        Route("get", "/stats", "Figures as JSON.", {_JSON: reference("Stats")}, errors=(503,)),
        Route(
            "get",
            "/server_info",
            "What a router wants to know: the model's name.",
            {_JSON: fixed_object({"served_model_name": STRING})},
        ),
        Route(
            "get",
            "/openapi.json",
            "This description.",
            {_JSON: {"type": "object", "required": ["openapi", "paths"]}},
        ),
        Route("get", "/", "A page with a chat and the cache.", {"text/html": STRING}),
        Route(
            "post",
            "/tokenize",
            "Text or a chat as token ids.",
            {
                _JSON: fixed_object(
                    {"tokens": array(INTEGER), "count": INTEGER, "max_model_len": INTEGER}
                )
            },
            {"anyOf": [reference("TokenizeTextRequest"), reference("TokenizeChatRequest")]},
            _ASKS_ENGINE,
        ),
        Route(
            "post",
            "/detokenize",
            "Token ids as text.",
            {_JSON: fixed_object({"prompt": STRING})},
            reference("DetokenizeRequest"),
            _ASKS_ENGINE,
        ),
        Route(
            "post",
            "/abort",
            "End an answer early.",
            {_JSON: fixed_object({"aborted": INTEGER})},
            reference("AbortRequest"),
            _ASKS_ENGINE,
        ),
        Route(
            "post",
            "/reset_prefix_cache",
            "Forget every cached prefix.",
            {_JSON: _OK},
            errors=_ASKS_ENGINE,
        ),
        Route(
            "post",
            "/pause",
            "Start no more requests; answered when none runs.",
            {_JSON: _CONTROLLED},
            reference("PauseRequest"),
            _CONTROLS,
            body_required=False,
        ),
        Route(
            "post",
            "/resume",
            "Go on after a pause.",
            {_JSON: _CONTROLLED},
            reference("ResumeRequest"),
            _CONTROLS,
            body_required=False,
        ),
        Route(
            "post",
            "/update_weights",
            "Read the model's weights from a folder of the server's machine.",
            {_JSON: _CONTROLLED},
            reference("UpdateWeightsRequest"),
            _CONTROLS,
        ),
    ]


def describe(serving: Serving, paths: Sequence[str]) -> dict[str, Any]:
    """The description of a server that has these paths."""
    with_key = bool(serving.options.api_keys)
    ready = serving.client.ready
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "megatron_hybrid",
            "version": "1",
            "description": "OpenAI's API for text, and routes to look after the server.",
        },
        "paths": {},
        "components": {
            "schemas": {
                **request_schemas(ready.vocab_size if ready is not None else None),
                **answer_schemas(),
                **figures_schemas(),
            },
            "headers": {
                "RequestId": {
                    "description": "The request's name in the server's log: the client's own "
                    f"{REQUEST_ID}, if that is at most 128 printable ASCII characters.",
                    "schema": STRING,
                }
            },
        },
    }
    if with_key:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"bearer": scheme}
        document["security"] = [{"bearer": []}]
    for route in routes():
        if route.path in paths:
            operations = document["paths"].setdefault(route.path, {})
            operations[route.method] = _operation(route, with_key)
    return document


def install(app: Flask, serving: Serving) -> None:
    @app.get("/openapi.json")
    def openapi() -> Response:
        rules = [rule.rule.replace("<path:name>", "{name}") for rule in app.url_map.iter_rules()]
        return json_response(describe(serving, rules))


def _operation(route: Route, with_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method}_{route.path.strip('/') or 'page'}".replace("/", "_"),
    }
    errors = {429, *route.errors}
    if route.path_parameter is not None:
        parameter = {"name": route.path_parameter, "in": "path", "required": True, "schema": STRING}
        operation["parameters"] = [parameter]
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {_JSON: {"schema": route.body}},
        }
        errors |= {400, 408, 413}
    if route.method == "post":
        errors |= {403, 415}
    if route.path in OPEN_ROUTES:
        operation["security"] = []
    elif with_key:
        errors.add(401)
    operation["responses"] = {
        "200": {
            "description": "Done.",
            "headers": {REQUEST_ID: _NAME},
            "content": {
                kind: {} if schema is None else {"schema": schema}
                for kind, schema in route.contents.items()
            },
        },
        **{str(status): _error_response(status) for status in sorted(errors)},
    }
    return operation


def _error_response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _SENTENCES[status],
        "headers": {REQUEST_ID: _NAME},
        "content": {_JSON: {"schema": reference("Error")}},
    }
    if status in (429, 503):
        retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        response["headers"]["Retry-After"] = retry
    return response


def _events(chunk: str) -> str:
    return (
        f" With `stream`, the answer is events: each has a {chunk} as its data, or an Error, after "
        "which no other chunk comes; the last one's data is [DONE]."
    )


_OK = fixed_object({"status": {"const": "ok"}})
_CONTROLLED: JsonSchema = {
    "type": "object",
    "properties": {"status": {"const": "ok"}, "epoch": INTEGER},
    "required": ["status"],
}
