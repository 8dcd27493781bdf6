"""From the body of /v1/responses to a chat in tokens: what was said before is found, and what a
response says of its request is written down once."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import json

from megatron_hybrid.errors import InvalidRequestError, RequestError
from megatron_hybrid.server.http.prepared import PreparedChat
from megatron_hybrid.server.http.protocol.generation_request import Chat, with_defaults
from megatron_hybrid.server.http.protocol.parsing import read
from megatron_hybrid.server.http.protocol.response_chat import chat_of
from megatron_hybrid.server.http.protocol.response_items import (
    ItemReference,
    MessageItem,
    Saying,
    count_system,
    listed,
    read_items,
    with_types,
)
from megatron_hybrid.server.http.protocol.responses import SEALED, ResponsesRequest
from megatron_hybrid.server.link.response_memory import ResponseMemoryClient, Stored
from megatron_hybrid.server.options import ParseOptions

_KINDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\w+")  # as `item_id` makes them


class NotStored(RequestError):
    """Somebody names what is not stored, or not for this key."""

    status, kind = 404, "invalid_request_error"

    def __init__(self, message: str, field: str, code: str = "not_found") -> None:
        super().__init__(message)
        self.field, self.code = field, code

    def __reduce__(self) -> tuple[Any, ...]:  # it may come from another process
        return type(self), (str(self), self.field, self.code)


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A response that can begin.

    head: the response's fields that never change, as the beginning of a JSON object. stored: what
    is to be kept of it, without its body; None: nothing. seals: thoughts are given sealed, too.
    """

    chat: PreparedChat
    response_id: str
    head: bytes
    stored: Stored | None
    seals: bool


def item_id(kind: str, response_id: str, number: int | str) -> str:
    """By which the item of a response is found; number: its own among them."""
    return f"{_KINDS[kind]}_{response_id.removeprefix('resp_')}_{number}"


@dataclass(frozen=True, slots=True)
class Preparer:
    """What requests of one caller are prepared with. memory: of stored responses, if there is one.
    owner: whose they are. encode: makes a prompt of a chat."""

    options: ParseOptions
    model_name: str
    memory: ResponseMemoryClient | None
    owner: bytes
    encode: Callable[[Chat], PreparedChat]

    def prepare(self, values: dict[str, Any]) -> PreparedResponse:
        """Of a body's JSON. Raises InvalidRequestError, NotStored and what `encode` raises."""
        if "input" in values:
            values = {**values, "input": with_types(values["input"])}
        body = read(ResponsesRequest, with_defaults(values, self.options), self.options)
        response_id = f"resp_{secrets.token_hex(16)}"
        earlier = self._earlier(body.previous_response_id)
        given = self._given(body)
        chat = self._fitting(body, earlier, given)
        stored = None
        if self.memory is not None and body.store is not False:
            kept = [
                listed(item, item_id(str(item.__struct_config__.tag), response_id, f"in{number}"))
                for number, item in enumerate(given)
            ]
            previous = body.previous_response_id or ""
            stored = Stored(self.owner, previous, json.encode(kept), b"")
        name = chat.generation.adapter or self.model_name
        head = _head(body, values, chat, response_id, name, stored is not None)
        # Clients whose responses are not stored may have no other way to send thoughts back.
        seals = stored is None or SEALED in (body.include or ())
        return PreparedResponse(chat, response_id, head, stored, seals)

    def _earlier(self, name: str | None) -> list[Saying]:
        """All items of the response with that id, and of those that it goes on from."""
        if not name:
            return []
        chain = None if self.memory is None else self.memory.find_chain(name, self.owner)
        if chain is None:
            raise NotStored(
                f"Previous response with id {name!r} not found: it is not stored, or not any more, "
                "or one is missing that it goes on from.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return [item for one in chain for item in items_of(one)]

    def _given(self, body: ResponsesRequest) -> list[Saying]:
        """The items of the body, with those that it names."""
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input)]
        asked = {one.id for one in body.input if isinstance(one, ItemReference)}
        known = self._named(asked) if asked else {}
        given = []
        for number, item in enumerate(body.input):
            if isinstance(item, ItemReference):
                if item.id not in known:
                    field = f"input[{number}].id"
                    raise NotStored(f"{field}: item with id {item.id!r} not found.", field)
                item = known[item.id]
            given.append(item)
        return given

    def _named(self, item_ids: set[str]) -> dict[str, Saying]:
        """Items of stored responses by their ids, those that there are."""
        found = filter(None, map(_ITEM_ID.fullmatch, item_ids))
        names = sorted({f"resp_{one[1]}" for one in found})
        if self.memory is None or not names:
            return {}
        stored = filter(None, self.memory.find(names, self.owner))
        return {item.id: item for one in stored for item in items_of(one) if item.id}

    def _fitting(
        self, body: ResponsesRequest, earlier: Sequence[Saying], given: Sequence[Saying]
    ) -> PreparedChat:
        """The chat; where it is too long and the body lets it, without its oldest turns, as few of
        them as fit."""
        items = [*earlier, *given]
        begin = count_system(items)

        def encoded(start: int) -> PreparedChat:
            kept = range(start, len(items))
            numbers = [*range(begin), *kept]
            paths = {
                place: f"input[{number - len(earlier)}]"
                for place, number in enumerate(numbers)
                if number >= len(earlier)
            }
            said = [items[number] for number in numbers]
            return self.encode(chat_of(body, said, paths, self.options))

        turns = [begin]
        if body.truncation == "auto":
            turns += [
                number
                for number in range(begin + 1, len(items))
                if isinstance(one := items[number], MessageItem) and one.role == "user"
            ]
        # The first turn that fits lies in turns[low:high]; nearly always it is the first of all.
        low, middle, high = 0, 0, len(turns)
        fitting: PreparedChat | None = None
        while low < high:
            try:
                fitting, high = encoded(turns[middle]), middle
            except InvalidRequestError as error:
                low = middle + 1
                if error.status != 413 or low == len(turns):
                    raise
            middle = (low + high) // 2
        assert fitting is not None, "the last turn fits, or is refused"
        return fitting


def items_of(response: Stored) -> list[Saying]:
    """What was said in a stored response: its input, and its output."""
    return [*read_items(response.items), *read_items(response.body, "output")]


def _head(
    body: ResponsesRequest,
    values: dict[str, Any],
    chat: PreparedChat,
    response_id: str,
    model_name: str,
    stores: bool,
) -> bytes:
    """What every state of a response says of its request; without the end of the object."""
    params = chat.generation.params
    form = (values.get("text") or {}).get("format") or {"type": "text"}
    verbosity = None if body.text is None else body.text.verbosity
    head = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model_name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stores,
        "temperature": params.temperature,
        "text": {
            "format": {name: value for name, value in form.items() if value is not None},
            "verbosity": verbosity or "medium",
        },
        "tool_choice": values.get("tool_choice") or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return json.encode(head)[:-1]
