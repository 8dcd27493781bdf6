"""GET /openapi.json: every route, what it accepts and what it answers (OpenAPI 3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from inspect import cleandoc
from operator import methodcaller
from typing import Any

from flask import Flask, Response
from msgspec.json import schema_components
from msgspec.structs import fields
from werkzeug.routing import Rule

from megatron_hybrid.request import MAX_TOKENS
from megatron_hybrid.server.http.access_log import REQUEST_ID
from megatron_hybrid.server.http.anthropic.errors import OVERLOADED
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.openapi_routes import JSON, OPEN_ROUTES, ROUTES, Route
from megatron_hybrid.server.http.protocol import (
    requests,
)
from megatron_hybrid.server.http.protocol.parsing import (
    Body,
    JsonSchema,
    field_descriptions,
    shown_pattern,
)
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import FINGERPRINT
from megatron_hybrid.server.options import SamplingDefaults

_SENTENCES = {
    400: "A field is wrong or unknown; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Switched off on this server, not for this key, or not for the web page that asks.",
    404: "There is no such model, response or path.",
    408: "The body did not come in time.",
    409: "Not possible in the engine's present state.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    429: "Too many requests are waiting, or connections open.",
    500: "The engine failed.",
    503: "The engine is loading, busy or gone.",
    504: "The request's time is over.",
    OVERLOADED: "Too many requests are waiting.",
}
# Bodies that ask for answers, and where each says how long these are, if not by OpenAI's default.
_MAX_TOKENS = {
    "ChatRequest": "max_tokens",
    "CompletionRequest": None,
    "ResponsesRequest": "max_output_tokens",
    "MessagesRequest": None,
}


def describe(serving: Serving, paths: Sequence[str]) -> dict[str, Any]:
    """The description of a server that has these paths."""
    with_key = bool(serving.options.api_keys)
    ready = serving.client.ready
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "megatron_hybrid",
            "version": "1",
            "description": "OpenAI's and Anthropic's APIs for text, and routes to look after "
            "the server.",
        },
        "paths": {},
        "components": {
            "schemas": _components(
                MAX_TOKENS if ready is None else ready.vocab_size - 1,
                serving.options.sampling_defaults,
            ),
            "headers": {
                "RequestId": {
                    "description": "The request's name in the server's log: the client's own "
                    f"{REQUEST_ID}, if that is at most 128 printable ASCII characters.",
                    "schema": _reference(str),
                },
                "SystemFingerprint": {
                    "description": "Of what has computed the answer; /server_info has its parts.",
                    "schema": _reference(str),
                },
            },
        },
    }
    if serving.options.root_path:
        document["servers"] = [{"url": serving.options.root_path}]
    if with_key:
        said = "It may also come by itself, as x-api-key."
        scheme = {"type": "http", "scheme": "bearer", "description": said}
        document["components"]["securitySchemes"] = {"bearer": scheme}
        document["security"] = [{"bearer": []}]
    for route in ROUTES:
        if route.path in paths:
            operations = document["paths"].setdefault(route.path, {})
            operations[route.method] = _operation(route, with_key)
    return document


def install(app: Flask, serving: Serving) -> None:
    """GET /openapi.json, of the routes that are there by then."""

    @app.get("/openapi.json")
    def openapi() -> Response:
        return json_response(describe(serving, list(map(path_of, app.url_map.iter_rules()))))


def path_of(rule: Rule) -> str:
    """A route of Flask's as OpenAPI writes it."""
    return re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule)


@cache
def _reference(*kinds: Any) -> JsonSchema:
    """What refers to one of these types."""
    found, _ = _schemas(kinds)
    return {"anyOf": list(found)} if len(found) > 1 else found[0]


def _schemas(kinds: Iterable[Any]) -> tuple[tuple[JsonSchema, ...], dict[str, JsonSchema]]:
    """What refers to each of these types, and by name what is referred to."""
    place = "#/components/schemas/{name}"
    return schema_components(kinds, ref_template=place, schema_hook=methodcaller("schema"))


@cache
def _components(largest_id: int, defaults: SamplingDefaults) -> dict[str, JsonSchema]:
    """What is under components/schemas, for a model with these token ids, and a server with these
    defaults of its own."""
    parts = ((one.answer, *one.bodies, one.events, one.error) for one in ROUTES)
    _, found = _schemas([kind for part in parts for kind in part if kind])
    for kind in _all_kinds(Body):
        if kind.__name__ in found:
            found[kind.__name__]["description"] = cleandoc(kind.__doc__ or "").partition("\n\n")[0]
            for name, text in field_descriptions(kind).items():
                found[kind.__name__]["properties"][name]["description"] = text
    for name in ("MessageItem", "FunctionTool"):
        found[name]["required"].remove("type")
    # Their fields are the same, but described once.
    chat, tokenized = (found[name]["properties"] for name in ("ChatRequest", "TokenizeChatRequest"))
    tokenized.update({name: chat[name] for name in tokenized})
    # One kind of entries at a time.
    prompt = found["CompletionRequest"]["properties"]["prompt"]
    text, lists = prompt["anyOf"]
    prompt["anyOf"] = [text, *({**lists, "items": one} for one in lists["items"]["anyOf"])]
    tidied = {name: _tidied(one, largest_id) for name, one in found.items()}
    for field, value in defaults:
        for name, longest in _MAX_TOKENS.items():
            own = longest if field == "max_tokens" else field
            if own is not None:
                tidied[name]["properties"][own]["default"] = value
    return tidied


def _all_kinds(kind: type) -> Iterator[type]:
    inner: type
    for inner in kind.__subclasses__():
        yield inner
        yield from _all_kinds(inner)


def _tidied(value: Any, largest_id: int) -> Any:
    """As short as it can be said: null beside the type, and no default where that is null."""
    if isinstance(value, list):
        return [_tidied(one, largest_id) for one in value]
    if not isinstance(value, dict):
        return value
    schema = {name: _tidied(one, largest_id) for name, one in value.items()}
    if schema.get("title") == requests.TOKEN_ID:
        schema["maximum"] = largest_id
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = shown_pattern(pattern)
    if "default" in schema and schema["default"] is None:
        del schema["default"]
    match schema.pop("anyOf", None):
        case [{"type": kind, **one}, {"type": "null"}]:
            schema = {"type": [kind, "null"], **one, **schema}
        case [{"enum": values, **one}, {"type": "null"}]:
            schema = {"enum": [*(one for one in values if one is not None), None], **one, **schema}
        case list(kinds):
            schema["anyOf"] = kinds
    return schema


def _operation(route: Route, with_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method}_{route.path.strip('/') or 'page'}".replace("/", "_"),
    }
    contents = {route.kind: {"schema": _reference(route.answer)}}
    if route.events is not None:
        operation["summary"] += f" With `stream`, the answer is events: each has a {route.stream}"
        contents["text/event-stream"] = {}  # OpenAPI 3.1 has no schema for events
    errors = {429, *route.errors}
    if parameters := [*_path_parameters(route), *_query_parameters(route)]:
        operation["parameters"] = parameters
    if route.bodies:
        operation["requestBody"] = {
            "required": all(any(one.required for one in fields(body)) for body in route.bodies),
            "content": {JSON: {"schema": _reference(*route.bodies)}},
        }
        errors |= {400, 408, 413}
    if route.query is not None:
        errors.add(400)
    if route.method != "get":
        errors |= {403, 415} if route.method == "post" else {403}
    if route.path in OPEN_ROUTES:
        operation["security"] = []
    elif with_key:
        errors.add(401)
    done = _response("Done.", contents)
    if route.events is not None:
        done["headers"][FINGERPRINT] = {"$ref": "#/components/headers/SystemFingerprint"}
    operation["responses"] = {
        "200": done,
        **{str(status): _error_response(status, route.error) for status in sorted(errors)},
    }
    return operation


def _path_parameters(route: Route) -> Iterator[JsonSchema]:
    if "{name}" in route.path:
        yield {"name": "name", "in": "path", "required": True, "schema": _reference(str)}


def _query_parameters(route: Route) -> Iterator[JsonSchema]:
    if route.query is None:
        return
    _, found = _schemas([route.query])
    said = field_descriptions(route.query)
    for name, schema in _tidied(found[route.query.__name__], 0)["properties"].items():
        # A query has no null.
        schema = {key: value for key, value in schema.items() if key != "default"}
        if isinstance(schema.get("type"), list):
            schema["type"] = schema["type"][0]
        if "enum" in schema:
            schema["enum"] = [one for one in schema["enum"] if one is not None]
        yield {"name": name, "in": "query", "description": said.get(name, ""), "schema": schema}


def _response(description: str, contents: dict[str, Any]) -> dict[str, Any]:
    headers: dict[str, Any] = {REQUEST_ID: {"$ref": "#/components/headers/RequestId"}}
    return {"description": description, "headers": headers, "content": contents}


def _error_response(status: int, error: Any) -> dict[str, Any]:
    response = _response(_SENTENCES[status], {JSON: {"schema": _reference(error)}})
    if status in (429, 503, OVERLOADED):
        retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        response["headers"]["Retry-After"] = retry
    return response
