"""/v1/messages: answers in Anthropic's form, whole and as events."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import Unasked
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import MAX_QUEUE, RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.http import test_reasoning
from tests.server.http.messages_api import (
    COUNT,
    MESSAGES,
    ask,
    assistant,
    put_together,
    read_event,
    stream,
    text,
    user,
    without_names,
)
from tests.server.running import wait_until
from tests.text import thinking_templates as templates

serve = test_reasoning.serve
HELLO = user("Hello")
LETTERS = "abcdefghijklmnop"
TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é", "b": [1]}}\n</tool_call>'
SALTED = {"cache_salt": "another"}  # so that nothing is cached


def test_an_answer_has_anthropics_shape(http: FlaskClient, engine: FakeEngine) -> None:
    long = user(LETTERS)
    answer = ask(http, long, max_tokens=8, metadata={"user_id": "u"}, service_tier="auto")
    assert answer["id"].startswith("msg_") and answer["model"] == "fake"
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    (block,) = answer["content"]
    assert block["type"] == "text" and block["text"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"] == {
        "input_tokens": len(engine.added[-1].prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 8,
    }


def test_a_streams_events_add_up_to_the_whole(http: FlaskClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    whole = ask(http, HELLO, max_tokens=8)
    events = stream(http, HELLO, max_tokens=8)
    assert [event["type"] for event in events].count("content_block_delta") > 1
    assert without_names(put_together(events)) == without_names(whole)


def test_thoughts_text_and_calls_are_blocks(serve: Any) -> None:
    server = serve(templates.QWEN3_5, f"Hm.\n</think>\n\nFox.\n{CALL}\n{CALL}")
    whole = ask(server.http, HELLO, tools=[TOOL], max_tokens=999)
    thinking, said, *calls = whole["content"]
    assert thinking["thinking"] == "Hm." and thinking["signature"]
    assert said == {"type": "text", "text": "Fox."}
    assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": "é", "b": [1]})] * 2
    ids = {call["id"] for call in calls}
    assert len(ids) == 2 and all(one.startswith("toolu_") for one in ids)
    assert whole["stop_reason"] == "tool_use"
    thoughts = whole["usage"]["output_tokens_details"]["thinking_tokens"]
    assert server.tokenizer.decode(server.engine.ids[:thoughts]) == "Hm.\n</think>"
    events = stream(server.http, HELLO, tools=[TOOL], max_tokens=999)
    assert without_names(put_together(events)) == without_names(whole)


def test_thoughts_can_be_kept_from_the_client(serve: Any) -> None:
    server = serve(templates.QWEN3_5, "Hm.\n</think>\n\nFox.")
    hidden = {"type": "adaptive", "display": "omitted"}
    whole = ask(server.http, HELLO, thinking=hidden)
    thinking, said = whole["content"]
    assert (thinking["thinking"], said["text"]) == ("", "Fox.") and thinking["signature"]
    events = stream(server.http, HELLO, thinking=hidden)
    assert "thinking_delta" not in json.dumps(events)
    assert without_names(put_together(events)) == without_names(whole)


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_the_templates_enable_thinking(
    serve: Any, thinking: dict[str, Any], thinks: bool
) -> None:
    server = serve(templates.QWEN3, "Fox.")
    ask(server.http, HELLO, thinking=thinking)
    budget = server.engine.added[-1].params.thinking_token_budget
    assert (None if budget is None else budget.tokens) == thinking.get("budget_tokens")
    prompt = server.tokenizer.decode(server.prompt, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\n" if thinks else "</think>\n\n")


def test_the_stop_sequence_that_ended_an_answer_is_named(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    said = ask(http, user(LETTERS), max_tokens=12)["content"][0]["text"]
    stop = said[4:6]
    wanted = {"max_tokens": 12, "stop_sequences": ["never this", stop]}
    whole = ask(http, user(LETTERS), **wanted)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == said[: said.index(stop)]
    events = stream(http, user(LETTERS), **wanted)
    assert without_names(put_together(events)) == without_names(whole)


def test_an_answer_that_ends_by_itself_says_so(serve: Any) -> None:
    server = serve(templates.QWEN3, "Fox.")
    assert ask(server.http, HELLO)["stop_reason"] == "end_turn"


def test_what_does_not_fit_is_cut_and_said(http: FlaskClient, engine: FakeEngine) -> None:
    engine.eos_token_ids = ()
    answer = ask(http, HELLO, max_tokens=32_000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    used = answer["usage"]
    assert used["input_tokens"] + used["output_tokens"] == engine.max_seq_length
    room = used["output_tokens"]
    assert ask(http, HELLO, max_tokens=room)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("streamed", [False, True])
def test_no_tokens_at_all_only_fill_the_cache(http: FlaskClient, streamed: bool) -> None:
    long = user(LETTERS)
    if streamed:
        answer = put_together(stream(http, long, max_tokens=0))
    else:
        answer = ask(http, long, max_tokens=0)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert answer["usage"]["output_tokens"] == 0
    assert ask(http, long)["usage"]["cache_read_input_tokens"] > 0


def test_an_aborted_answer_can_be_gone_on_with(http: FlaskClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    body = {"messages": [HELLO], "max_tokens": 99, "temperature": 0, "stream": True}
    pieces = http.post(MESSAGES, json=body, buffered=False).iter_encoded()
    start = read_event(next(iter(pieces)).decode().split("\n\n")[0])
    aborted = http.post("/abort", json={"request_id": start["message"]["id"]})
    assert aborted.get_json() == {"aborted": 1}
    rest = b"".join(pieces).decode().split("\n\n")[:-1]
    assert read_event(rest[-2])["delta"]["stop_reason"] == "pause_turn"


def test_fields_reach_the_engine(http: FlaskClient, engine: FakeEngine) -> None:
    more = {"top_k": 5, "top_p": 0.5, "min_p": 0.25, "seed": 7, "repetition_penalty": 1.5}
    ask(http, HELLO, temperature=0.5, priority=-1, cache_salt="mine", **more)
    added = engine.added[-1]
    assert {name: getattr(added.params, name) for name in more} == more
    assert (added.params.temperature, added.params.max_tokens) == (0.5, 64)
    assert (added.priority, added.cache_salt) == (-1, "mine")


def test_the_operators_sampling_holds_where_nothing_is_asked_for(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions, engine: FakeEngine
) -> None:
    defaults = (("temperature", 0.25), ("top_k", 3), ("min_p", 0.5), ("max_tokens", 5))
    serving = Serving(running.engines, tokenizer, replace(options, sampling_defaults=defaults))
    http = create_app(serving).test_client()
    assert http.post(MESSAGES, json={"messages": [HELLO], "max_tokens": 3}).status_code == 200
    params = engine.added[-1].params
    assert (params.temperature, params.top_k, params.min_p) == (0.25, 3, 0.5)
    assert params.max_tokens == Unasked(3)


def test_cached_tokens_may_be_kept_to_the_server(serving: Serving) -> None:
    options = replace(serving.options, report_cached_tokens=False)
    app = create_app(Serving(serving.client, serving.tokenizer, options, serving.answers))
    for _ in range(2):
        usage = ask(app.test_client(), user([text(LETTERS, mark=True)]))["usage"]
        assert usage.keys() == {"input_tokens", "output_tokens"}


# Errors.


def refused(answer: Any, status: int, kind: str) -> str:
    """The message of an error in Anthropic's form."""
    assert answer.status_code == status, answer.data
    body = answer.get_json()
    assert body["type"] == "error" and set(body["error"]) <= {"type", "message", "details"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_errors_have_anthropics_shape(http: FlaskClient, path: str) -> None:
    body = {"messages": [HELLO], "max_tokens": 4}
    other = {**body, "model": "claude-of-another"}
    assert "not served here" in refused(http.post(path, json=other), 404, "not_found_error")
    long = {**body, "messages": [user("a b " * 200)]}
    if path == MESSAGES:
        told = refused(http.post(path, json=long), 400, "invalid_request_error")
        assert told.startswith("prompt is too long: messages has")
    text_of_it = http.post(path, data="{", content_type="text/plain")
    refused(text_of_it, 415, "invalid_request_error")
    no_json = http.post(path, data="{", content_type="application/json")
    assert "not valid JSON" in refused(no_json, 400, "invalid_request_error")
    elsewhere = http.post(path, json=body, headers={"Origin": "http://other.example"})
    refused(elsewhere, 403, "permission_error")
    http.application.config["MAX_CONTENT_LENGTH"] = 10
    refused(http.post(path, json=body), 413, "request_too_large")


def test_a_full_queue_is_an_overloaded_server(http: FlaskClient, engine: FakeEngine) -> None:
    engine.num_waiting = MAX_QUEUE
    answer = http.post(MESSAGES, json={"messages": [HELLO], "max_tokens": 4})
    refused(answer, 529, "overloaded_error")
    assert answer.headers["Retry-After"] == "1"


def test_an_engine_that_is_gone_is_said(http: FlaskClient, running: RunningLoop) -> None:
    running.die()
    wait_until(lambda: http.get("/health").status_code == 503)
    answer = http.post(MESSAGES, json={"messages": [HELLO], "max_tokens": 4})
    refused(answer, 503, "api_error")
    assert answer.headers["Retry-After"] == "1"


def test_a_request_whose_time_is_over_is_given_up(http: FlaskClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.05
    body = {"messages": [HELLO], "max_tokens": 100, "timeout": 0.2}
    refused(http.post(MESSAGES, json=body), 504, "timeout_error")


def test_a_stream_that_fails_ends_with_an_error(http: FlaskClient, engine: FakeEngine) -> None:
    engine.step_seconds = 0.05
    body = {"messages": [HELLO], "max_tokens": 100, "timeout": 0.3, "stream": True}
    answer = http.post(MESSAGES, json={**body, "temperature": 0})
    *_, last, end = answer.get_data(as_text=True).split("\n\n")
    assert end == ""
    event = read_event(last)
    assert event["error"]["type"] == "timeout_error"
    assert event["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
def test_keys_come_in_either_header(serving: Serving, header: str) -> None:
    options = replace(serving.options, api_keys=(ApiKey("secret", "alice"),))
    app = create_app(Serving(serving.client, serving.tokenizer, options, serving.answers))
    http = app.test_client()
    body = {"messages": [HELLO], "max_tokens": 4}

    def post(path: str, key: str) -> Any:
        value = f"Bearer {key}" if header == "Authorization" else key
        return http.post(path, json=body, headers={header: value})

    for path in (MESSAGES, COUNT, "/v1/chat/completions"):
        assert post(path, "secret").status_code == 200
    for path in (MESSAGES, COUNT):
        refused(post(path, "guess"), 401, "authentication_error")
        refused(http.post(path, json=body), 401, "authentication_error")
    # A wrong token beside the right key, as some gateways send it.
    both = {"Authorization": "Bearer of-another-server", "x-api-key": "secret"}
    assert http.post(MESSAGES, json=body, headers=both).status_code == 200


# Streams that break off.


def test_cutting_a_stream_at_any_byte_frees_its_request(
    http: FlaskClient, serving: Serving, engine: FakeEngine
) -> None:
    """As gunicorn has it: the generator is closed wherever it stands."""
    body = {"messages": [HELLO], "max_tokens": 60, "temperature": 0, "stream": True}
    whole = http.post(MESSAGES, json=body).data
    pieces = whole.count(b"event: ")
    engine.step_seconds = 0.002
    for taken in (0, 1, 2, 3, 7, pieces // 2):
        response = http.post(MESSAGES, json=body, buffered=False)
        stream = iter(response.iter_encoded())
        for _ in range(taken):
            next(stream, None)  # on a busy machine events come together, in fewer pieces
        response.close()
        wait_until(lambda: not engine.has_work())
    for _ in range(serving.options.connections_a_worker):
        serving.take_place()  # raises when one is still taken


def test_models_have_what_anthropics_clients_look_for(http: FlaskClient) -> None:
    models = http.get("/v1/models").get_json()
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "fake", "fake")
    (model,) = models["data"]
    assert model == http.get("/v1/models/fake").get_json()
    assert (model["type"], model["display_name"]) == ("model", "fake")


def test_an_answer_that_comes_back_is_what_was_generated(serve: Any) -> None:
    for said in (f"Fox.\n{CALL}", "Fox."):
        server = serve(templates.QWEN3, said)
        answer = ask(server.http, HELLO, tools=[TOOL], max_tokens=999)
        before = len(server.prompt)
        result = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        follows = user([*result, text("And then?")])
        ask(server.http, HELLO, assistant(answer["content"]), follows, tools=[TOOL])
        ids = server.engine.ids
        assert server.prompt[before : before + len(ids)] == ids
