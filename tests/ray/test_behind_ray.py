"""Replicas in Ray Serve, installed from PyPI: what docs/ray.md says works.

With TESTS=all, where Ray is installed; CI has neither it nor the minutes that this takes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_hybrid import LLM, SamplingParams
from tests.dynamo.deployment import body_of
from tests.ray.deployment import Deployment
from tests.server.deployed import check_chat, check_stream
from tests.server.running import is_alive, wait_until
from tests.thorough import thorough

pytest.importorskip("ray.serve")
pytestmark = thorough

QUESTION = "The code of the gate is 7315, and the cat is called Pixel. What is the cat called?"
LONG = {"max_tokens": 600, "ignore_eos": True}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("ray"), replicas=2, enable_control_routes=True)
    try:
        deployment.wait(2)
        yield deployment
    finally:
        deployment.close()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu")


def test_a_chat_has_the_answer_of_the_model(deployment: Deployment, llm: LLM) -> None:
    check_chat(deployment.chat(QUESTION), llm, QUESTION)


def test_a_stream_has_the_same_in_pieces_and_the_usage(deployment: Deployment) -> None:
    whole = deployment.chat(QUESTION)
    with deployment.stream(QUESTION) as chunks:
        check_stream(list(chunks), whole)


def test_the_second_turn_skips_the_first_wherever_it_went(deployment: Deployment) -> None:
    before = deployment.figures("prompt_tokens_computed_total")
    for number in range(6):
        messages = [
            {"role": "user", "content": f"My name is Robot {number}. " + "You answer kindly. " * 40}
        ]
        first = deployment.chat(messages, max_tokens=8)
        messages.append(first["choices"][0]["message"])
        messages.append({"role": "user", "content": "What is my name?"})
        usage = deployment.chat(messages, max_tokens=8)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # To the end of the answer, whose very tokens the replica remembers.
        least = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
        assert cached >= least, (number, usage)
    after = deployment.figures("prompt_tokens_computed_total")
    assert all(after[one] > before[one] for one in after), "one replica took every chat"


def test_requests_that_come_together_are_divided(deployment: Deployment) -> None:
    before = deployment.figures("prompt_tokens_computed_total")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: deployment.chat(f"{n} {QUESTION} " * 20, max_tokens=4), range(8)))
    after = deployment.figures("prompt_tokens_computed_total")
    shares = [after[one] - before[one] for one in after]
    assert min(shares) > max(shares) / 4, shares


def test_other_routes_answer_too(deployment: Deployment) -> None:
    assert [one["id"] for one in deployment.get("/v1/models")["data"]] == ["reference_model"]
    completion = deployment.post("/v1/completions", prompt="The cat", max_tokens=3)
    assert completion["usage"]["completion_tokens"] == 3
    said = deployment.post(
        "/v1/messages",
        model="reference_model",
        max_tokens=5,
        messages=[{"role": "user", "content": "Hello!"}],
    )
    assert said["type"] == "message"
    wrong = deployment.chat("Hello!", max_tokens=100_000)
    assert wrong["status"] == 400 and "max_tokens is 100000" in wrong["error"]["message"]


def test_what_is_larger_than_a_message_of_grpc_goes_both_ways(deployment: Deployment) -> None:
    text = "\u00e9" * 1_000_000  # as JSON 6 MB, and its tokens more
    assert deployment.post("/tokenize", prompt=text)["count"] >= len(text)
    refused = deployment.chat(text)
    assert refused["status"] == 400 and "max_seq_length" in str(refused).replace("-", "_")


def test_a_stored_response_is_found_on_the_replica_that_has_it(deployment: Deployment) -> None:
    for _ in range(4):
        first = deployment.post("/v1/responses", input="My name is Ada.", max_output_tokens=8)
        assert deployment.get(f"/v1/responses/{first['id']}")["id"] == first["id"]
        second = deployment.post(
            "/v1/responses",
            input="What is my name?",
            previous_response_id=first["id"],
            max_output_tokens=8,
        )
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]


def test_every_replica_hears_of_what_is_for_all(deployment: Deployment) -> None:
    assert "error" not in deployment.post("/pause", mode="keep")
    assert set(deployment.figures("paused").values()) == {1.0}
    assert "error" not in deployment.post("/resume")
    assert set(deployment.figures("paused").values()) == {0.0}
    assert "error" not in deployment.post("/reset_prefix_cache")
    assert set(deployment.figures("kv_blocks_cached").values()) == {0.0}


def test_a_client_that_is_gone_is_no_longer_served(deployment: Deployment) -> None:
    with deployment.stream("Hello!", **(LONG | {"max_tokens": 6000})) as chunks:
        next(chunks)
        assert sum(deployment.figures("num_requests_running").values()) == 1
    wait_until(lambda: not sum(deployment.figures("num_requests_running").values()), 5)
    with socket.create_connection(deployment.address) as client:  # nor one that wants it whole
        body = json.dumps(body_of("Hello!", **(LONG | {"max_tokens": 6000}))).encode()
        head = f"Host: us\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        wait_until(lambda: sum(deployment.figures("num_requests_running").values()) == 1, 10)
    wait_until(lambda: not sum(deployment.figures("num_requests_running").values()), 5)


def test_a_front_end_that_dies_ends_its_streams_with_an_error(deployment: Deployment) -> None:
    with deployment.stream("Hello!", **LONG) as chunks:
        next(chunks)
        for pid in deployment.pids("gunicorn: worker"):
            os.kill(pid, signal.SIGKILL)
        assert list(chunks)[-1]["error"]["type"] == "server_error"
    wait_until(lambda: all("choices" in deployment.chat("Hello!") for _ in range(4)), 30)


@pytest.mark.parametrize("who", ["replica", "engine"])
def test_a_dead_replica_ends_its_streams_with_an_error_and_comes_back(
    deployment: Deployment, who: str
) -> None:
    with deployment.stream("Hello!", **LONG) as one, deployment.stream("You!", **LONG) as other:
        assert next(one) and next(other)
        assert set(deployment.figures("num_requests_running").values()) == {1.0}
        names, actors = set(deployment.figures("up")), deployment.pids()
        engines = {pid: deployment.engines() for pid in actors}
        victim = actors[0] if who == "replica" else engines[actors[0]][0]
        os.kill(victim, signal.SIGKILL)
        ends = [list(chunks)[-1] for chunks in (one, other)]
    broken = [end for end in ends if "error" in end]
    assert len(broken) == 1 and broken[0]["error"]["type"] == "server_error", ends
    (whole,) = (end for end in ends if "error" not in end)
    assert whole["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert deployment.chat(QUESTION)["choices"], "the other one goes on"
    wait_until(lambda: not is_alive(victim), 10)
    wait_until(lambda: len(set(deployment.figures("up")) - names) == 1, 120)
    assert len(deployment.figures("up")) == 2
    wait_until(lambda: len(deployment.engines()) == 2, 10)


def test_behind_haproxy_it_is_the_same(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")  # 30 else
    deployment = Deployment(tmp_path)
    try:
        deployment.wait(1)
        whole = deployment.chat(QUESTION)
        check_chat(whole, llm, QUESTION)
        with deployment.stream(QUESTION) as chunks:
            check_stream(list(chunks), whole)
        with deployment.stream("Hello!", **(LONG | {"max_tokens": 6000})) as chunks:
            next(chunks)
        wait_until(lambda: not sum(deployment.figures("num_requests_running").values()), 5)
        with deployment.stream("Hello!", **LONG) as chunks:
            next(chunks)
            os.kill(deployment.engines()[0], signal.SIGKILL)
            assert list(chunks)[-1]["error"]["type"] == "server_error"
    finally:
        deployment.close()


def test_replicas_come_with_the_queue_and_go(tmp_path: Path) -> None:
    deployment = Deployment(
        tmp_path,
        replicas=1,
        max_replicas=2,
        target_requests=2,
        upscale_delay=1,
        downscale_delay=3,
    )
    try:
        deployment.wait(1)
        assert deployment.post("/pause")["status"] == 404
        with ExitStack() as stack:
            fields = LONG | {"max_tokens": 7000}
            streams = [stack.enter_context(deployment.stream(f"{n}!", **fields)) for n in range(4)]
            assert all(next(one) for one in streams)
            deployment.wait(2)
            with deployment.stream("Hello!", **LONG) as chunks:  # to the new one, which is idle
                next(chunks)
                assert sorted(deployment.figures("num_requests_running").values()) == [1, 4]
            assert all("error" not in next(one) for one in streams)
        with ExitStack() as stack:  # one of these replicas ends, and answers first
            streams = [stack.enter_context(deployment.stream(f"{n}?", **LONG)) for n in range(2)]
            assert all(next(one) for one in streams)
            assert set(deployment.figures("num_requests_running").values()) == {1.0}
            for *_, last in streams:
                assert last["usage"]["completion_tokens"] == LONG["max_tokens"]
        wait_until(lambda: len(deployment.figures("up")) == 1, 60)
        wait_until(lambda: len(deployment.engines()) == 1, 40)
        assert deployment.chat(QUESTION)["choices"]
    finally:
        deployment.close()


def test_a_replica_of_two_ranks_answers_alike(tmp_path: Path, llm: LLM) -> None:
    deployment = Deployment(tmp_path, tensor_model_parallel_size=2)
    try:
        deployment.wait(1)
        (expected,) = llm.chat(
            [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0)
        )
        assert deployment.chat(QUESTION)["choices"][0]["message"]["content"] == expected.text
        assert len(deployment.pids("ray::Rank")) == 1 and len(deployment.engines()) == 2
        (name,), old = deployment.figures("up"), deployment.engines()
        os.kill(deployment.pids("ray::Rank")[0], signal.SIGKILL)
        wait_until(lambda: set(deployment.figures("up")) not in ({name}, set()), 120)
        assert deployment.chat(QUESTION)["choices"][0]["message"]["content"] == expected.text
        assert not any(map(is_alive, old)) and len(deployment.engines()) == 2
        engines = deployment.engines()
    finally:
        deployment.close()
    wait_until(lambda: not any(map(is_alive, engines)), 10)
