"""Over HTTP: what the longest prompt and answer together are, and what becomes of longer ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import BUFFER_FLAG, CONTEXT_FLAG, SamplingParams
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.replicas.coordinator_client import CoordinatorClient
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

LIMIT = 41
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    """One whose KV pool ends before its context does."""
    engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    engine.max_seq_length, engine.max_seq_length_flag = LIMIT, BUFFER_FLAG
    return engine


def complete(http: FlaskClient, length: int, **fields: Any) -> Any:
    return http.post(COMPLETION, json={**GREEDY, "prompt": [7] * length, **fields})


def test_models_and_tokenize_say_the_real_limit(http: FlaskClient) -> None:
    (card,) = http.get("/v1/models").get_json()["data"]
    assert card["max_model_len"] == LIMIT
    assert http.post("/tokenize", json={"prompt": "a"}).get_json()["max_model_len"] == LIMIT


@pytest.mark.parametrize(("length", "answered"), [(20, 16), (LIMIT - 16, 16), (LIMIT - 1, 1)])
def test_a_completions_default_is_as_long_as_fits(
    http: FlaskClient, length: int, answered: int
) -> None:
    answer = complete(http, length).get_json()
    assert answer["usage"]["completion_tokens"] == answered
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_chat_is_as_long_as_fits(http: FlaskClient) -> None:
    answer = http.post(CHAT, json={**GREEDY, **HELLO}).get_json()
    assert answer["usage"]["total_tokens"] == LIMIT
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
def test_a_prompt_without_room_for_an_answer_is_refused_with_the_flag(
    http: FlaskClient, length: int
) -> None:
    answer = complete(http, length)
    error = answer.get_json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"is {LIMIT} ({BUFFER_FLAG})" in error["message"] and error["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION, {"max_tokens": 12}),
        (COMPLETION, {"min_tokens": 12}),
        (CHAT, {"max_completion_tokens": 35}),
        (CHAT, {"min_tokens": 35}),
    ],
)
def test_what_was_asked_for_and_can_not_fit_is_refused_with_the_flag(
    http: FlaskClient, path: str, fields: dict[str, Any]
) -> None:
    prompt = HELLO if path == CHAT else {"prompt": [7] * 30}
    answer = http.post(path, json={**GREEDY, **prompt, **fields})
    error = answer.get_json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    ((field, tokens),) = fields.items()
    assert error["param"] == field and f"{field} is {tokens}" in error["message"]
    assert f"is {LIMIT} ({BUFFER_FLAG})" in error["message"]


def test_of_several_replicas_the_shortest_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measures its own memory, and any may get a request."""
    coordinator = CoordinatorClient(f"ipc://{tmp_path}/c")
    replicas = ReplicaSet([f"ipc://{tmp_path}/{n}" for n in range(3)], coordinator)
    for client, limit in zip(replicas.clients, (50, LIMIT, 60), strict=True):
        monkeypatch.setattr(client._link, "send", lambda command: None)
        flag = CONTEXT_FLAG if limit == 60 else BUFFER_FLAG
        ready = wire.EngineReady(limit, 10, (), max_seq_length_flag=flag)
        client.received([ready, wire.Heartbeat()])
    for said in (replicas.check(), replicas.ready):
        assert said is not None
        assert (said.max_seq_length, said.max_seq_length_flag) == (LIMIT, BUFFER_FLAG)


def test_the_default_of_sampling_params_goes_over_the_wire() -> None:
    add = wire.AddRequest("a", wire.packed([1]), SamplingParams())
    (read,) = wire.decode_commands(wire.encode([add]))
    assert read == add
