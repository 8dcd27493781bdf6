"""The routes of /v1/responses: to make a response, and to read and drop those that are stored."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from flask import Flask, Response, g, request
from msgspec import json

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.answering import answered, request_body
from megatron_hybrid.server.http.http_errors import json_response
from megatron_hybrid.server.http.protocol.parsing import Body, read
from megatron_hybrid.server.http.protocol.response_queries import (
    DEFAULT_LISTED,
    InputItemsQuery,
    RetrieveQuery,
)
from megatron_hybrid.server.http.responses.answers import ResponseAnswers
from megatron_hybrid.server.http.responses.preparing import NotStored, PreparedResponse
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link.response_memory import Stored

T = TypeVar("T", bound=Body)
_NAMES_OF_STORED = (b"previous_response_id", b"item_reference")  # in a body


def install(app: Flask, serving: Serving) -> None:
    """OpenAI's, without what belongs to responses in the background."""

    @app.post("/v1/responses")
    def responses() -> Response:
        body = request_body()
        names_stored = any(word in piece for piece in body for word in _NAMES_OF_STORED)
        prepared: PreparedResponse = serving.prepare(
            "response", body, g.caller, may_be_long=names_stored
        )
        begin = partial(ResponseAnswers, serving, prepared)
        return answered(serving, prepared.response_id, prepared.chat.generation, begin)

    @app.get("/v1/responses/<name>")
    def response(name: str) -> Response:
        _query(RetrieveQuery)
        return Response(find(name).body, mimetype="application/json")

    @app.delete("/v1/responses/<name>")
    def forget(name: str) -> Response:
        if serving.responses is None or not serving.responses.forget(name, g.caller.owner):
            raise _not_found(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    @app.post("/v1/responses/<name>/cancel")
    def cancel(name: str) -> Response:
        find(name)
        raise InvalidRequestError(
            "response_id",
            f"Response {name!r} can't be cancelled: only one in the background can, which is not "
            "supported. POST /abort ends one that is being answered.",
        )

    @app.get("/v1/responses/<name>/input_items")
    def input_items(name: str) -> Response:
        wanted = _query(InputItemsQuery)
        find(name)
        assert serving.responses is not None, "else nothing is found"
        chain = serving.responses.find_chain(name, g.caller.owner)
        if chain is None:
            raise _not_found(name)
        return json_response(_page(_input_of(chain), wanted))

    def find(name: str) -> Stored:
        if serving.responses is not None:
            (found,) = serving.responses.find([name], g.caller.owner)
            if found is not None:
                return found
        raise _not_found(name)


def _not_found(name: str) -> NotStored:
    return NotStored(f"Response with id {name!r} not found.", "response_id")


def _query(kind: type[T]) -> T:
    """The current request's query. Raises InvalidRequestError."""
    values: dict[str, Any] = {}
    for key, given in request.args.lists():
        name = key.removesuffix("[]")  # as OpenAI's clients write lists
        values[name] = given if name == "include" else given[-1]
    return read(kind, values, strict=False)


def _input_of(chain: list[Stored]) -> list[dict[str, Any]]:
    """All items that a response answers: those before it, and its own."""
    *earlier, last = chain
    items: list[dict[str, Any]] = []
    for one in earlier:
        items += json.decode(one.items) + json.decode(one.body)["output"]
    return items + json.decode(last.items)


def _page(items: list[dict[str, Any]], wanted: InputItemsQuery) -> dict[str, Any]:
    if wanted.order != "asc":
        items.reverse()
    if wanted.after is not None:
        ids = [item["id"] for item in items]
        if wanted.after not in ids:
            words = f"after is {wanted.after!r}, which is not the id of one of the items."
            raise InvalidRequestError("after", words)
        items = items[ids.index(wanted.after) + 1 :]
    limit = wanted.limit or DEFAULT_LISTED
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(items) > limit,
    }
