"""/v1/responses: what is answered, whole and in events, each as OpenAI's client has its types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from threading import Event
from typing import Any

import pytest

from tests.server.http.responses.responding import (
    ADD,
    CALL,
    FOX,
    OPENED,
    PATH,
    SUB,
    THOUGHT,
    Serve,
    events_in,
)
from tests.server.running import wait_until
from tests.text import thinking_templates as templates
from tests.thorough import usually

LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
# What OpenAI's answers have and its client has no field for, in this version or another one.
UNNAMED = {"store", "name", "bytes"}


@cache
def _adapter(kind: str) -> Any:
    pydantic = pytest.importorskip("pydantic")
    types = pytest.importorskip("openai.types.responses")
    return pydantic.TypeAdapter(attrgetter(kind)(types))


def check_types(kind: str, value: Any) -> None:
    """A value as the client's types have it: nothing is missing, of another type or unknown."""
    found = _adapter(kind).validate_json(json.dumps(value), strict=True)
    assert not set(_unknown(found)) - UNNAMED


def _unknown(found: Any) -> Iterator[str]:
    """Fields that no type has a name for."""
    if isinstance(found, list):
        for one in found:
            yield from _unknown(one)
    elif hasattr(found, "model_extra"):
        yield from found.model_extra or ()
        for name in type(found).model_fields:
            yield from _unknown(getattr(found, name))


def check_order(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that these events add up to, of which each is added, grows and is done before the
    next one."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    items: list[dict[str, Any]] = []
    waiting = list(events[2:-1])
    while waiting:
        added = waiting.pop(0)
        assert (added["type"], added["output_index"]) == ("response.output_item.added", len(items))
        item = added["item"]
        assert item["status"] == "in_progress"
        end = next(n for n, one in enumerate(waiting) if "output_item" in one["type"])
        inside, done = waiting[:end], waiting[end]
        waiting = waiting[end + 1 :]
        assert all(one["output_index"] == len(items) for one in [*inside, done])
        assert all(one["item_id"] == item["id"] for one in inside)
        assert done["type"] == "response.output_item.done" and done["item"]["id"] == item["id"]
        (_check_call if item["type"] == "function_call" else _check_text)(
            item, inside, done["item"]
        )
        items.append(done["item"])
    assert events[-1]["response"]["output"] == items
    return items


def _check_call(added: Any, inside: list[dict[str, Any]], item: Any) -> None:
    kind = "response.function_call_arguments"
    *deltas, done = inside
    assert {one["type"] for one in deltas} == {f"{kind}.delta"} and done["type"] == f"{kind}.done"
    text = "".join(one["delta"] for one in deltas)
    assert text == done["arguments"] == item["arguments"] and added["arguments"] == ""
    assert added == {**item, "arguments": "", "status": "in_progress"}


def _check_text(added: Any, inside: list[dict[str, Any]], item: Any) -> None:
    kind = "reasoning" if item["type"] == "reasoning" else "output"
    part, *deltas, done, part_done = inside
    (content,) = item["content"]
    assert added["content"] == [] and {one["content_index"] for one in inside} == {0}
    assert part["type"] == "response.content_part.added" and part["part"]["text"] == ""
    assert {one["type"] for one in deltas} <= {f"response.{kind}_text.delta"}
    assert done["type"] == f"response.{kind}_text.done"
    assert "".join(one["delta"] for one in deltas) == done["text"] == content["text"]
    assert part_done["type"] == "response.content_part.done" and part_done["part"] == content
    if kind == "output":
        logprobs = [entry for one in deltas for entry in one["logprobs"]]
        # Those of what is never shown, such as white space around a call, come at the end.
        assert done["logprobs"] == content["logprobs"]
        assert logprobs == done["logprobs"][: len(logprobs)]


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is its own alone."""
    names = ("id", "created_at", "completed_at")
    rest = {name: value for name, value in response.items() if name not in names}
    own = ("id", "call_id")
    items = [{k: v for k, v in item.items() if k not in own} for item in response["output"]]
    return {**rest, "output": items}


SCENES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "text": (templates.QWEN3, FOX, {}, ["message"]),
    "thoughts": (templates.QWEN3_5, f"{OPENED}{FOX}", {}, ["reasoning", "message"]),
    "call": (templates.QWEN3, CALL, {"tools": [ADD]}, ["function_call"]),
    "everything": (
        templates.QWEN3_5,
        f"{OPENED}Look.\n{CALL}\n{CALL}",
        {"tools": [ADD]},
        ["reasoning", "message", "function_call", "function_call"],
    ),
    "text after a call": (
        *(templates.QWEN3, f"Look.\n{CALL}\nDone.\n{CALL}\n<tool_call>\n", {"tools": [ADD]}),
        ["message", "function_call", "message", "function_call", "message"],
    ),
    "nothing": (templates.QWEN3, "", {}, ["message"]),
    "thoughts alone": (templates.QWEN3_5, OPENED, {}, ["reasoning", "message"]),
    "cut in its text": (templates.QWEN3, FOX, {"max_output_tokens": 5}, ["message"]),
    "cut in its thoughts": (templates.QWEN3_5, OPENED, {"max_output_tokens": 5}, ["reasoning"]),
    "log-probabilities": (templates.QWEN3, FOX, LOGPROBS, ["message"]),
    "log-probabilities after thoughts": (
        *(templates.QWEN3_5, f"{OPENED}{FOX}", LOGPROBS, ["reasoning", "message"]),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("burst", usually([1, 1000], [1, 7, 1000]))
def test_a_stream_has_openais_events_in_their_order_and_ends_with_the_whole_response(
    serve: Serve, scene: str, burst: int
) -> None:
    template, text, more, kinds = SCENES[scene]
    server = serve(template, text)
    server.engine.burst = burst
    server.ask(**more)  # what is cached from now on is the same
    events = server.stream(**more)
    for event in events:
        check_types("ResponseStreamEvent", event)
    assert [item["type"] for item in check_order(events)] == kinds
    last = events[-1]
    whole = server.ask(**more)
    check_types("Response", whole)
    assert without_names(last["response"]) == without_names(whole)
    cut = "cut" in scene
    assert last["type"] == ("response.incomplete" if cut else "response.completed")
    assert whole["status"] == ("incomplete" if cut else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert whole["output"][-1]["status"] == whole["status"]
    assert (whole["completed_at"] is None) == cut
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress" and not event["response"]["output"]


def test_log_probabilities_of_what_is_not_shown_wait_for_text(serve: Serve) -> None:
    """White space behind the thoughts comes in one event with their end, or in the next one."""
    template, text, more, _ = SCENES["log-probabilities after thoughts"]
    server = serve(template, text)
    whole = server.ask(**more)["output"][-1]
    count = server.ask(**more)["usage"]["output_tokens_details"]["reasoning_tokens"]
    for server.engine.burst in range(count - 1, count + 4):
        last = server.stream(**more)[-1]["response"]["output"][-1]
        assert last["content"] == whole["content"]


@pytest.mark.parametrize("scene", ["everything", "log-probabilities", "cut in its text"])
def test_responses_and_events_are_as_the_server_describes_them(serve: Serve, scene: str) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    template, text, more, _ = SCENES[scene]
    server = serve(template, text)
    document = server.http.get("/openapi.json").get_json()
    names = {
        schema["properties"]["type"]["enum"][0]: name
        for name, schema in document["components"]["schemas"].items()
        if name.startswith("Response") and name.endswith("Event")
    }

    def check(name: str, value: Any) -> None:
        schema = {**document, "$ref": f"#/components/schemas/{name}"}
        jsonschema.validator_for(schema).validate(value)

    for event in server.stream(**more):
        check(names[event["type"]], event)
    check("Response", server.ask(**more))


def test_a_response_says_what_the_model_said(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}Look.\n{CALL}")
    response = server.ask(tools=[ADD])
    thoughts, message, call = response["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert thoughts["summary"] == []
    (part,) = message["content"]
    assert (part["text"], part["annotations"], part["logprobs"]) == ("Look.", [], [])
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
    usage = response["usage"]
    assert usage["output_tokens"] == len(server.engine.ids) + 1
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    count = usage["output_tokens_details"]["reasoning_tokens"]
    assert server.tokenizer.decode(server.engine.ids[:count]) == f"{THOUGHT}\n</think>"
    ids = {item["id"].split("_")[0] for item in response["output"]}
    assert ids == {"rs", "msg", "fc"} and call["call_id"].startswith("call_")


def test_log_probabilities_are_those_of_the_text(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}{FOX}")
    for burst in (1, 1000):
        server.engine.burst = burst
        part = server.ask(**LOGPROBS)["output"][-1]["content"][0]
        tokens = bytes(byte for one in part["logprobs"] for byte in one["bytes"]).decode()
        assert tokens == f"\n\n{FOX}"  # white space after the thoughts is no part of the text
        assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])


def test_every_response_repeats_its_request(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "safety_identifier": "who",
        "store": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "text": {
            "format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True},
            "verbosity": "low",
        },
        "tool_choice": {"type": "function", "name": "sub"},
        "tools": [{**SUB, "description": "Less.", "parameters": schema, "strict": True}],
        "truncation": "auto",
        "user": "somebody",
    }
    response = server.ask(**given, reasoning={"effort": "low", "summary": "auto"})
    assert {key: response[key] for key in given} == given
    assert response["reasoning"] == {"effort": "low", "summary": None}
    plain = server.ask()
    assert plain["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (plain["tools"], plain["tool_choice"], plain["metadata"]) == ([], "auto", {})
    assert plain["store"] and plain["parallel_tool_calls"] and not plain["background"]


def test_a_stream_that_breaks_says_so_in_its_last_events(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    advance, begun = server.engine._advance, Event()

    def fail(request_id: str, index: int, one: Any) -> Any:
        if len(one.generated) == 5:
            assert begun.wait(30)  # before anything is sent it is an error, not a stream
            raise RuntimeError("the engine fails")
        return advance(request_id, index, one)

    server.engine._advance = fail  # type: ignore[method-assign]
    response = server.begin_stream()
    pieces = response.iter_encoded()
    text = next(pieces).decode()
    begun.set()
    events = list(events_in(text + b"".join(pieces).decode()))
    for event in events:
        check_types("ResponseStreamEvent", event)
    error, failed = events[-2:]
    assert (error["type"], error["code"]) == ("error", "engine_error")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert server.http.get(f"{PATH}/{failed['response']['id']}").status_code == 404


def test_an_answer_that_is_aborted_is_incomplete(serve: Serve) -> None:
    server = serve(templates.QWEN3, "x" * 3000)
    server.engine.step_seconds = 0.002
    response = server.begin_stream()
    pieces = response.iter_encoded()
    text = next(pieces).decode()
    name = json.loads(text.split("\ndata: ")[1].split("\n\n")[0])["response"]["id"]
    assert server.http.post("/abort", json={"request_id": name}).get_json() == {"aborted": 1}
    *_, last = events_in(text + b"".join(pieces).decode())
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] is None


def test_a_client_that_stops_reading_frees_its_request(serve: Serve) -> None:
    server = serve(templates.QWEN3, "x" * 3000)
    server.engine.step_seconds = 0.001
    response = server.begin_stream()
    next(response.iter_encoded())
    response.close()
    aborted = f"abort {server.engine.added[-1].request_id}"
    wait_until(lambda: any(line.startswith(aborted) for line in server.engine.log))
    wait_until(lambda: not server.engine.has_work())  # a line is written before
