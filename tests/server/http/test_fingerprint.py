"""Every interface's answers say what has computed them, streamed or not, and new weights show."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.engine.fingerprint import Fingerprint
from megatron_hybrid.server.http.streaming import FINGERPRINT
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.weight_transfer.requests import FromFolder
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
}
OPENAI = list(BODIES)[:2]


def chunks(data: bytes) -> list[dict[str, Any]]:
    *events, done = [line for line in data.decode().split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_header_of_every_answer_has_it(
    path: str, stream: bool, http: FlaskClient, engine: FakeEngine
) -> None:
    answer = http.post(path, json={**BODIES[path], "stream": stream})
    assert answer.status_code == 200, answer.data
    assert answer.headers[FINGERPRINT] == engine.weights.fingerprint.short


@pytest.mark.parametrize("path", OPENAI)
def test_openais_answers_have_it_as_a_field(
    path: str, http: FlaskClient, engine: FakeEngine
) -> None:
    whole = http.post(path, json={**BODIES[path], "n": 2}).get_json()
    assert whole["system_fingerprint"] == engine.weights.fingerprint.short


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": True, "n": 2},
        {"return_token_ids": True},
    ],
)
@pytest.mark.parametrize("path", OPENAI)
def test_every_chunk_of_a_stream_has_it(
    path: str, more: dict[str, Any], http: FlaskClient, engine: FakeEngine
) -> None:
    if path == "/v1/completions" and "logprobs" in more:
        more = {**more, "logprobs": 2}
    answer = http.post(path, json={**BODIES[path], **more, "stream": True})
    found = chunks(answer.data)
    assert found
    assert {one["system_fingerprint"] for one in found} == {engine.weights.fingerprint.short}


def test_the_real_engines_is_in_its_answers(reference_http: FlaskClient) -> None:
    info = reference_http.get("/server_info").get_json()
    name = info["system_fingerprint"]
    assert set(info["fingerprint"]) == {"device", "versions", "mode", "model"}
    assert Fingerprint(info["fingerprint"]).short == name, "the parts are all that it is made of"
    for path, body in BODIES.items():
        assert reference_http.post(path, json=body).headers[FINGERPRINT] == name


def test_server_info_has_its_parts_also_of_new_weights(
    http: FlaskClient, engine: FakeEngine
) -> None:
    for weights in ("first", "b"):
        info = http.get("/server_info").get_json()
        assert info["fingerprint"] == {"model": {"weights": weights}}
        assert info["system_fingerprint"] == engine.weights.fingerprint.short
        assert "engines" not in info
        assert http.post("/update_weights", json={"path": "b"}).status_code == 200


def test_answers_that_begin_after_an_update_have_the_new_one(
    http: FlaskClient, engine: FakeEngine
) -> None:
    """And those that had begun, and were kept, the old one to their end."""

    def send(path: str, body: dict[str, Any]) -> Any:
        return http.application.test_client().post(path, json=body)

    engine.step_seconds, old = 0.02, engine.weights.fingerprint.short
    long = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(4) as background:
        before = [
            background.submit(send, "/v1/completions", {**long, "stream": stream})
            for stream in (False, True)
        ]
        wait_until(lambda: len(engine.added) == 2 and engine._generated > 4)
        assert send("/pause", {"mode": "keep"}).status_code == 200
        waits = background.submit(send, "/v1/completions", {**long, "max_tokens": 2})
        wait_until(lambda: len(engine.added) == 3)
        assert send("/update_weights", {"path": "b"}).status_code == 200
        new = engine.weights.fingerprint.short
        assert new != old and send("/resume", {}).status_code == 200
        assert waits.result(20).get_json()["system_fingerprint"] == new
        whole, streamed = (one.result(20) for one in before)
    assert whole.get_json()["system_fingerprint"] == old
    assert {one["system_fingerprint"] for one in chunks(streamed.data)} == {old}
    assert send("/v1/completions", long).get_json()["system_fingerprint"] == new


def test_a_refused_update_leaves_it(http: FlaskClient, engine: FakeEngine) -> None:
    old = engine.weights.fingerprint.short
    assert http.post("/update_weights", json={"path": "wrong"}).status_code == 400
    assert http.get("/server_info").get_json()["system_fingerprint"] == old


def test_every_front_end_hears_of_new_weights(running: RunningLoop, engine: FakeEngine) -> None:
    other = running.connect()
    try:
        running.engines.ask(wire.UpdateWeights, FromFolder("b"), "", timeout=10)
        assert running.client.fingerprint is not None
        assert running.client.fingerprint.short == engine.weights.fingerprint.short
        wait_until(lambda: other.fingerprints()["0"].short == engine.weights.fingerprint.short)
    finally:
        other.close()


def test_replicas_that_differ_have_none_in_common(
    http: FlaskClient, running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = wire.Fingerprint("fp_1", {"mode": {}}), wire.Fingerprint("fp_2", {"mode": {}})
    for second, common in ((one, "fp_1"), (other, None)):
        each = {"0": one, "1": second}
        monkeypatch.setattr(running.engines, "fingerprints", lambda each=each: each)
        info = http.get("/server_info").get_json()
        assert info["system_fingerprint"] == common
        names = [one["system_fingerprint"] for one in info["engines"].values()]
        assert names == ["fp_1", second.short]
