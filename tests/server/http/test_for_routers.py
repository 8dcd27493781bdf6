"""What routers ask for: prompts as token ids, how much there is to do, what is served."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import ServerOptions
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello you"}], "max_tokens": 3, "temperature": 0}


def rendered(http: FlaskClient, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(f"{path}/render", json=body)
    assert answer.status_code == 200, answer.data
    return answer.get_json()


def test_a_chat_is_rendered_as_it_is_answered_also_a_turn_that_goes_on(
    reference_http: FlaskClient,
) -> None:
    chat = {**HELLO, "return_token_ids": True}
    for _ in range(2):
        expected = rendered(reference_http, CHAT, chat)["token_ids"]
        answer = reference_http.post(CHAT, json=chat).get_json()
        assert answer["prompt_token_ids"] == expected
        said = [answer["choices"][0]["message"], {"role": "user", "content": "More"}]
        chat = {**chat, "messages": [*HELLO["messages"], *said]}  # type: ignore[misc]
    assert (
        rendered(reference_http, CHAT, {**chat, "truncate_prompt_tokens": 5})["token_ids"]
        == (rendered(reference_http, CHAT, chat)["token_ids"][-5:])
    )


def test_what_a_router_needs_besides_the_ids_is_said(http: FlaskClient) -> None:
    asked = {"priority": -3, "cache_salt": "pepper", "stream": True}
    found = rendered(http, CHAT, {**HELLO, **asked})
    assert found["request_id"].startswith("chatcmpl-") and found["model"] == "fake"
    assert {name: found[name] for name in asked} == asked
    assert rendered(http, CHAT, HELLO)["cache_salt"] is None


def test_every_prompt_of_a_completion_is_rendered_in_order(http: FlaskClient) -> None:
    ids = http.post("/tokenize", json={"prompt": "Hello"}).get_json()["tokens"]
    (one,) = rendered(http, TEXT, {"prompt": "Hello"})
    assert one["token_ids"] == ids and one["request_id"].startswith("cmpl-")
    found = rendered(http, TEXT, {"prompt": [[1, 2], [3]]})
    assert [one["token_ids"] for one in found] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("path", "wrong", "status", "field"),
    [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {**HELLO, "model": "other"}, 404, "model"),
        (CHAT, {**HELLO, "pepper": 1}, 400, "pepper"),
        (TEXT, {"prompt": "a", "max_tokens": 10**6}, 400, "max_tokens"),
        (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ],
)
def test_what_is_not_answered_is_not_rendered(
    http: FlaskClient, path: str, wrong: dict[str, Any], status: int, field: str
) -> None:
    refused, unanswered = (http.post(f"{path}{end}", json=wrong) for end in ("/render", ""))
    assert refused.status_code == status and refused.get_json()["error"]["param"] == field
    assert refused.get_json() == unanswered.get_json()


def test_rendering_runs_nothing_and_takes_no_place(running: RunningLoop, http: FlaskClient) -> None:
    before = http.get("/stats").get_json()["engine"]["requests_admitted"]
    rendered(http, CHAT, HELLO)
    assert http.get("/stats").get_json()["engine"]["requests_admitted"] == before


def test_a_keys_own_salt_is_in_what_is_rendered(serving: Serving, options: ServerOptions) -> None:
    salts = set()
    for name in ("alice", "bob"):
        key = ApiKey(f"key-of-{name}", name)
        keyed = dataclasses.replace(options, api_keys=(key,), cache_salt_per_key=True)
        serving.options = keyed
        http = create_app(serving).test_client()
        answer = http.post(
            f"{CHAT}/render", json=HELLO, headers={"Authorization": f"Bearer {key.key}"}
        )
        salts.add(answer.get_json()["cache_salt"])
    assert len(salts) == 2 and None not in salts


def test_the_load_counts_requests_and_tokens_of_the_cache(
    http: FlaskClient, engine: FakeEngine
) -> None:
    assert http.get("/get_load").get_json() == {"load": 0}
    engine.step_seconds = 0.05
    body = {"prompt": "Hello", "max_tokens": 100, "stream": True}
    with http.post(TEXT, json=body, buffered=False):
        wait_until(lambda: http.get("/get_load").get_json() == {"load": 1})
        loads = http.get("/v1/loads?include=core,disagg,queues,memory").get_json()
    assert loads["dp_rank_count"] == 1
    (one,) = loads["loads"]
    running = (one["num_running_reqs"], one["num_waiting_reqs"], one["num_total_reqs"])
    assert running == (1, 0, 1) and one["dp_rank"] == 0


def test_each_replicas_usage_is_that_of_its_fuller_pool(
    http: FlaskClient, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = serving.client.stats()
    pools = {"kv_used": 3, "kv_blocks": 12, "state_used": 2, "state_slots": 4}
    without_states = {**pools, "state_used": 0, "state_slots": 0}
    each = {"0": figures | pools, "2": figures | without_states}
    monkeypatch.setattr(serving.client, "stats", lambda: {**figures, "engines": each})
    loads = http.get("/v1/loads").get_json()["loads"]
    assert [(one["dp_rank"], one["token_usage"]) for one in loads] == [(0, 0.5), (2, 0.25)]


@pytest.mark.parametrize("name", ["server_info", "model_info"])
def test_what_is_served_is_said_under_both_names(http: FlaskClient, name: str) -> None:
    info = http.get(f"/{name}").get_json()
    assert http.get(f"/get_{name}").get_json() == info
    said = {"server_info": ("served_model_name", "fake"), "model_info": ("is_generation", True)}
    field, value = said[name]
    assert info[field] == value
