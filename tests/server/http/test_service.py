"""Keys, queues, metrics, and what happens when the engine or the client goes away."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid import __version__
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import FinishReason, Grammar, SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.subscription import EngineUnavailable, Overloaded, Subscription
from megatron_hybrid.server.loop import engine_loop
from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import MAX_QUEUE, RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

COMPLETION = "/v1/completions"
HELLO = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "Hello", "max_tokens": 100, "temperature": 0}


def slow(engine: FakeEngine) -> None:
    engine.step_seconds = 0.05


def test_models_lists_the_one_that_is_served(http: FlaskClient) -> None:
    (card,) = http.get("/v1/models").get_json()["data"]
    assert card["id"] == "fake"
    assert card["max_model_len"] == FakeEngine.max_seq_length
    assert http.get("/v1/models/fake").get_json() == card
    assert http.get("/v1/models/other").status_code == 404


def test_a_model_answers_to_each_of_its_names(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions
) -> None:
    named = options.replace(other_names=("also/fake",))
    http = create_app(Serving(running.engines, tokenizer, named)).test_client()
    cards = http.get("/v1/models").get_json()["data"]
    assert [card["id"] for card in cards] == ["fake", "also/fake"]
    assert http.get("/v1/models/also/fake").get_json() == cards[1]
    for name in ("fake", "also/fake"):
        answer = http.post(COMPLETION, json={**HELLO, "model": name})
        assert answer.status_code == 200 and answer.get_json()["model"] == "fake"


def test_the_version_and_the_load_are_said(http: FlaskClient, running: RunningLoop) -> None:
    assert http.get("/version").get_json() == {"version": __version__}
    assert http.get("/load").get_json() == {"server_load": 0}
    slow(running.engine)
    with http.post(COMPLETION, json={**LONG, "stream": True}, buffered=False):
        wait_until(lambda: http.get("/load").get_json() == {"server_load": 1})


def test_a_ping_says_what_health_says(http: FlaskClient, running: RunningLoop) -> None:
    assert http.get("/ping").get_json() == http.get("/health").get_json()
    running.die()
    wait_until(lambda: http.get("/ping").status_code == 503)


def test_another_model_is_not_found(http: FlaskClient) -> None:
    answer = http.post(COMPLETION, json={**HELLO, "model": "other"})
    assert answer.status_code == 404
    assert answer.get_json()["error"]["param"] == "model"
    assert answer.get_json()["error"]["code"] == "model_not_found"


def test_unknown_routes_and_methods_get_json(http: FlaskClient) -> None:
    for answer, status in ((http.get("/nowhere"), 404), (http.get(COMPLETION), 405)):
        assert answer.status_code == status
        assert answer.get_json()["error"]["message"]
    assert "POST" in http.get(COMPLETION).headers["Allow"]


def test_only_the_right_key_opens(
    running: RunningLoop, tokenizer: Tokenizer, tokenizer_folder: Any
) -> None:
    options = ServerOptions(
        tokenizer_folder=str(tokenizer_folder),
        model_name="fake",
        api_keys=(ApiKey("sesame", "door"),),
    )
    http = create_app(Serving(running.engines, tokenizer, options)).test_client()
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        answer = http.post(COMPLETION, json=HELLO, headers=header)
        assert answer.status_code == 401
        assert answer.get_json()["error"]["code"] == "invalid_api_key"
    good = {"Authorization": "Bearer sesame"}
    assert http.post(COMPLETION, json=HELLO, headers=good).status_code == 200
    assert http.get("/health").status_code == 200


def test_a_full_queue_answers_429_and_says_when_to_come_back(
    running: RunningLoop, http: FlaskClient
) -> None:
    running.engine.num_waiting = MAX_QUEUE - 1
    assert http.post(COMPLETION, json=HELLO).status_code == 200
    for body in ({**HELLO, "n": 2, "temperature": 1.0}, {**HELLO, "prompt": ["a", "b"], "n": 2}):
        answer = http.post(COMPLETION, json=body)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) > 0
        assert "--max-queue" in answer.get_json()["error"]["message"]
    running.engine.num_waiting = MAX_QUEUE
    assert http.post(COMPLETION, json={**HELLO, "stream": True}).status_code == 429
    running.engine.num_waiting = 0
    assert http.post(COMPLETION, json={**HELLO, "n": 5}).status_code == 200
    assert running.client.running() == 0


def test_a_turn_takes_only_so_many_commands_and_tokens(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "COMMANDS_AT_ONCE", 3)
    monkeypatch.setattr(engine_loop, "BYTES_A_COMMAND", 40)

    def turns(lengths: list[int]) -> list[list[str]]:
        loop = EngineLoop(engine, None)
        for i, length in enumerate(lengths):
            prompt = wire.packed([5] * length)
            loop._backlog.append((b"worker", wire.AddRequest(str(i), prompt, SamplingParams())))
        loop._backlog.append((b"worker", wire.Left()))
        taken = []
        while loop._backlog:
            assert not loop._left  # only when all its requests were taken
            taken.append([command.request_id for command in loop._take()])  # type: ignore[attr-defined]
        assert loop._left == {b"worker"}
        return taken

    assert turns([1] * 7) == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert turns([10, 1, 100, 1, 1]) == [["0", "1"], ["2"], ["3", "4"]]


def test_a_request_that_takes_several_turns_is_answered_in_full(
    http: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "COMMANDS_AT_ONCE", 3)
    answer = http.post(COMPLETION, json={**HELLO, "prompt": ["a"] * 10})
    assert answer.status_code == 200 and len(answer.get_json()["choices"]) == 10


def test_a_request_of_many_prompts_is_let_in_or_refused_as_a_whole(
    running: RunningLoop, http: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, add, added = running.engine, running.engine.add_request, []

    def add_and_wait(request_id: str, *arguments: Any, **options: Any) -> None:
        engine.num_waiting += 1
        added.append(request_id)
        add(request_id, *arguments, **options)

    monkeypatch.setattr(engine, "add_request", add_and_wait)
    body = {**HELLO, "prompt": ["a"] * (2 * MAX_QUEUE)}
    answer = http.post(COMPLETION, json=body)
    assert answer.status_code == 200 and len(answer.get_json()["choices"]) == 2 * MAX_QUEUE
    added.clear()
    engine.num_waiting = 1
    assert http.post(COMPLETION, json=body).status_code == 429
    assert http.post(COMPLETION, json=HELLO).status_code == 200
    assert len(added) == 1, "no prompt of the refused request"


def test_requests_beyond_the_connections_answer_429_and_their_places_come_back(
    running: RunningLoop, tokenizer: Tokenizer, tokenizer_folder: Any
) -> None:
    options = ServerOptions(
        tokenizer_folder=str(tokenizer_folder), model_name="fake", http_connections=1
    )
    app = create_app(Serving(running.engines, tokenizer, options))
    slow(running.engine)
    with app.test_client().post(COMPLETION, json={**LONG, "stream": True}, buffered=False):
        assert app.test_client().post(COMPLETION, json=HELLO).status_code == 429
    running.engine.step_seconds = 0
    for _ in range(3):
        assert app.test_client().post(COMPLETION, json=HELLO).status_code == 200
        assert app.test_client().post(COMPLETION, json={"prompt": ""}).status_code == 400
        assert app.test_client().post(COMPLETION, json={"prompt": [7] * 200}).status_code == 400


def test_a_failed_step_fails_its_requests_and_the_next_one_is_served(http: FlaskClient) -> None:
    answer = http.post(COMPLETION, json={**HELLO, "prompt": "a~b"})
    assert answer.status_code == 500
    assert "asked to fail" in answer.get_json()["error"]["message"]


def test_requests_after_a_failed_step_are_served(http: FlaskClient) -> None:
    for _ in range(2):
        assert http.post(COMPLETION, json={**HELLO, "prompt": "a~b"}).status_code == 500
        assert http.post(COMPLETION, json=HELLO).status_code == 200


def test_a_stream_that_fails_half_way_ends_with_an_error_object(
    http: FlaskClient, running: RunningLoop
) -> None:
    slow(running.engine)
    answer = http.post(COMPLETION, json={**LONG, "stream": True}, buffered=False)
    assert answer.status_code == 200
    assert http.post(COMPLETION, json={**HELLO, "prompt": "~"}).status_code == 500
    text = answer.get_data(as_text=True)
    assert "asked to fail" in text
    assert text.endswith("data: [DONE]\n\n")


def test_an_engine_that_keeps_failing_ends_the_loop(
    http: FlaskClient, running: RunningLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.engine.fails_again = True
    monkeypatch.setattr(running.engine, "abort", lambda request_id: None)
    assert http.post(COMPLETION, json={**HELLO, "prompt": "~"}).status_code == 500
    wait_until(lambda: running.exit_code == 1)
    wait_until(lambda: http.get("/health").status_code == 503)
    answer = http.post(COMPLETION, json=HELLO)
    assert answer.status_code == 503
    assert answer.get_json()["error"]["code"] == "engine_unavailable"


def test_a_stopped_loop_fails_what_runs_with_503(http: FlaskClient, running: RunningLoop) -> None:
    slow(running.engine)
    threading.Timer(0.2, running.loop.request_stop).start()
    answer = http.post(COMPLETION, json=LONG)
    assert answer.status_code == 503
    assert "shutting down" in answer.get_json()["error"]["message"]
    wait_until(lambda: running.exit_code == 0)


def test_a_reader_who_goes_away_aborts_the_request(http: FlaskClient, running: RunningLoop) -> None:
    slow(running.engine)
    answer = http.post(COMPLETION, json={**LONG, "stream": True}, buffered=False)
    next(iter(answer.response))
    answer.close()
    wait_until(lambda: any(line.startswith("abort") for line in running.engine.log))
    wait_until(lambda: not running.engine.has_work())


@pytest.mark.parametrize("stop", [None, "never"])
def test_a_client_that_hangs_up_while_it_waits_aborts_the_request(
    http: FlaskClient, running: RunningLoop, stop: str | None
) -> None:
    slow(running.engine)
    server_side, client_side = socket.socketpair()
    threading.Timer(0.2, client_side.close).start()
    with server_side:
        connection = {"gunicorn.socket": server_side}
        answer = http.post(COMPLETION, json={**LONG, "stop": stop}, environ_overrides=connection)
    assert answer.status_code == 499
    wait_until(lambda: not running.engine.has_work())
    assert 0 < len(running.engine.log) < 10


def test_abort_ends_a_request_by_the_id_of_its_answer(
    http: FlaskClient, running: RunningLoop
) -> None:
    slow(running.engine)
    answer = http.post(COMPLETION, json={**LONG, "stream": True, "n": 2}, buffered=False)
    request_id = running.engine.log[0].removeprefix("add ").rpartition("-")[0]
    aborted = http.post("/abort", json={"request_id": request_id}).get_json()
    assert aborted == {"aborted": 2}
    assert '"finish_reason":"abort"' in answer.get_data(as_text=True)
    assert http.post("/abort", json={"request_id": request_id}).get_json() == {"aborted": 0}


def test_metrics_show_the_front_ends_figures_and_the_engines(http: FlaskClient) -> None:
    http.post(COMPLETION, json={**HELLO, "max_tokens": 5})
    page = http.get("/metrics").get_data(as_text=True)
    assert 'megatron_hybrid:request_success_total{finished_reason="length"} 1.0' in page
    assert "megatron_hybrid:time_to_first_token_seconds_count 1.0" in page
    assert "megatron_hybrid:inter_token_latency_seconds_count 4.0" in page
    assert "megatron_hybrid:e2e_request_latency_seconds_count 1.0" in page
    assert "megatron_hybrid:generation_tokens_total 5.0" in page
    assert 'megatron_hybrid:prefix_lost_tokens_total{cause="grid"} 3.0' in page
    assert "megatron_hybrid:kv_cache_usage_perc 0.25" in page
    assert "megatron_hybrid:state_cache_usage_perc 0.0" in page


def test_what_the_engine_refuses_comes_back_as_its_error(running: RunningLoop) -> None:
    subscription = Subscription(running.client, whole=False)
    subscription.add(wire.AddRequest("a-0", wire.packed([]), SamplingParams(n=2)))
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        subscription.next(5)
    assert caught.value.field == "prompt"
    assert running.client.running() == 0


def test_a_whole_answer_comes_as_one_event(running: RunningLoop) -> None:
    subscription = Subscription(running.client, whole=True)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    subscription.add(wire.AddRequest("a-0", wire.packed([5, 6, 7]), params))
    (event,) = subscription.next(5)
    assert event.token_ids == [5, 6, 7, 5, 6]
    assert event.finish_reason is FinishReason.LENGTH
    assert event.prompt_tokens == 3


def test_before_the_engine_is_loaded_everything_says_so(
    tokenizer: Tokenizer, options: ServerOptions, tmp_path: Path
) -> None:
    client = ReplicaSet([f"ipc://{tmp_path}/nobody"])
    http = create_app(Serving(client, tokenizer, options)).test_client()
    for answer in (http.get("/health"), http.post(COMPLETION, json=HELLO)):
        assert answer.status_code == 503
        assert "loading" in answer.get_json()["error"]["message"]
    assert http.get("/v1/models").status_code == 200
    assert b"megatron_hybrid:up 0.0" in http.get("/metrics").data
    client.close()


def test_a_hung_engine_counts_as_down(
    running: RunningLoop, http: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_hybrid.server.link.engine_client.STALLED_SECONDS", -1.0)
    with pytest.raises(EngineUnavailable, match="not answered"):
        running.client.check()
    assert http.get("/health").status_code == 503


def test_many_threads_get_their_own_answers(http: FlaskClient, tokenizer: Tokenizer) -> None:
    app = http.application
    wrong = []

    def ask(number: int) -> None:
        text = f"number {number}"
        body = {"prompt": text, "max_tokens": len(tokenizer.encode(text)), "temperature": 0}
        whole = app.test_client().post(COMPLETION, json=body).get_json()["choices"][0]["text"]
        answer = app.test_client().post(COMPLETION, json={**body, "stream": True})
        lines = answer.get_data(as_text=True).split("\n\n")[:-2]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        if not whole == streamed == text:
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_requests_of_a_front_end_that_vanishes_are_aborted(running: RunningLoop) -> None:
    slow(running.engine)
    other = running.connect().clients[0]
    for client, name in ((other, "a"), (running.client, "b")):
        subscription = Subscription(client, whole=False)
        subscription.add(
            wire.AddRequest(f"{name}-0", wire.packed([5, 6]), SamplingParams(max_tokens=50))
        )
        subscription.next(5)
    other.close()
    wait_until(lambda: "abort a-0" in running.engine.log, 2.0)
    time.sleep(0.2)
    assert "abort b-0" not in running.engine.log


def test_a_client_fails_what_runs_when_the_engine_dies_and_joins_the_next_one(
    engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    first = RunningLoop(engine, folder)
    slow(engine)
    client = first.client
    subscription = Subscription(client, whole=False)
    subscription.add(wire.AddRequest("a-0", wire.packed([5, 6]), SamplingParams(max_tokens=50)))
    subscription.next(5)
    first.die()
    with pytest.raises(EngineUnavailable, match="process has ended"):
        while True:
            subscription.next(5)
    with pytest.raises(EngineUnavailable, match="process has ended"):
        client.check()
    again = FakeEngine(engine.vocab_size, engine.eos_token_ids)
    second = RunningLoop(again, folder)
    wait_until(lambda: client.ready is not None)
    later = Subscription(client, whole=True)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    later.add(wire.AddRequest("b-0", wire.packed([5, 6]), params))
    (event,) = later.next(5)
    assert event.token_ids == [5, 6]
    assert [line for line in again.log if line.startswith("add")] == ["add b-0"]
    client.close()
    second.close()


WITH_GRAMMAR = SamplingParams(
    temperature=0.0, max_tokens=3, n=2, grammar=Grammar("json_schema", '{"type":"object"}')
)


def test_a_grammar_that_is_being_compiled_keeps_nobody_else_waiting(running: RunningLoop) -> None:
    running.engine.grammars_are_ready = False
    slow, other = (Subscription(running.client, whole=True) for _ in range(2))
    slow.add(wire.AddRequest("slow-0", wire.packed([5, 6]), WITH_GRAMMAR))
    other.add(
        wire.AddRequest("other-0", wire.packed([7, 8]), SamplingParams(temperature=0, max_tokens=2))
    )
    (event,) = other.next(5)
    assert event.token_ids == [7, 8]
    assert "add other-0" in running.engine.log and "add slow-0" not in running.engine.log
    running.engine.grammars_are_ready = True
    while slow.open_answers:
        assert all(len(event.token_ids) == 3 for event in slow.next(5))


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(running: RunningLoop) -> None:
    running.engine.grammars_are_ready = False
    subscription = Subscription(running.client, whole=True)
    subscription.add(wire.AddRequest("a-0", wire.packed([5, 6]), WITH_GRAMMAR))
    assert running.engines.ask(wire.AbortAnswers, "a") == {"aborted": 2}
    running.engine.grammars_are_ready = True
    while subscription.open_answers:
        for event in subscription.next(5):
            assert event.finish_reason is FinishReason.ABORT


def test_requests_that_wait_for_their_grammar_count_as_waiting(running: RunningLoop) -> None:
    running.engine.grammars_are_ready = False
    subscriptions = [Subscription(running.client, whole=True) for _ in range(MAX_QUEUE + 1)]
    for number, subscription in enumerate(subscriptions):
        name, params = f"{number}-0", dataclasses.replace(WITH_GRAMMAR, n=1)
        subscription.add(wire.AddRequest(name, wire.packed([5, 6]), params))
    with pytest.raises(Overloaded, match="max-queue"):
        subscriptions[-1].next(5)
    running.engine.grammars_are_ready = True
    assert all(subscription.next(5) for subscription in subscriptions[:-1])


def test_what_waits_for_its_grammar_ends_with_a_step_that_fails(
    running: RunningLoop, tokenizer: Tokenizer
) -> None:
    running.engine.grammars_are_ready = False
    waiting, bad = (Subscription(running.client, whole=True) for _ in range(2))
    waiting.add(wire.AddRequest("waiting-0", wire.packed([5, 6]), WITH_GRAMMAR))
    bad.add(
        wire.AddRequest("bad-0", wire.packed(tokenizer.encode("~")), SamplingParams(max_tokens=2))
    )
    assert waiting.next(5)[0].finish_reason is FinishReason.ERROR
    running.engine.grammars_are_ready = True
    later = Subscription(running.client, whole=True)
    later.add(wire.AddRequest("later-0", wire.packed([5, 6]), WITH_GRAMMAR))
    assert later.next(5)[0].finish_reason is FinishReason.LENGTH
    assert not any("waiting-0" in line for line in running.engine.log if line.startswith("add"))
