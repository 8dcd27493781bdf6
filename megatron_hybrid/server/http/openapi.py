"""GET /openapi.json: every route, what it accepts and what it answers (OpenAPI 3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from inspect import cleandoc
from operator import methodcaller
from typing import Any, NamedTuple

from flask import Flask, Response
from msgspec.json import schema_components
from msgspec.structs import fields
from werkzeug.routing import Rule

from megatron_hybrid.request import MAX_TOKENS
from megatron_hybrid.server.http.access_log import REQUEST_ID
from megatron_hybrid.server.http.anthropic.errors import OVERLOADED
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.protocol import (
    answers,
    anthropic,
    anthropic_answers,
    requests,
    response_answers,
    scoring,
    weights,
)
from megatron_hybrid.server.http.protocol.parsing import (
    Body,
    JsonSchema,
    field_descriptions,
    shown_pattern,
)
from megatron_hybrid.server.http.protocol.response_queries import InputItemsQuery, RetrieveQuery
from megatron_hybrid.server.http.protocol.responses import ResponsesRequest
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import FINGERPRINT
from megatron_hybrid.server.http.tokens import shapes as tokens
from megatron_hybrid.server.http.tokens.control_bodies import AbortRequestBody
from megatron_hybrid.server.http.tokens.generate_body import GenerateRequest
from megatron_hybrid.server.http.tokens.inference_body import InferenceRequest
from megatron_hybrid.server.options import SamplingDefaults

# For load balancers and scrapers, which hold no key, and for the page that asks for one.
OPEN_ROUTES = ("/health", "/ping", "/metrics", "/openapi.json", "/")
_JSON = "application/json"
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
_ASKS = (500, 503)
_GENERATES = (404, 504, *_ASKS)
# Bodies that ask for answers, and where each says how long these are, if not by OpenAI's default.
_MAX_TOKENS = {
    "ChatRequest": "max_tokens",
    "CompletionRequest": None,
    "ResponsesRequest": "max_output_tokens",
    "MessagesRequest": None,
}
_CONTROLS = (409, *_ASKS)


class Route(NamedTuple):
    """One operation. `answer`: what a 200 holds, of the content type `kind`; `events`: what a
    stream holds, and `stream` says it; `errors`: other statuses, besides those that every route
    with a body or a key has, and `error` what they hold; `query`: the kind that has its parameters.
    """

    path: str
    summary: str
    answer: Any
    body: Any = ()  # a kind, or one of several
    errors: tuple[int, ...] = ()
    method: str = "post"
    kind: str = _JSON
    events: Any = None
    stream: str = ""
    query: type[Body] | None = None
    error: Any = answers.Error

    @property
    def bodies(self) -> tuple[type, ...]:
        """What it takes one of."""
        return self.body if isinstance(self.body, tuple) else (self.body,)


def _get(path: str, summary: str, answer: Any, *errors: int, kind: str = _JSON) -> Route:
    return Route(path, summary, answer, errors=errors, method="get", kind=kind)


def _control(path: str, summary: str, body: Any = ()) -> Route:
    return Route(path, summary, answers.Controlled, body, _CONTROLS)


def _sglang(path: str, summary: str, body: Any) -> Route:
    return Route(path, summary, answers.Succeeded, body, _CONTROLS)


_CHAT = ("/v1/chat/completions", "Answer a chat.")
_TEXT = ("/v1/completions", "Continue texts.")
_MESSAGES = ("/v1/messages", "Answer a chat, in Anthropic's form.", anthropic_answers.Message)
_COUNT = ("/v1/messages/count_tokens", "How long its prompt is.", anthropic_answers.InputTokens)
_TOKENIZE = ("/tokenize", "Text or a chat as token ids.", answers.Tokens)
_SCORE = ("/score_tokens", "How likely answers are behind a prompt.", answers.Scores)
_RENDER_CHAT = (f"{_CHAT[0]}/render", "Its prompt as token ids.", answers.RenderedPrompt)
_RENDER_TEXT = (f"{_TEXT[0]}/render", "Its prompts as token ids.", list[answers.RenderedPrompt])
_PAUSE = "Start no more requests; answered when none runs."
_UPDATE = "Overwrite the model's weights, from a folder or another process."
_START = ("The updates that come are pieces of one.", weights.StartUpdateRequest)
_FINISH = ("All pieces are there.", weights.FinishUpdateRequest)
_GROUP = "Meet a trainer in a group through which it sends weights."
_INFO = ("What a router wants to know: the model's name.", answers.ServerInfo)
_MODEL_INFO = ("What a router wants to know of the model.", answers.ModelInfo)
_LOADS = ("/v1/loads", "How much each replica has to do.", answers.Loads, 503)
_GET_LOAD = ("/get_load", "The same as /load.", answers.RunningOrWaiting, 503)
_TO_DONE = (
    "as its data, or an Error, after which no other chunk comes; the last one's data is [DONE]."
)
_RESPOND = ("/v1/responses", "Answer, and store the answer.", response_answers.Response)
_RESPONSE = "/v1/responses/{name}"
_READ = (_RESPONSE, "A stored response.", response_answers.Response)
_ITEMS = (f"{_RESPONSE}/input_items", "What it answers.", response_answers.ItemList)
_DROP = (_RESPONSE, "Store it no more.", response_answers.ResponseDeleted)
_CANCEL = (f"{_RESPONSE}/cancel", "Always refused.", response_answers.Response)
_STORED = (400, 404, 503)
_GENERATE = ("/generate", "Continue prompts of token ids, as SGLang has it.")
_INFER = ("/inference/v1/generate", "Continue a prompt of token ids, as vLLM has it.")
_FLUSH = ("/flush_cache", "Forget every cached prefix, unless requests run or wait.", str)
_GENERATES_ONE = ("/health_generate", "Whether tokens are generated.", tokens.Healthy)
_VERSION = ("What trainers call the weights.", tokens.WeightVersion, 503)
ROUTES = [
    Route(
        *(*_CHAT, answers.ChatCompletion, requests.ChatRequest, _GENERATES),
        events=answers.ChatCompletionChunk,
        stream=f"ChatCompletionChunk {_TO_DONE}",
    ),
    Route(
        *(*_TEXT, answers.Completion, requests.CompletionRequest, _GENERATES),
        events=answers.CompletionChunk,
        stream=f"CompletionChunk {_TO_DONE}",
    ),
    Route(
        *(*_RESPOND, ResponsesRequest, _GENERATES),
        events=response_answers.ResponseEvent,
        stream="Response...Event as its data, and its type as its name.",
    ),
    Route(
        *(*_MESSAGES, anthropic.MessagesRequest, (*_GENERATES, OVERLOADED)),
        events=anthropic_answers.Event,
        stream="Message..., ContentBlock... or Ping as its data, and its type as its name.",
        error=anthropic_answers.MessagesError,
    ),
    Route(
        *(*_GENERATE, tokens.GeneratedOrList, GenerateRequest, _GENERATES),
        events=tokens.Generated,
        stream=f"Generated {_TO_DONE}",
    ),
    Route(
        *(*_INFER, tokens.Inferred, InferenceRequest, _GENERATES),
        events=tokens.InferredChunk,
        stream=f"InferredChunk {_TO_DONE}",
    ),
    Route(
        *(*_COUNT, anthropic.CountTokensRequest, (404, *_ASKS)),
        error=anthropic_answers.MessagesError,
    ),
    Route(*_READ, method="get", errors=_STORED, query=RetrieveQuery),
    Route(*_ITEMS, method="get", errors=_STORED, query=InputItemsQuery),
    Route(*_DROP, method="delete", errors=_STORED),
    Route(*_CANCEL, errors=_STORED),
    _get("/v1/models", "The model that is served.", answers.ModelList),
    _get("/v1/models/{name}", "One model.", answers.Model, 404),
    _get("/health", "Whether requests are taken.", answers.Health, 503),
    _get("/ping", "The same as /health.", answers.Health, 503),
    _get("/load", "How many requests run or wait.", answers.Load, 503),
    _get("/version", "This package's version.", answers.Version),
    _get("/metrics", "Figures for Prometheus.", str, kind="text/plain"),
    _get("/stats", "Figures as JSON.", answers.Stats, 503),
    *(_get(path, *_INFO) for path in ("/server_info", "/get_server_info")),
    *(_get(path, *_MODEL_INFO) for path in ("/model_info", "/get_model_info")),
    _get(*_GET_LOAD),
    _get(*_LOADS),
    _get("/openapi.json", "This description.", answers.Description),
    _get("/", "A page with a chat and the cache.", str, kind="text/html"),
    Route(*_SCORE, scoring.ScoreTokensRequest, _GENERATES),
    Route(*_RENDER_CHAT, requests.ChatRequest, (404, *_ASKS)),
    Route(*_RENDER_TEXT, requests.CompletionRequest, (404, *_ASKS)),
    Route(*_TOKENIZE, (requests.TokenizeTextRequest, requests.TokenizeChatRequest), _ASKS),
    Route("/detokenize", "Token ids as text.", answers.Text, requests.DetokenizeRequest, _ASKS),
    Route("/abort", "End an answer early.", answers.Aborted, requests.AbortRequest, _ASKS),
    Route("/abort_request", "End answers early.", answers.Aborted, AbortRequestBody, _ASKS),
    *(
        Route(*_FLUSH, errors=(400, 403, *_ASKS), method=method, kind="text/plain")
        for method in ("get", "post")
    ),
    *(Route(*_GENERATES_ONE, errors=_ASKS, method=method) for method in ("get", "post")),
    _get("/liveness", "Whether the engine's process answers.", tokens.Healthy, 503),
    *(_get(path, *_VERSION) for path in ("/weight_version", "/get_weight_version")),
    Route("/reset_prefix_cache", "Forget every cached prefix.", answers.Done, errors=_ASKS),
    _control("/pause", _PAUSE, weights.PauseRequest)._replace(query=weights.PauseQuery),
    _control("/resume", "Go on after a pause.", weights.ResumeRequest),
    _control("/update_weights", _UPDATE, weights.UpdateWeightsRequest),
    _control("/update_weight_version", "Name the weights.", weights.NameWeightsRequest),
    *(_control(f"/{one}_weight_update", *_START) for one in ("start", "begin")),
    *(_control(f"/{one}_weight_update", *_FINISH) for one in ("finish", "end")),
    _control("/init_weight_transfer_engine", _GROUP, weights.InitTransferRequest),
    _control("/shutdown_weight_transfer_engine", "Leave that group."),
    _control("/init_broadcaster", _GROUP, weights.InitBroadcasterRequest),
    _get("/is_paused", "Whether requests wait for /resume.", answers.Paused, 403, 503),
    _get("/weight_info", "What answers call the weights.", answers.WeightInfo, 403, 503),
    _sglang("/pause_generation", _PAUSE, weights.PauseGenerationRequest),
    _sglang("/continue_generation", "Go on after a pause.", weights.ResumeRequest),
    _sglang("/init_weights_update_group", _GROUP, weights.InitGroupRequest),
    _sglang("/destroy_weights_update_group", "Leave it.", weights.DestroyGroupRequest),
    _sglang("/update_weights_from_distributed", _UPDATE, weights.FromDistributedRequest),
    _sglang("/update_weights_from_tensor", _UPDATE, weights.FromTensorRequest),
    _sglang("/update_weights_from_disk", _UPDATE, weights.FromDiskRequest),
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
            "content": {_JSON: {"schema": _reference(*route.bodies)}},
        }
        errors |= {400, 408, 413}
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
    response = _response(_SENTENCES[status], {_JSON: {"schema": _reference(error)}})
    if status in (429, 503, OVERLOADED):
        retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        response["headers"]["Retry-After"] = retry
    return response
