"""Answers of several replicas as one, and what a client gets when a replica is gone."""

from __future__ import annotations

import json

import pytest

from megatron_hybrid.ray.failures import broken_stream, failed
from megatron_hybrid.ray.messages import Asked, Head, Whole
from megatron_hybrid.ray.routes import as_one, asks_all, has_prompt, is_control


def answer(replica: str, status: int, body: bytes = b"") -> Whole:
    return Whole(replica, status, [], body)


def test_whom_a_route_is_for() -> None:
    for route in ("/pause", "/abort", "/metrics", "/reset_prefix_cache", "/v1/responses/resp_1"):
        assert asks_all(route)
    for route in ("/abort_request", "/flush_cache"):
        assert asks_all(route) and not is_control(route)
    assert not asks_all("/v1/responses") and not asks_all("/v1/chat/completions")
    assert is_control("/pause") and not is_control("/reset_prefix_cache")
    assert has_prompt(Asked("a", "POST", "/v1/chat/completions?x=1", {}, b""))
    assert not has_prompt(Asked("a", "POST", "/tokenize", {}, b""))


def test_only_events_are_a_stream() -> None:
    assert Head(200, [("Content-Type", "text/event-stream; charset=utf-8")]).is_stream
    assert not Head(200, [("content-type", "application/json")]).is_stream
    assert not Head(204, []).is_stream


def test_of_what_one_replica_has_its_answer_counts() -> None:
    found = as_one("/v1/responses/resp_1", [answer("a", 404), answer("b", 200, b"it")])
    assert found.body == b"it"
    assert as_one("/v1/responses/resp_1", [answer("a", 404), answer("b", 404)]).status == 404


def test_what_all_are_to_do_has_failed_if_one_has() -> None:
    assert as_one("/pause", [answer("a", 200), answer("b", 503)]).status == 503
    assert as_one("/pause", [answer("a", 200), answer("b", 200)]).status == 200


def test_aborted_answers_are_added_up() -> None:
    both = [answer("a", 200, b'{"aborted":1}'), answer("b", 200, b'{"aborted":2}')]
    for route in ("/abort", "/abort_request"):
        assert json.loads(as_one(route, both).body) == {"aborted": 3}


def test_metrics_have_their_replicas_names() -> None:
    page = (
        b'# HELP up It is.\n# TYPE up gauge\nup 1.0\n# HELP x y\n# TYPE x counter\nx{le="2"} %d\n'
    )
    found = as_one("/metrics", [answer("a", 200, page % 3), answer("b", 200, page % 4)])
    assert found.body.decode().splitlines() == [
        "# HELP up It is.",
        "# TYPE up gauge",
        'up{ray_replica="a"} 1.0',
        'up{ray_replica="b"} 1.0',
        "# HELP x y",
        "# TYPE x counter",
        'x{ray_replica="a",le="2"} 3',
        'x{ray_replica="b",le="2"} 4',
    ]


def test_a_failure_before_the_answer_can_be_tried_again() -> None:
    found = failed(503, "It died.")
    assert json.loads(found.body)["error"]["type"] == "server_error"
    assert ("Retry-After", "1") in found.headers


@pytest.mark.parametrize(
    ("route", "event"),
    [
        ("/v1/chat/completions", ""),
        ("/v1/completions", ""),
        ("/v1/messages", "event: error\n"),
        ("/v1/responses", "event: error\n"),
    ],
)
def test_a_stream_ends_with_an_error_in_its_own_form(route: str, event: str) -> None:
    text = broken_stream(route, "It died.").decode()
    assert text.startswith(f"{event}data: ") and text.endswith("\n\n")
    first = text.removeprefix(event).partition("\n")[0]
    assert "It died." in str(json.loads(first.removeprefix("data: ")))
    assert text.endswith("data: [DONE]\n\n") == (not event)
