"""What is known of a request for answers when it has ended, for its trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.tracing import OPERATIONS
from megatron_hybrid.server.link.traces import RequestTrace
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import PREFILL_SECONDS, QUEUE_SECONDS

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "sesame"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def traces() -> list[RequestTrace]:
    return []


def post(http: FlaskClient, path: str, body: dict[str, Any], **headers: str) -> TestResponse:
    """The answer, of which all was sent."""
    answer = http.post(path, json=body, headers=headers)
    assert answer.data
    answer.close()
    return answer


@pytest.fixture
def http(serving: Serving, traces: list[RequestTrace]) -> FlaskClient:
    return create_app(serving, send_trace=traces.append).test_client()


def test_a_chat_has_its_parent_its_settings_its_tokens_and_its_times(
    http: FlaskClient, traces: list[RequestTrace]
) -> None:
    asked = {"temperature": 0, "seed": 5, "top_p": 0.5, "model": "fake"}
    headers = {"traceparent": PARENT, "tracestate": "a=b", "x-request-id": "mine"}
    for _ in range(2):  # the second time some of the prompt is cached
        answer = post(http, "/v1/chat/completions", {**CHAT, **asked}, **headers)
    _, trace = traces
    usage = answer.get_json()["usage"]
    assert trace.name == "chat fake" and trace.status == 200
    assert trace.parent == {"traceparent": PARENT, "tracestate": "a=b"}
    assert (
        trace.attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.id": "mine",
            "gen_ai.request.model": "fake",
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.seed": 5,
            "gen_ai.request.top_p": 0.5,
            "gen_ai.request.max_tokens": 12,
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.stream": False,
            "gen_ai.response.model": "fake",
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": 12,
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.latency.e2e": trace.seconds,
            "gen_ai.latency.time_in_queue": QUEUE_SECONDS,
            "gen_ai.latency.time_to_first_token": QUEUE_SECONDS + PREFILL_SECONDS,
            "gen_ai.latency.time_in_model_prefill": PREFILL_SECONDS,
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
        }.items()
    )
    assert usage["prompt_tokens_details"]["cached_tokens"]
    assert trace.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert "error.type" not in trace.attributes
    (one,) = trace.answers
    assert (one.begun, one.first_token) == (QUEUE_SECONDS, QUEUE_SECONDS + PREFILL_SECONDS)
    assert one.ended is not None and 0 < one.ended <= trace.seconds
    assert trace.submitted is not None and 0 < trace.submitted < one.ended
    text = answer.get_json()["choices"][0]["message"]["content"]
    told = msgspec.json.encode(trace).decode()
    assert SECRET not in told and len(text) > 4 and text not in told
    assert answer.get_json()["id"] not in told


def test_every_answer_of_a_stream_is_told_of_when_it_was_sent(
    http: FlaskClient, traces: list[RequestTrace]
) -> None:
    body = {"prompt": ["one", "three"], "n": 2, "max_tokens": 2, "stream": True}
    post(http, "/v1/completions", body)
    (trace,) = traces
    assert trace.name == "text_completion fake" and trace.attributes["gen_ai.request.stream"]
    assert [one.finish_reason for one in trace.answers] == ["length"] * 4
    assert [one.tokens for one in trace.answers] == [2] * 4
    assert trace.attributes["gen_ai.usage.output_tokens"] == 8
    assert trace.parent == {}


def test_an_answer_that_a_stop_string_ends_has_its_times(
    http: FlaskClient, traces: list[RequestTrace]
) -> None:
    body = {"prompt": "abcabc", "stop": ["b", SECRET], "max_tokens": 5, "temperature": 0}
    post(http, "/v1/completions", body)
    (trace,) = traces
    assert trace.answers[0].finish_reason == "stop"
    assert SECRET not in msgspec.json.encode(trace).decode()
    assert trace.answers[0].first_token == QUEUE_SECONDS + PREFILL_SECONDS


@pytest.mark.parametrize(
    ("body", "status", "name"),
    [
        ({**CHAT, "temperature": -1}, 400, "chat"),
        ({**CHAT, "model": "other"}, 404, "chat"),
        ({"messages": [{"role": "user", "content": "~"}]}, 500, "chat fake"),
    ],
)
def test_a_request_that_fails_is_traced_too(
    http: FlaskClient, traces: list[RequestTrace], body: dict[str, object], status: int, name: str
) -> None:
    assert post(http, "/v1/chat/completions", body).status_code == status
    (trace,) = traces
    assert (trace.name, trace.status) == (name, status)
    assert trace.attributes["error.type"] == str(status)


def test_a_stream_that_breaks_off_has_the_status_that_fits(
    http: FlaskClient, running: RunningLoop, traces: list[RequestTrace]
) -> None:
    running.engine.step_seconds = 0.05
    body = {"prompt": "abc", "max_tokens": 100, "stream": True, "timeout": 0.3}
    assert post(http, "/v1/completions", body).status_code == 200
    (trace,) = traces
    assert trace.status == 504 and trace.attributes["error.type"] == "504"
    (one,) = trace.answers
    assert one.first_token and one.tokens and one.ended is None and one.finish_reason is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "one two", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}),
    ],
)
def test_every_interface_is_traced(
    http: FlaskClient, traces: list[RequestTrace], path: str, fields: dict[str, Any]
) -> None:
    assert post(http, path, {"model": "fake", **fields}).status_code == 200
    (trace,) = traces
    assert trace.name == "chat fake" and trace.attributes["http.route"] == path
    assert [one.tokens for one in trace.answers] == [2]


def test_a_route_that_answers_is_traced_or_is_known_not_to_be(http: FlaskClient) -> None:
    posts = {
        rule.rule
        for rule in http.application.url_map.iter_rules()
        if rule.rule.startswith("/v1/") and "POST" in (rule.methods or ())
    }
    answered = {path for path in posts - OPERATIONS.keys() if not path.endswith("/render")}
    adapters = {f"/v1/{verb}_lora_adapter" for verb in ("load", "unload")}
    assert answered == {"/v1/messages/count_tokens", "/v1/responses/<name>/cancel", *adapters}


def test_other_requests_are_not_traced(http: FlaskClient, traces: list[RequestTrace]) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nowhere", "/v1/chat/completions"):
        http.get(path).close()
    post(http, "/tokenize", {"prompt": "a"})
    assert not traces
