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
from tests.text.test_after_thoughts import allows
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
    response = server.http.post(PATH, json={"input": "Hello", "stream": True}, buffered=False)
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
    response = server.http.post(PATH, json={"input": "Hello", "stream": True}, buffered=False)
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
    response = server.http.post(PATH, json={"input": "Hello", "stream": True}, buffered=False)
    next(response.iter_encoded())
    response.close()
    aborted = f"abort {server.engine.added[-1].request_id}"
    wait_until(lambda: any(line.startswith(aborted) for line in server.engine.log))
    wait_until(lambda: not server.engine.has_work())  # a line is written before


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(serve: Serve, mode: str) -> None:
    server = serve(templates.QWEN3, CALL)
    some = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "sub"}]}
    response = server.ask(tools=[ADD, SUB], tool_choice=some)
    # The scripted model does not care for grammars: what it may not call stays text.
    assert [item["type"] for item in response["output"]] == ["message"]
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None
    assert allows(
        server.tokenizer, grammar, '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
    )
    assert not allows(server.tokenizer, grammar, CALL)
    assert allows(server.tokenizer, grammar, FOX) == (mode == "auto")
    assert '"add"' in server.said and '"sub"' in server.said


def test_forms_hold_the_answer(serve: Serve) -> None:
    server = serve(templates.QWEN3, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form, bad in (
        ({"type": "json_schema", "name": "a", "schema": schema}, '{"a": "b"}'),
        ({"type": "json_object"}, "[]"),
    ):
        server.ask(text={"format": form})
        grammar = server.engine.added[-1].params.grammar
        assert grammar is not None and allows(server.tokenizer, grammar, '{"a": 1}')
        assert not allows(server.tokenizer, grammar, bad)
    server.ask(structured_outputs={"choice": ["b"]})
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None and allows(server.tokenizer, grammar, "b")
    assert "grammar" not in server.ask(text={"format": {"type": "text"}})


def test_a_forced_call_has_no_text_whose_form_could_matter(serve: Serve) -> None:
    """instructor asks for both."""
    server = serve(templates.QWEN3, CALL)
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    response = server.ask(tools=[ADD], tool_choice={"type": "function", "name": "add"}, text=form)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None and allows(server.tokenizer, grammar, CALL)
    assert not allows(server.tokenizer, grammar, "{}")
    # Where it may call, it calls or follows the form.
    server.ask(tools=[ADD], text=form)
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None and allows(server.tokenizer, grammar, CALL)
    assert allows(server.tokenizer, grammar, "{}")
    assert not allows(server.tokenizer, grammar, FOX)


def test_sampling_and_scheduling_are_as_in_chats(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    server.ask(
        max_output_tokens=20,
        top_p=0.5,
        top_k=3,
        min_p=0.125,
        seed=7,
        presence_penalty=0.5,
        stop=["never this"],
        cache_salt="mine",
        priority=-1,
        cache_checkpoints=[4],
        timeout=60,
    )
    added = server.engine.added[-1]
    params = added.params
    assert (params.max_tokens, params.top_p, params.top_k, params.min_p) == (20, 0.5, 3, 0.125)
    assert (params.seed, params.presence_penalty, params.stop) == (7, 0.5, ("never this",))
    assert (added.cache_salt, added.priority, added.cache_checkpoints) == ("mine", -1, (4,))


def test_effort_and_the_templates_variables_reach_the_template(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, FOX)
    server.ask(reasoning={"effort": "none"})
    assert server.said.endswith("</think>\n\n")
    server.ask(reasoning={"effort": "none"}, enable_thinking=True)
    assert server.said.endswith("<think>\n")
    server.ask(chat_template_kwargs={"enable_thinking": False})
    assert server.said.endswith("</think>\n\n")


def test_the_operators_sampling_is_that_of_open_fields(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX, sampling_defaults=(("top_k", 9), ("max_tokens", 3)))
    assert server.ask()["status"] == "incomplete"
    assert server.engine.added[-1].params.top_k == 9
    assert server.ask(max_output_tokens=100, top_k=2)["status"] == "completed"
    assert server.engine.added[-1].params.top_k == 2


IMAGE = {"type": "input_image", "image_url": "http://x"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"content": "a"}]}, "input[0].type", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0].type", "invalid_value"),
    (
        {"input": ["a", {"role": "user", "content": "a"}]},
        "input[0]",
        "invalid_type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}]},
        "input[0].content[1].type",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
        "input[0].output[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        "input[0].call_id",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
        "input[0].arguments",
        "invalid_value",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [ADD, SUB, ADD]}, "tools[2].name", "invalid_value"),
    (
        {"tools": [{**ADD, "parameters": {"not": {}}, "strict": True}]},
        "tools[0].parameters",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "invalid_value"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
        "tool_choice.name",
        "invalid_value",
    ),
    (
        {
            "tools": [ADD],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "sub"}],
            },
        },
        "tool_choice.tools[0].name",
        "invalid_value",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
        "text.format.schema",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "tools": [ADD], "tool_choice": "required"},
        "structured_outputs.regex",
        "invalid_value",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "text.format",
        "invalid_value",
    ),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_a"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "pmpt_a"}}, "prompt", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"include": ["everything"]}, "include", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 10_000}, "max_output_tokens", "context_length_exceeded"),
    ({"input": "a" * 5000}, "input", "context_length_exceeded"),
    ({"cache_checkpoints": [5000]}, "cache_checkpoints", "invalid_value"),
    ({"messages": []}, "messages", "unknown_parameter"),
]


@pytest.mark.parametrize(("body", "field", "code"), REFUSED)
def test_what_is_refused_is_named_as_the_client_names_it(
    serve: Serve, body: dict[str, Any], field: str, code: str
) -> None:
    server = serve(templates.QWEN3, FOX)
    given = body.get("input", "Hello")
    rest = {name: value for name, value in body.items() if name != "input"}
    assert server.refused(given, **rest) == (400, field, code)
    assert not server.engine.added


def test_a_model_that_is_not_served_is_not_found(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    assert server.refused(model="other") == (404, "model", "model_not_found")
    assert server.ask(model="fake")["model"] == "fake"


def test_what_the_template_refuses_is_said_of_the_input(serve: Serve) -> None:
    refusing = templates.QWEN3 + "{{- raise_exception('no') -}}"
    assert serve(refusing, FOX).refused() == (400, "input", "invalid_value")
