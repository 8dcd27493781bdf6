"""The ids of requests, and the lines that are logged when they have ended."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from flask import Flask, g
from flask.testing import FlaskClient

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.log_format import ACCESS_LOG, JsonFormatter, TextFormatter, log_fields
from megatron_hybrid.server.options import ServerOptions
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import QUEUE_SECONDS
from tests.server.running import wait_until

COMPLETION = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "abcdefgh",
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}
LONG = {**BODY, "max_tokens": 100, "stream": True}
PROXY = "10.0.0.1"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, ACCESS_LOG)
    return caplog


def entries(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in log.records if record.name == ACCESS_LOG]


def send(http: FlaskClient, body: Any, **changes: Any) -> Any:
    answer = http.post(COMPLETION, json=body, **changes)
    answer.get_data()
    answer.close()
    return answer


@pytest.mark.parametrize("given", ["a", 'chat 17: "it\'s" {me}', "x" * 128, "!~"])
def test_a_client_may_name_its_request(http: FlaskClient, given: str) -> None:
    answer = http.get("/v1/models", headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", " ", "x" * 129, "a\tb", "gr\xfc\xdfe", "a\x7f", " a"])
def test_a_name_that_is_none_is_replaced(http: FlaskClient, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    names = [http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(name.startswith("req-") and len(name) == 36 for name in names)
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", COMPLETION, BODY, 200),
        ("POST", COMPLETION, {**BODY, "stream": True}, 200),
        ("POST", COMPLETION, {**BODY, "max_tokens": -1}, 400),
        ("POST", COMPLETION, {**BODY, "prompt": "~"}, 500),
        ("POST", "/v1/chat/completions", {"model": "other", "messages": []}, 400),
        ("GET", COMPLETION, None, 405),
        ("GET", "/nowhere", None, 404),
        ("GET", "/", None, 200),
        ("HEAD", "/health", None, 200),
    ],
)
def test_every_answer_has_an_id_and_a_line_and_the_id_aborts_nothing(
    http: FlaskClient,
    log: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: Any,
    status: int,
) -> None:
    answer = http.open(path, method=method, json=body, headers={"X-Request-Id": "mine"})
    text = answer.get_data(as_text=True)
    answer.close()
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "mine"
    if path != "/health":
        (entry,) = entries(log)
        assert (entry["id"], entry["method"], entry["route"]) == ("mine", method, path)
        assert (entry["status"], entry["client"]) == (status, "127.0.0.1")
        assert entry["seconds"] >= 0.0
    first = text.removeprefix("data: ").split("\n")[0]
    if path == COMPLETION and status == 200:
        assert json.loads(first)["id"] not in json.dumps([*answer.headers]) + json.dumps(entry)


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_the_answers_tokens_and_times(
    http: FlaskClient, log: pytest.LogCaptureFixture, stream: bool
) -> None:
    for _ in range(2):
        send(http, {**BODY, "n": 2, "stream": stream})
    first, second = entries(log)
    for entry in (first, second):
        assert (entry["prompt_tokens"], entry["answer_tokens"]) == (8, 6)
        assert entry["queue_seconds"] == QUEUE_SECONDS
        assert 0.0 <= entry["first_token_seconds"] <= entry["seconds"]
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 4)


def test_a_stream_is_logged_when_it_has_ended(
    http: FlaskClient, running: RunningLoop, log: pytest.LogCaptureFixture
) -> None:
    running.engine.step_seconds = 0.01
    answer = http.post(COMPLETION, json={**LONG, "max_tokens": 5})
    events = answer.response
    next(iter(events))
    assert entries(log) == []
    assert b"[DONE]" in b"".join(events)
    answer.close()
    (entry,) = entries(log)
    assert (entry["status"], entry["answer_tokens"]) == (200, 5)


def test_a_stream_whose_client_has_gone_is_logged_as_499(
    http: FlaskClient, running: RunningLoop, log: pytest.LogCaptureFixture
) -> None:
    running.engine.step_seconds = 0.02
    answer = http.post(COMPLETION, json=LONG)
    next(iter(answer.response))
    answer.close()
    (entry,) = entries(log)
    assert entry["status"] == 499
    assert 1 <= entry["answer_tokens"] < 100
    assert entry["prompt_tokens"] == 8
    wait_until(lambda: not running.engine.has_work())


def test_a_stream_that_breaks_off_is_logged_with_the_status_of_the_error(
    http: FlaskClient, running: RunningLoop, log: pytest.LogCaptureFixture
) -> None:
    running.engine.step_seconds = 0.05
    assert send(http, {**LONG, "timeout": 0.3}).status_code == 200
    assert entries(log)[0]["status"] == 504


def test_looks_at_the_server_are_logged_only_if_they_fail(
    http: FlaskClient, running: RunningLoop, log: pytest.LogCaptureFixture
) -> None:
    for path in ("/health", "/metrics", "/stats"):
        assert http.get(path, buffered=True).status_code == 200
    assert entries(log) == []
    running.die()
    wait_until(lambda: http.get("/health", buffered=True).status_code == 503)
    assert {(one["route"], one["status"]) for one in entries(log)} == {("/health", 503)}
    log.set_level(logging.DEBUG, ACCESS_LOG)
    assert http.get("/metrics", buffered=True).status_code == 200
    assert entries(log)[-1]["route"] == "/metrics"


def test_a_line_has_the_keys_name_and_the_client_behind_a_trusted_proxy(
    running: RunningLoop, serving: Serving, log: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(tokenizer_folder="", model_name="fake", trusted_proxies=(PROXY,))
    app: Flask = create_app(Serving(running.engines, serving.tokenizer, options))

    @app.before_request
    def know_the_key() -> None:
        g.key_name = "alice"

    headers = {"X-Forwarded-For": "1.1.1.1, 203.0.113.7"}
    for peer in (PROXY, "10.0.0.2"):
        app.test_client().get(
            "/v1/models", headers=headers, environ_overrides={"REMOTE_ADDR": peer}
        ).close()
    assert [(one["key"], one["client"]) for one in entries(log)] == [
        ("alice", "203.0.113.7"),
        ("alice", "10.0.0.2"),
    ]


def test_a_path_is_cut_and_a_known_route_has_no_values(
    http: FlaskClient, log: pytest.LogCaptureFixture
) -> None:
    http.get("/v1/models/secret?key=secret").close()
    http.get("/" + "x" * 1000).close()
    assert [one["route"] for one in entries(log)] == [
        "/v1/models/<path:name>",
        "/" + "x" * 255,
    ]


HOSTILE = 'a\r\n2026 status=200 "b"\x1b[31m\u2028\udc80=\x85'


@pytest.mark.parametrize("formatter", [TextFormatter("%(message)s"), JsonFormatter("front end")])
def test_what_a_client_sends_stays_in_its_place(
    caplog: pytest.LogCaptureFixture, formatter: logging.Formatter
) -> None:
    caplog.set_level(logging.INFO)
    fields = {"id": HOSTILE, "route": "/v1/models/<path:name>", "status": 404, "seconds": 0.5}
    log_fields(logging.getLogger(ACCESS_LOG), logging.INFO, "request", fields)
    line = formatter.format(caplog.records[-1])
    assert line.isascii() and line.isprintable()
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line).items() >= {**fields, "message": "request"}.items()
    else:
        before, after = line.split(json.dumps(HOSTILE))
        assert before == "request id="
        assert after == " route=/v1/models/<path:name> status=404 seconds=0.5"


def test_a_failure_is_one_object(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("first line\nsecond line")
    except ValueError:
        logging.getLogger("some").exception("It %s.", "failed")
    line = JsonFormatter("engine").format(caplog.records[-1])
    assert "\n" not in line
    values = json.loads(line)
    assert (values["message"], values["level"], values["logger"]) == ("It failed.", "error", "some")
    assert (values["process"], values["time"][10]) == ("engine", "T")
    assert values["exception"].endswith("ValueError: first line\nsecond line")


def test_an_address_has_a_workers_share_of_its_connections() -> None:
    options = ServerOptions(
        tokenizer_folder="", model_name="", http_workers=3, http_connections_per_address=10
    )
    assert options.connections_an_address == 4
