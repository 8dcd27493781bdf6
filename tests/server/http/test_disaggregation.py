"""Prompts that one server computes and another goes on from: what passes over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from openai.types import Completion
from openai.types.chat import ChatCompletion

from megatron_hybrid import reference_model
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETION: {"prompt": "Hello"},
}
ADDRESS = "10.0.0.1:7001"
HANDED_OVER = {"peer": ADDRESS}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def prefill(
    engine: FakeEngine, tokenizer: Tokenizer, options: ServerOptions, tmp_path_factory: Any
) -> Iterator[FlaskClient]:
    """The application before an engine that hands over what it computes."""
    running = RunningLoop(engine, tmp_path_factory.mktemp("s"), handover_address=ADDRESS)
    yield create_app(running.serve(tokenizer, options)).test_client()
    running.close()


def post(http: FlaskClient, path: str, **body: Any) -> Any:
    answer = http.post(path, json={**BODIES[path], "temperature": 0, **body})
    assert answer.status_code == 200, answer.data
    return answer.get_json()


def chunks(http: FlaskClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json={**BODIES[path], "stream": True, **body})
    *events, end = answer.get_data(as_text=True).split("\n\n")[:-1]
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


# ------------------------------------------------------------------ the server that goes on


@pytest.mark.parametrize("path", BODIES)
def test_who_computed_the_prompt_reaches_the_engine(
    http: FlaskClient, engine: FakeEngine, path: str
) -> None:
    more = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": None}
    post(http, path, max_tokens=4, kv_transfer_params={"peer": ADDRESS, **more})
    (added,) = engine.added
    assert (added.prefilled_by, added.params.max_tokens) == (ADDRESS, 4)


@pytest.mark.parametrize("given", [None, {}, {"peer": None}, {"do_remote_decode": True}])
def test_without_a_peer_the_prompt_is_computed_here(
    http: FlaskClient, engine: FakeEngine, given: Any
) -> None:
    for path in BODIES:
        assert "kv_transfer_params" not in post(http, path, kv_transfer_params=given)
    assert [added.prefilled_by for added in engine.added] == ["", ""]


def test_every_prompt_of_a_body_comes_from_there(http: FlaskClient, engine: FakeEngine) -> None:
    post(http, COMPLETION, prompt=["a", "b"], kv_transfer_params=HANDED_OVER)
    assert [added.prefilled_by for added in engine.added] == [ADDRESS, ADDRESS]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("10.0.0.1:7001", "kv_transfer_params"),
        ({"peer": 7001}, "kv_transfer_params.peer"),
        ({"peer": "x" * 1025}, "kv_transfer_params.peer"),
        ({"peer": ADDRESS, "request": 1}, "kv_transfer_params.request"),
    ],
)
def test_what_is_no_address_is_refused(http: FlaskClient, given: Any, field: str) -> None:
    for path, body in BODIES.items():
        answer = http.post(path, json={**body, "kv_transfer_params": given})
        assert answer.status_code == 400
        assert answer.get_json()["error"]["param"] == field


def test_a_server_without_that_peer_says_so(reference_http: FlaskClient) -> None:
    for path, body in BODIES.items():
        answer = reference_http.post(path, json={**body, "kv_transfer_params": HANDED_OVER})
        error = answer.get_json()["error"]
        assert answer.status_code == 400 and error["param"] == "kv_transfer_params"
        assert "--disaggregation-peers" in error["message"] and ADDRESS in error["message"]


def test_a_prompt_that_is_computed_elsewhere_is_read_before_the_engine_has_it(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.transfers.are_read_ahead = False
    computes = {"peer": ADDRESS, "request": "there-0"}
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(post(http, CHAT, max_tokens=2, kv_transfer_params=computes))
    )
    asking.start()
    wait_until(lambda: bool(engine.transfers.begun))
    (begun,) = engine.transfers.begun.values()
    assert begun == (ADDRESS, "there-0") and not engine.added
    engine.transfers.are_read_ahead = True
    asking.join()
    assert [added.prefilled_by for added in engine.added] == [ADDRESS]
    assert answers[0]["usage"]["completion_tokens"] == 2


def test_a_client_that_is_gone_is_waited_for_no_longer(
    http: FlaskClient, engine: FakeEngine
) -> None:
    engine.transfers.are_read_ahead = False
    body = {**BODIES[CHAT], "timeout": 0.2, "kv_transfer_params": {"peer": "a:1", "request": "r"}}
    assert http.post(CHAT, json=body).status_code == 504
    wait_until(lambda: engine.transfers.stopped == list(engine.transfers.begun))
    wait_until(lambda: len(engine.added) == 1)  # and aborted at once


# ------------------------------------------------------------------ the server that hands over


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_an_answer_is_one_token_and_says_where_the_prompt_is(
    prefill: FlaskClient, engine: FakeEngine, path: str, max_tokens: int | None
) -> None:
    answer = post(prefill, path, max_tokens=max_tokens)
    assert answer["kv_transfer_params"] == HANDED_OVER
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert engine.added[0].params.max_tokens == 1
    (ChatCompletion if path == CHAT else Completion).model_validate(answer)


@pytest.mark.parametrize("path", BODIES)
def test_what_only_shapes_an_answer_is_left_out(
    prefill: FlaskClient, engine: FakeEngine, path: str
) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "min_tokens": 20, "n": 3, "timeout": 10}
    fields["structured_outputs"] = {"regex": "a+"}
    engine.grammars_are_ready = False  # nobody waits for one
    answer = post(prefill, path, **fields)
    assert len(answer["choices"]) == 1
    (added,) = engine.added
    expected = SamplingParams(temperature=0, max_tokens=1, min_tokens=1)
    assert added.params == expected and not added.prefilled_by


def test_each_of_several_prompts_is_computed(prefill: FlaskClient, engine: FakeEngine) -> None:
    answer = post(prefill, COMPLETION, prompt=["a b", "c d"], n=2, max_tokens=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert len(engine.added) == 2 and answer["usage"]["completion_tokens"] == 2
    assert answer["kv_transfer_params"] == HANDED_OVER


def test_an_echo_has_the_prompt(prefill: FlaskClient, engine: FakeEngine) -> None:
    for max_tokens in (0, 7):
        answer = post(prefill, COMPLETION, echo=True, logprobs=1, max_tokens=max_tokens)
        assert answer["choices"][0]["text"].startswith("Hello")
    assert {added.params.max_tokens for added in engine.added} == {1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_of_one_token_is_text(
    options: ServerOptions, tmp_path: Path, stream: bool
) -> None:
    tokenizer = Tokenizer.load(reference_model.path())  # its template takes tools
    engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    engine.max_seq_length, engine.grammars_are_ready = 1000, False
    running = RunningLoop(engine, tmp_path, handover_address=ADDRESS)
    http = create_app(running.serve(tokenizer, options)).test_client()
    body = {"tools": TOOLS, "tool_choice": "required", "logprobs": True, "timeout": 10}
    try:
        if stream:
            *_, last = chunks(http, CHAT, **body)
            assert last["choices"][0]["finish_reason"] == "length"
        else:
            last = post(http, CHAT, **body)
            assert "tool_calls" not in last["choices"][0]["message"]
        assert last["kv_transfer_params"] == HANDED_OVER
        assert engine.added[0].params.grammar is None
    finally:
        running.close()


def test_a_request_is_checked_as_it_came(prefill: FlaskClient) -> None:
    """What the other server would refuse is refused before anything is computed."""
    for path, body in BODIES.items():
        for field, value in (("max_tokens", 1000), ("structured_outputs", {"regex": "("})):
            answer = prefill.post(path, json={**body, field: value})
            assert answer.status_code in (400, 413)
            assert answer.get_json()["error"]["param"].startswith(field)


def test_the_prompt_is_cut_as_where_it_is_gone_on_from(
    prefill: FlaskClient, engine: FakeEngine
) -> None:
    prompt = [7, 8] * 50
    post(prefill, COMPLETION, prompt=prompt, max_tokens=78, truncate_prompt_tokens=-1)
    assert engine.added[0].prompt == prompt[-50:]  # of 128 that fit


def test_a_stream_of_several_prompts_says_it_at_their_ends_alone(prefill: FlaskClient) -> None:
    told = [
        chunk["kv_transfer_params"]
        for chunk in chunks(prefill, COMPLETION, prompt=["a b", "c d"])
        if "kv_transfer_params" in chunk
    ]
    assert told == [HANDED_OVER, HANDED_OVER]


def test_a_request_that_is_not_taken_gets_a_status_and_no_stream(
    prefill: FlaskClient, engine: FakeEngine
) -> None:
    engine.num_waiting = 2_000_000
    for path, body in BODIES.items():
        assert prefill.post(path, json={**body, "stream": True}).status_code == 429


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_says_it_where_a_choice_ends(prefill: FlaskClient, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    for path in BODIES:
        found = chunks(prefill, path, max_tokens=9, **options)
        first = found.pop(0)
        computes = {"peer": ADDRESS, "request": f"{first['id']}-0"}
        assert first["choices"] == [] and first["kv_transfer_params"] == computes
        ends = [chunk for chunk in found if chunk["choices"] and _reason(chunk)]
        assert [chunk.get("kv_transfer_params") for chunk in ends] == [HANDED_OVER]
        others = [chunk for chunk in found if chunk not in ends]
        assert others or path == COMPLETION
        assert not any("kv_transfer_params" in chunk for chunk in others)
        if with_usage:
            assert found[-1]["usage"]["completion_tokens"] == 1


def _reason(chunk: dict[str, Any]) -> Any:
    return chunk["choices"][0]["finish_reason"]


def test_a_stream_elsewhere_says_nothing_of_it(http: FlaskClient) -> None:
    for path in BODIES:
        found = chunks(http, path, max_tokens=3)
        assert found and not any("kv_transfer_params" in chunk for chunk in found)


def test_of_several_replicas_the_one_that_computed_it_is_named(
    tokenizer: Tokenizer, options: ServerOptions, tmp_path: Path
) -> None:
    loops = []
    for name in ("a:1", "b:2"):
        (tmp_path / name[0]).mkdir()
        engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
        loops.append(RunningLoop(engine, tmp_path / name[0], handover_address=name))
    engines = ReplicaSet([loop.endpoint for loop in loops])
    engines.join("")
    http = create_app(Serving(engines, tokenizer, options)).test_client()
    try:
        for client in engines.clients:
            while client.ready is None:
                engines.wait_until_ready(0.01)
        assert post(http, CHAT)["kv_transfer_params"] == {"peer": "a:1"}
        loops[0].engine.num_waiting = 100  # its queue is full
        assert post(http, CHAT)["kv_transfer_params"] == {"peer": "b:2"}
        first, *_, last = [one for one in chunks(http, CHAT) if "kv_transfer_params" in one]
        assert first["kv_transfer_params"]["peer"] == "b:2"
        assert last["kv_transfer_params"] == {"peer": "b:2"}
    finally:
        engines.close()
        for loop in loops:
            loop.close()
