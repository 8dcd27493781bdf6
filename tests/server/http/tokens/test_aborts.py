"""/abort_request, /flush_cache, /health_generate, /liveness; and clients that go away."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.tokens import health
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.http.tokens.asking import GENERATE, INFER, generate_body, infer_body, sampling
from tests.server.running import wait_until

LONG = sampling(max_new_tokens=120)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def begin(http: FlaskClient, engine: FakeEngine, background: ThreadPoolExecutor) -> Any:
    """Sends a request in the background, and returns when it runs."""
    engine.step_seconds = 0.02

    def begin(path: str, body: dict[str, Any]) -> Future[Any]:
        before = len(engine._running)
        client = http.application.test_client()
        answer = background.submit(lambda: client.post(path, json=body))
        wait_until(lambda: len(engine._running) > before and engine._generated > 1)
        return answer

    return begin


Begin = Callable[[str, dict[str, Any]], Future[Any]]


def aborted(http: FlaskClient, **body: Any) -> int:
    answer = http.post("/abort_request", json=body)
    assert answer.status_code == 200, answer.data
    return int(answer.get_json()["aborted"])


def test_what_was_generated_is_answered_with_200(
    http: FlaskClient, engine: FakeEngine, begin: Begin
) -> None:
    running = begin(GENERATE, generate_body(sampling_params=LONG, rid="a", return_logprob=True))
    assert aborted(http, rid="b") == 0
    assert aborted(http, rid="a") == 1
    answer = running.result(10)
    assert answer.status_code == 200
    found = answer.get_json()
    meta = found["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["finish_reason"]["message"]
    assert 0 < len(found["output_ids"]) < 120
    assert meta["completion_tokens"] == len(found["output_ids"])
    assert [entry[1] for entry in meta["output_token_logprobs"]] == found["output_ids"]
    assert aborted(http, rid="a") == 0


def test_an_answers_id_is_as_good_as_its_name(
    http: FlaskClient, engine: FakeEngine, begin: Begin
) -> None:
    answers = [begin(GENERATE, generate_body(sampling_params=LONG)) for _ in range(2)]
    assert aborted(http, rid=engine.added[0].request_id) == 1
    found = answers[0].result(10).get_json()
    assert found["meta_info"]["id"] == engine.added[0].request_id
    assert http.post("/abort", json={"request_id": engine.added[1].request_id}).status_code == 200
    assert answers[1].result(10).get_json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_batch_has_one_name_and_each_prompt_its_own(http: FlaskClient, begin: Begin) -> None:
    body = generate_body([[5, 6], [7, 8], [9]], sampling_params=LONG, rid="batch")
    running = begin(GENERATE, body)
    assert aborted(http, rid="batch_1") == 1
    assert aborted(http, rid="batch") == 2
    found = running.result(10).get_json()
    assert [one["meta_info"]["finish_reason"]["type"] for one in found] == ["abort"] * 3
    assert len(found[1]["output_ids"]) <= len(found[0]["output_ids"])


def test_all_answers_of_all_routes_end(http: FlaskClient, begin: Begin) -> None:
    running = [
        begin(GENERATE, generate_body(sampling_params={**LONG, "n": 2})),
        begin(INFER, infer_body(max_tokens=120)),
        begin("/v1/completions", {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}),
    ]
    assert aborted(http, abort_all=True) == 4
    reasons = []
    for answer in running:
        assert answer.result(10).status_code == 200
        found = answer.result(10).get_json()
        choices = found if isinstance(found, list) else found["choices"]
        reasons += [
            one.get("finish_reason") or one["meta_info"]["finish_reason"] for one in choices
        ]
    assert [one if isinstance(one, str) else one["type"] for one in reasons] == ["abort"] * 4
    assert aborted(http, abort_all=True, rid="x", abort_message="why", finished_reason={}) == 0


def test_those_of_every_replica_end_and_its_cache_is_flushed(
    running: RunningLoop,
    tokenizer: Tokenizer,
    options: ServerOptions,
    background: ThreadPoolExecutor,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    other = RunningLoop(
        FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids), tmp_path_factory.mktemp("s")
    )
    both = ReplicaSet([running.endpoint, other.endpoint])
    both.join("http://nowhere")
    wait_until(lambda: all(client.ready for client in both.clients))
    http = create_app(Serving(both, tokenizer, options)).test_client()
    answers = []
    for loop in (running, other):
        loop.engine.step_seconds = 0.02
        loop.engine._cached.add(("", (5,)))
        alone = create_app(loop.serve(tokenizer, options)).test_client()
        body = generate_body(sampling_params=LONG)
        answers.append(background.submit(alone.post, GENERATE, json=body))
        wait_until(lambda loop=loop: loop.engine._generated > 1)  # type: ignore[misc]
    refused = http.get("/flush_cache")
    assert refused.status_code == 400 and all(one.engine._cached for one in (running, other))
    assert aborted(http, abort_all=True) == 2
    for answer in answers:
        assert answer.result(10).get_json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert http.get("/flush_cache").status_code == 200
    assert not running.engine._cached and not other.engine._cached
    # Until both have new weights, these are not the server's.
    assert alone.post("/update_weights", json={"path": "b"}).status_code == 200
    wait_until(lambda: {one.epoch for one in both.fingerprints().values()} == {0, 1})
    assert http.get("/weight_version").get_json() == {"weight_version": "0"}
    both.close()
    other.close()


def test_a_stream_ends_with_what_there_is(http: FlaskClient, begin: Begin) -> None:
    running = begin(INFER, {**infer_body(max_tokens=120), "stream": True})
    wait_until(lambda: aborted(http, abort_all=True) == 1)
    text = running.result(10).get_data(as_text=True)
    assert '"finish_reason":"abort"' in text and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", [GENERATE, INFER])
def test_an_engine_that_fails_is_no_end_of_an_answer(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer, begin: Begin, path: str
) -> None:
    def body(*ids: int, stream: bool) -> dict[str, Any]:
        if path == INFER:
            return {**infer_body(list(ids), max_tokens=50), "stream": stream}
        return generate_body(list(ids), sampling_params=LONG, stream=stream)

    running = begin(path, body(5, 6, stream=True))
    engine._fail_on = 6
    text = running.result(10).get_data(as_text=True)
    *_, error, done, end = text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
    assert (done, end) == ("data: [DONE]", "")
    for stream in (False, True):  # at once: it has a status
        # Two failed steps in a row end an engine.
        assert http.post(GENERATE, json=generate_body([5])).status_code == 200
        answer = http.post(path, json=body(6, stream=stream))
        assert answer.status_code == 500
        assert answer.get_json()["error"]["code"] == "engine_error"


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": 5}, {"abort_all": "yes"}, {"other": 1}])
def test_an_abort_says_what_of(http: FlaskClient, body: dict[str, Any]) -> None:
    assert http.post("/abort_request", json=body).status_code == 400


def test_a_client_that_goes_away_ends_its_request(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.step_seconds = 0.02
    for path, body in (
        (GENERATE, generate_body([[5, 6], [7]], sampling_params=LONG)),
        (INFER, infer_body(max_tokens=120)),
    ):
        ours, theirs = socket.socketpair()
        theirs.close()
        environ = {"gunicorn.socket": ours}
        answer = http.post(path, json=body, environ_overrides=environ)
        assert answer.status_code == 499
        ours.close()
        wait_until(lambda: not engine._running)
    assert sum(line.startswith("abort") for line in engine.log) == 3


def test_the_cache_is_flushed_unless_requests_run(
    http: FlaskClient, engine: FakeEngine, begin: Begin
) -> None:
    engine._cached.add(("", (5,)))
    assert http.get("/flush_cache").status_code == 200
    assert not engine._cached
    running = begin(GENERATE, generate_body(sampling_params=LONG))
    engine._cached.add(("", (5,)))
    for refused in (http.get("/flush_cache"), http.post("/flush_cache")):
        assert refused.status_code == 400
        assert "1 requests run or wait" in refused.get_json()["error"]["message"]
    assert engine._cached
    aborted(http, abort_all=True)
    running.result(10)
    answer = http.post("/flush_cache")
    assert (answer.status_code, answer.mimetype) == (200, "text/plain") and not engine._cached


def test_no_page_of_another_site_flushes_the_cache(http: FlaskClient) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert http.get("/flush_cache", headers={"Sec-Fetch-Site": site}).status_code == status


def test_control_needs_the_admins_key_and_a_server_that_has_it(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions
) -> None:
    keys = (ApiKey("user", "user"), ApiKey("boss", "boss", admin=True))
    http = create_app(running.serve(tokenizer, options.replace(api_keys=keys))).test_client()

    def status(method: str, path: str, key: str, body: Any = None) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return int(http.open(path, method=method, headers=headers, json=body).status_code)

    for method, path, body in (
        ("GET", "/flush_cache", None),
        ("POST", "/flush_cache", {}),
        ("POST", "/abort_request", {"abort_all": True}),
    ):
        assert status(method, path, "user", body) == 403
        assert status(method, path, "boss", body) == 200
    assert status("POST", "/abort_request", "user", {"rid": "a"}) == 200
    assert status("GET", "/health_generate", "user") == 200
    far = dataclasses.replace(options, host="0.0.0.0")
    http = create_app(running.serve(tokenizer, far)).test_client()
    assert http.post("/abort_request", json={"abort_all": True}).status_code == 403
    assert http.post("/abort_request", json={"rid": "a"}).status_code == 200


def test_health_is_that_a_token_comes(
    http: FlaskClient, engine: FakeEngine, running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in (http.get("/health_generate"), http.post("/health_generate")):
        assert (answer.status_code, answer.get_json()) == (200, {"status": "ok"})
    assert [added.prompt for added in engine.added] == [[0], [0]]
    assert http.get("/liveness").get_json() == {"status": "ok"}
    http.post("/pause")
    wait_until(lambda: running.engines.state == "paused")
    assert http.get("/health_generate").status_code == 200, "it is paused, not ill"
    http.post("/resume")
    wait_until(lambda: running.engines.state == "ok")
    # Nothing comes any more: the loop lives, the engine does not.
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.01) or [])
    monkeypatch.setattr(health, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(health, "_WANTED", dataclasses.replace(health._WANTED, timeout=0.2))
    assert http.get("/health_generate").status_code == 503
    assert http.get("/liveness").status_code == 200


def test_an_engine_that_is_busy_with_others_is_well(
    http: FlaskClient, engine: FakeEngine, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = begin(GENERATE, generate_body(sampling_params=LONG))
    engine.num_waiting = 10**6  # ours is refused
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.05)
    assert http.get("/health_generate").status_code == 200
    aborted(http, abort_all=True)
    running.result(10)


def test_without_an_engine_nothing_is_well(http: FlaskClient, running: RunningLoop) -> None:
    running.die()
    wait_until(lambda: running.client.state == "down")
    for path in ("/health_generate", "/liveness", "/get_weight_version", "/flush_cache"):
        assert http.get(path).status_code == 503
    assert http.get("/model_info").get_json()["weight_version"] is None
