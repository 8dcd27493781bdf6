"""Several answers to one prompt: one request to the engine, which ends each by itself."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import FinishReason, SamplingParams
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.subscription import Subscription
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.running import wait_until

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
LETTERS = "x!abcdefgh"  # a token each; choice i of the fake engine repeats them from letter i on
THREE = {"prompt": LETTERS, "max_tokens": 5, "temperature": 0, "n": 3}
LONG = {"prompt": LETTERS, "max_tokens": 100, "temperature": 0, "n": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, n=3)


@pytest.fixture(autouse=True)
def letters_are_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(LETTERS)) == len(LETTERS)


def answer(http: FlaskClient, body: dict[str, Any], path: str = COMPLETION) -> dict[str, Any]:
    got = http.post(path, json=body)
    assert got.status_code == 200, got.data
    return dict(got.get_json())


def streamed(http: FlaskClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The first entry of "choices" of every event."""
    got = http.post(COMPLETION, json={**body, "stream": True})
    assert got.status_code == 200, got.data
    events = got.get_data(as_text=True).split("\n\n")[:-2]
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


def test_several_choices_are_one_request_to_the_engine(
    http: FlaskClient, engine: FakeEngine
) -> None:
    choices = answer(http, {**THREE, "seed": 7})["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] for choice in choices] == ["x!abc", "!abcd", "abcde"]
    (added,) = engine.added
    assert added.params.n == 3
    assert added.params.seed == 7


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    http: FlaskClient, engine: FakeEngine
) -> None:
    body = {**THREE, "prompt": [LETTERS, LETTERS[5:]], "n": 2, "max_tokens": 3}
    whole = answer(http, body)["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole] == ["x!a", "!ab", "def", "efg"]
    assert [added.params.n for added in engine.added] == [2, 2]
    texts = ["", "", "", ""]
    for choice in streamed(http, body):
        texts[choice["index"]] += choice["text"]
    assert texts == ["x!a", "!ab", "def", "efg"]


def test_a_hundred_and_twenty_eight_choices_are_served(http: FlaskClient) -> None:
    choices = answer(http, {**THREE, "n": 128, "max_tokens": 1})["choices"]
    assert [choice["text"] for choice in choices] == [LETTERS[i % 10] for i in range(128)]


def test_cached_tokens_are_those_of_the_choice_that_was_computed_first(http: FlaskClient) -> None:
    def usage() -> dict[str, Any]:
        return dict(answer(http, {**THREE, "prompt": [[7] * 20, [8] * 10]})["usage"])

    first, again = usage(), usage()
    assert first["prompt_tokens"] == 30
    assert first["completion_tokens"] == 2 * 3 * 5
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 16 + 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_one_choice_aborts_only_that_one(
    http: FlaskClient, engine: FakeEngine, stream: bool
) -> None:
    engine.step_seconds = 0.05  # else it has ended before anybody can abort it
    body = {**THREE, "stop": ["!"]}
    texts, reasons = ["", "", ""], {}
    for choice in streamed(http, body) if stream else answer(http, body)["choices"]:
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["x", "", "abcde"]
    assert reasons == {0: "stop", 1: "stop", 2: "length"}
    request_id = engine.added[0].request_id
    wait_until(lambda: not engine.has_work())
    aborts = [line for line in engine.log if line.startswith("abort")]
    assert aborts == [f"abort {request_id} 1", f"abort {request_id} 0"]


def test_a_reader_who_goes_away_aborts_every_choice_at_once(
    http: FlaskClient, running: RunningLoop
) -> None:
    running.engine.step_seconds = 0.05
    got = http.post(COMPLETION, json={**LONG, "stream": True}, buffered=False)
    next(iter(got.response))
    got.close()
    wait_until(lambda: not running.engine.has_work())
    request_id = running.engine.added[0].request_id
    assert running.engine.log == [f"add {request_id}", f"abort {request_id}"]
    assert running.client.running() == 0


def test_a_client_that_hangs_up_while_it_waits_aborts_every_choice(
    http: FlaskClient, running: RunningLoop
) -> None:
    running.engine.step_seconds = 0.05
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        answer = http.post(COMPLETION, json=LONG, environ_overrides={"gunicorn.socket": ours})
    assert answer.status_code == 499
    wait_until(lambda: not running.engine.has_work())


def test_abort_ends_every_choice_of_every_prompt(http: FlaskClient, running: RunningLoop) -> None:
    running.engine.step_seconds = 0.05
    body = {**LONG, "prompt": [LETTERS, "abc"], "stream": True}
    got = http.post(COMPLETION, json=body, buffered=False)
    request_id = running.engine.added[0].request_id.rpartition("-")[0]
    assert http.post("/abort", json={"request_id": request_id}).get_json() == {"aborted": 6}
    assert got.get_data(as_text=True).count('"finish_reason":"abort"') == 6


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_its_own_logprobs(
    http: FlaskClient, tokenizer: Tokenizer, stream: bool
) -> None:
    body = {**THREE, "logprobs": 2}
    tokens: list[list[str]] = [[], [], []]
    offsets: list[list[int]] = [[], [], []]
    for choice in streamed(http, body) if stream else answer(http, body)["choices"]:
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert ["".join(one) for one in tokens] == ["x!abc", "!abcd", "abcde"]
    assert offsets == [[0, 1, 2, 3, 4]] * 3


def test_figures_are_counted_for_each_choice(http: FlaskClient) -> None:
    answer(http, THREE)
    page = http.get("/metrics").get_data(as_text=True)
    assert 'megatron_hybrid:request_success_total{finished_reason="length"} 3.0' in page
    assert "megatron_hybrid:time_to_first_token_seconds_count 3.0" in page
    assert "megatron_hybrid:inter_token_latency_seconds_count 12.0" in page
    assert "megatron_hybrid:e2e_request_latency_seconds_count 3.0" in page


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_fails_all_choices_and_the_next_request_is_served(
    http: FlaskClient, running: RunningLoop, stream: bool
) -> None:
    running.engine.step_seconds = 0.05
    got = http.post(COMPLETION, json={**LONG, "stream": True}, buffered=False)
    failing = {**LONG, "prompt": "~", "stream": stream}
    assert http.post(COMPLETION, json=failing).status_code == 500
    assert "asked to fail" in got.get_data(as_text=True)
    wait_until(lambda: not running.engine.has_work())
    assert running.client.running() == 0
    assert len(answer(http, THREE)["choices"]) == 3


def test_a_request_ends_for_loop_and_client_with_its_last_choice(running: RunningLoop) -> None:
    running.engine.step_seconds = 0.02
    subscription = Subscription(running.client, whole=True)
    subscription.add(wire.AddRequest("a-0", wire.packed([5, 6, 7]), GREEDY))
    running.client.send(wire.AbortRequest("a-0", 1))
    (event,) = subscription.next(5)
    assert (event.index, event.finish_reason) == (1, FinishReason.ABORT)
    assert running.client.running() == 1
    subscription.abort("a-0", 0, FinishReason.STOP)
    assert running.client.running() == 1
    running.client.send(wire.AbortRequest("a-0"))
    (event,) = subscription.next(5)
    assert (event.index, event.finish_reason) == (2, FinishReason.ABORT)
    assert event.counters is not None
    assert subscription.open_answers == set()
    assert running.client.running() == 0
    wait_until(lambda: not running.loop._requests)


def test_an_id_in_use_is_refused_to_the_second_and_the_first_goes_on(running: RunningLoop) -> None:
    running.engine.step_seconds = 0.02
    params = SamplingParams(temperature=0.0, max_tokens=20, n=2)
    first = Subscription(running.client, whole=True)
    first.add(wire.AddRequest("same-0", wire.packed([5, 6, 7]), params))
    wait_until(running.engine.has_work)
    with pytest.raises(InvalidRequestError, match="in use"):
        Subscription(running.client, whole=True).add(
            wire.AddRequest("same-0", wire.packed([5]), params)
        )
    other = running.connect().clients[0]
    second = Subscription(other, whole=True)
    second.add(wire.AddRequest("same-0", wire.packed([5, 6, 7]), params))
    with pytest.raises(InvalidRequestError, match="in use"):
        second.next(5)
    assert other.running() == 0
    other.close()
    events = first.next(5)
    while len(events) < 2:
        events += first.next(5)
    assert {event.index for event in events} == {0, 1}
    assert all(event.finish_reason is FinishReason.LENGTH for event in events)
    wait_until(lambda: not running.loop._requests)


def test_numpy_counters_survive_the_wire() -> None:
    numpy = pytest.importorskip("numpy")
    event = wire.RequestEvent("a-0", 2, counters={"skipped_tokens": numpy.int64(3)})
    (reply,) = wire.decode_replies(wire.encode([wire.Events([event])]))
    assert isinstance(reply, wire.Events)
    assert reply.events[0].index == 2
    assert reply.events[0].counters == {"skipped_tokens": 3}
