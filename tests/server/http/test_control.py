"""POST /pause, /resume and /update_weights: when they answer, and what streams see of them."""

from __future__ import annotations

import dataclasses
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.options import ServerOptions
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import ServerProcess, wait_until
from tests.thorough import thorough
from tests.tiny_models import make_tiny_model

Post = Callable[..., tuple[int, Any]]


@pytest.fixture
def post(http: FlaskClient) -> Post:
    def send(path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        answer = http.application.test_client().post(path, json=body)
        return answer.status_code, answer.get_json()

    return send


@pytest.fixture
def background() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def completion(max_tokens: int = 20) -> dict[str, Any]:
    return {"prompt": [5, 6, 7, 8], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def done(epoch: int) -> dict[str, Any]:
    return {"status": "ok", "epoch": epoch, "weight_version": str(epoch)}


def begin(
    background: ThreadPoolExecutor, engine: FakeEngine, post: Post, max_tokens: int
) -> Future[tuple[int, Any]]:
    """A request that runs."""
    before = engine._generated
    answer = background.submit(post, "/v1/completions", completion(max_tokens))
    wait_until(lambda: engine._generated > before)
    return answer


def reason(answer: Future[tuple[int, Any]]) -> str:
    status, body = answer.result(10)
    assert status == 200, body
    return str(body["choices"][0]["finish_reason"])


def test_pause_answers_when_what_runs_has_ended(
    engine: FakeEngine, post: Post, background: ThreadPoolExecutor
):
    engine.step_seconds = 0.01
    running = begin(background, engine, post, 60)
    pausing = background.submit(post, "/pause", {})
    wait_until(lambda: engine.is_paused)
    late = background.submit(post, "/v1/completions", completion(3))
    assert not pausing.done(), "what runs goes on"
    assert post("/tokenize", {"prompt": "a"})[0] == 200
    assert pausing.result(10) == (200, done(0))
    assert reason(running) == "length"
    wait_until(lambda: len(engine.added) == 2)
    assert not late.done() and not engine.has_work(), "a paused engine computes nothing"
    assert post("/pause", {"mode": "finish"}) == (
        200,
        done(0),
    )
    assert post("/resume") == (200, done(0))
    assert reason(late) == "length"
    assert post("/resume", {}) == (200, done(0))


def test_abort_ends_and_keep_freezes_what_runs(
    engine: FakeEngine, post: Post, background: ThreadPoolExecutor
):
    engine.step_seconds = 0.01
    aborted = begin(background, engine, post, 120)
    assert post("/pause", {"mode": "abort"})[0] == 200
    assert reason(aborted) == "abort"
    post("/resume", {})
    kept = begin(background, engine, post, 30)
    assert post("/pause", {"mode": "keep"})[0] == 200
    generated = engine._generated
    assert post("/update_weights", {"path": "b"}) == (
        200,
        done(1),
    )
    assert engine.is_paused and not kept.done() and engine._generated == generated
    assert post("/resume", {})[0] == 200
    assert reason(kept) == "length"


def test_weights_change_when_what_runs_has_ended_and_the_engine_goes_on(
    engine: FakeEngine, post: Post, background: ThreadPoolExecutor
):
    engine.step_seconds = 0.01
    running = begin(background, engine, post, 60)
    updating = background.submit(post, "/update_weights", {"path": "b"})
    wait_until(lambda: engine.is_paused)
    status, body = post("/update_weights", {"path": "c"})
    assert status == 409 and "b are being waited for" in body["error"]["message"]
    status, body = post("/resume", {})
    assert status == 409 and body["error"]["type"] == "invalid_request_error"
    assert updating.result(10) == (200, done(1))
    assert reason(running) == "length"
    assert [line for line in engine.log if "update" in line] == ["update b"]
    assert not engine.is_paused
    assert post("/v1/completions", completion(3))[0] == 200


def test_a_pause_that_comes_during_an_update_holds_after_it(
    engine: FakeEngine, post: Post, background: ThreadPoolExecutor
):
    engine.step_seconds = 0.01
    begin(background, engine, post, 60)
    updating = background.submit(post, "/update_weights", {"path": "b"})
    wait_until(lambda: engine.is_paused)
    assert post("/pause", {"mode": "abort"})[0] == 200
    assert updating.result(10)[0] == 200 and engine.is_paused


def test_resuming_ends_a_pause_that_waits(
    engine: FakeEngine, post: Post, background: ThreadPoolExecutor
):
    engine.step_seconds = 0.01
    running = begin(background, engine, post, 100)
    pausing = background.submit(post, "/pause")
    wait_until(lambda: engine.is_paused)
    assert post("/resume", {})[0] == 200
    status, body = pausing.result(10)
    assert status == 409 and "resumed before" in body["error"]["message"]
    assert reason(running) == "length"


def test_weights_that_do_not_fit_are_refused_by_field_and_the_engine_goes_on(
    engine: FakeEngine, post: Post
):
    status, body = post("/update_weights", {"path": "wrong"})
    assert status == 400 and body["error"]["param"] == "path"
    assert body["error"]["message"] == "Weight 'x' is missing in wrong."
    assert not engine.is_paused and engine.epoch == 0
    status, body = post("/update_weights", {"path": "half"})
    assert status == 500 and "only in part" in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/pause", {"mode": "later"}, "mode"),
        ("/pause", {"mode": 3}, "mode"),
        ("/pause", {"x": 1}, "x"),
        ("/resume", {"mode": "keep"}, "mode"),
        ("/update_weights", {}, "path"),
        ("/update_weights", {"path": 3}, "path"),
        ("/update_weights", {"path": "b", "mode": ""}, "mode"),
        ("/update_weights", {"path": "b", "model": "x"}, "model"),
    ],
)
def test_wrong_fields_are_named_and_nothing_happens(
    path: str, body: dict[str, Any], field: str, engine: FakeEngine, post: Post
):
    status, answer = post(path, body)
    assert status == 400 and answer["error"]["param"] == field
    assert not engine.is_paused and not any("update" in line for line in engine.log)


@pytest.mark.parametrize(
    ("host", "enabled", "status"),
    [
        ("127.0.0.1", False, 200),
        ("::1", False, 200),
        ("localhost", False, 200),
        ("0.0.0.0", False, 403),
        ("10.0.0.7", False, 403),
        ("example.org", False, 403),
        ("0.0.0.0", True, 200),
    ],
)
def test_a_server_that_others_can_reach_has_these_routes_only_on_request(
    host: str, enabled: bool, status: int, serving: Serving, options: ServerOptions
):
    serving.options = dataclasses.replace(options, host=host, enable_control_routes=enabled)
    client = create_app(serving).test_client()
    for path in ("/pause", "/resume", "/update_weights"):
        answer = client.post(path, json={"path": "b"} if path == "/update_weights" else {})
        assert answer.status_code == status, path
        if status == 403:
            assert "--enable-control-routes" in answer.get_json()["error"]["message"]


def test_two_front_ends_wait_for_the_same_pause(running: RunningLoop, engine: FakeEngine):
    from megatron_hybrid.server.link import messages as wire

    other = running.connect()
    try:
        results = []
        threads = [
            threading.Thread(
                target=lambda client=client: results.append(  # type: ignore[misc]
                    client.ask(wire.Pause, "keep", timeout=10)
                )
            )
            for client in (running.engines, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert results == [{"epoch": 0, "weight_version": "0"}] * 2
    finally:
        other.close()


@thorough  # tests/training: real servers do
def test_a_real_server_changes_its_weights(tmp_path: Path, tokenizer_folder: Path):
    """Its answers are those of a model that was loaded with them."""
    for name, seed in (("a", 1), ("b", 2)):
        make_tiny_model("bamba", tmp_path / name, seed=seed, vocab_size=512)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (tokenizer_folder / file).is_file():
                (tmp_path / name / file).write_bytes((tokenizer_folder / file).read_bytes())
    body = {"prompt": list(range(40)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def send(path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ask() -> tuple[str, int]:
        answer = send("/v1/completions", body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    command = (
        "-m", "megatron_hybrid.cli", "serve", "--port", "0", "--device", "cpu",
        "--inference-dynamic-batching-buffer-size-gb", "0.02",
        "--inference-dynamic-batching-block-size", "16", "--weight-folders", str(tmp_path),
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    new = LLM(
        str(tmp_path / "b"),
        device="cpu",
        inference_dynamic_batching_buffer_size_gb=0.02,
        inference_dynamic_batching_block_size=16,
    )
    expected = new.generate([list(range(40))], greedy, progress=False)[0].text
    with ServerProcess(*command, "--load", str(tmp_path / "a"), OMP_NUM_THREADS="1") as server:
        old, _ = ask()
        assert ask() == (old, 40) and old != expected
        assert send("/pause", {"mode": "keep"})["epoch"] == 0
        assert send("/update_weights", {"path": str(tmp_path / "b")})["epoch"] == 1
        send("/resume", {})
        assert ask() == (expected, 0)
        assert ask() == (expected, 40)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            send("/update_weights", {"path": str(tmp_path)})
        assert ask() == (expected, 40)
