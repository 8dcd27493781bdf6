"""A request's time limit: its own, or the server's."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.running import wait_until

COMPLETION = "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "abcdefgh",
    "max_tokens": 100,
    "n": 2,
    "temperature": 0,
    "ignore_eos": True,
}


def test_a_request_that_takes_too_long_is_aborted_with_504(
    http: FlaskClient, running: RunningLoop
) -> None:
    running.engine.step_seconds = 0.05
    answer = http.post(COMPLETION, json={**LONG, "timeout": 0.2})
    assert answer.status_code == 504
    error = answer.get_json()["error"]
    assert error["code"] == "timeout"
    assert "after 0.2 seconds" in error["message"]
    wait_until(lambda: not running.engine.has_work())
    assert any(line.startswith("abort") for line in running.engine.log)


def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    http: FlaskClient, running: RunningLoop
) -> None:
    running.engine.step_seconds = 0.05
    answer = http.post(COMPLETION, json={**LONG, "timeout": 0.3, "stream": True})
    assert answer.status_code == 200
    *chunks, error, done, end = answer.get_data(as_text=True).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert chunks
    assert not any('"error"' in chunk for chunk in chunks)
    wait_until(lambda: not running.engine.has_work())


@pytest.mark.parametrize(("own", "server"), [(None, 0.2), (50, 0.2), (0.2, 50), (0.2, 0)])
def test_the_smaller_of_both_limits_holds(
    running: RunningLoop,
    tokenizer: Tokenizer,
    options: ServerOptions,
    own: float | None,
    server: float,
) -> None:
    running.engine.step_seconds = 0.05
    options = dataclasses.replace(options, request_timeout=server)
    http = create_app(Serving(running.engines, tokenizer, options)).test_client()
    answer = http.post(COMPLETION, json={**LONG, "timeout": own})
    assert answer.status_code == 504
    assert "after 0.2 seconds" in answer.get_json()["error"]["message"]
    wait_until(lambda: not running.engine.has_work())


def test_a_request_that_is_quick_enough_is_served(http: FlaskClient) -> None:
    assert http.post(COMPLETION, json={**LONG, "timeout": 60}).status_code == 200
