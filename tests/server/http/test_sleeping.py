"""/sleep, /wake_up and SGLang's names for them, before an engine that only notes them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

PROMPT = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "noted"),
    [
        ("/sleep", None, ["pause abort", "sleep weights kv_cache True", "resume"]),
        ("/sleep?level=2", None, ["pause abort", "sleep weights kv_cache False", "resume"]),
        (
            "/sleep?level=1&mode=wait",
            None,
            ["pause finish", "sleep weights kv_cache True", "resume"],
        ),
        ("/sleep?mode=keep", None, ["pause keep", "sleep weights kv_cache True", "resume"]),
        ("/sleep?level=0", None, ["pause abort"]),
        ("/release_kv_cache_memory", None, ["pause keep", "sleep kv_cache True", "resume"]),
        (
            "/release_memory_occupation",
            {},
            ["pause keep", "sleep weights kv_cache False", "resume"],
        ),
        (
            "/release_memory_occupation",
            {"tags": ["weights", "cuda_graph"], "keep_weights": True},
            ["pause keep", "sleep weights True", "resume"],
        ),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, []),
        (
            "/resume_memory_occupation",
            {"tags": []},
            ["pause keep", "wake weights kv_cache", "resume"],
        ),
        ("/wake_up?tags=kv_cache", None, ["pause keep", "wake kv_cache", "resume"]),
        ("/wake_up?tags=scheduling", None, ["pause keep", "wake ", "resume", "resume"]),
    ],
)
def test_what_the_engine_is_asked(
    http: FlaskClient, engine: FakeEngine, path: str, body: dict[str, Any] | None, noted: list[str]
) -> None:
    answer = http.post(path, json=body) if body is not None else http.post(path)
    assert answer.status_code == 200
    assert answer.get_json() is None or answer.get_json()["status"] == "ok"
    assert engine.log == noted


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/sleep?level=3", None, "level"),
        ("/sleep?level=one", None, "level"),
        ("/sleep?mode=later", None, "mode"),
        ("/wake_up?tags=all", None, "tags"),
        ("/release_memory_occupation", {"tags": ["all"]}, "tags"),
        ("/release_memory_occupation", {"tags": "weights"}, "tags"),
        ("/resume_memory_occupation", {"tags": [1]}, "tags"),
    ],
)
def test_wrong_fields_are_named(
    http: FlaskClient, engine: FakeEngine, path: str, body: dict[str, Any] | None, field: str
) -> None:
    answer = http.post(path, json=body) if body is not None else http.post(path)
    assert answer.status_code == 400
    assert answer.get_json()["error"]["param"].partition("[")[0] == field
    assert engine.log == []


def test_requests_wait_while_the_engine_sleeps(http: FlaskClient, engine: FakeEngine) -> None:
    http.post("/release_memory_occupation", json={"keep_weights": True})
    assert http.get("/is_sleeping").get_json() == {"is_sleeping": True}
    assert http.get("/stats").get_json()["engine"]["sleeping"] == {
        "weights": True,
        "kv_cache": True,
    }
    other, answers = http.application.test_client(), []
    waiting = threading.Thread(
        target=lambda: answers.append(other.post("/v1/completions", json=PROMPT))
    )
    waiting.start()
    try:
        wait_until(lambda: len(engine.added) == 1)
        http.get("/resume_memory_occupation", json={"tags": ["weights"]})
        assert not answers
    finally:
        assert http.post("/wake_up").status_code == 200
    waiting.join(10)
    assert [answer.status_code for answer in answers] == [200]


def test_an_engine_without_sleep_mode_says_so(http: FlaskClient, engine: FakeEngine) -> None:
    engine.refuses_to_sleep = True
    for path in ("/sleep", "/release_memory_occupation"):
        answer = http.post(path, json={})
        assert answer.status_code == 409
        assert "can't give memory back" in answer.get_json()["error"]["message"]
    assert not engine.is_paused


def test_a_page_of_another_site_puts_nobody_to_sleep(http: FlaskClient, engine: FakeEngine) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        answer = http.get(path, headers={"Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 403
    assert engine.log == []
