"""Two workers behind Dynamo's front end, installed from PyPI: what docs/dynamo.md says works.

With TESTS=all, where ai-dynamo is installed; CI has neither it nor the minute that this takes.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ports import free_address
from megatron_hybrid import LLM, SamplingParams
from tests.dynamo.deployment import Deployment, Worker
from tests.server.deployed import check_chat, check_stream
from tests.server.running import is_alive, wait_until
from tests.thorough import thorough

pytest.importorskip("dynamo._core")
pytestmark = thorough

QUESTION = "The code of the gate is 7315, and the cat is called Pixel. What is the cat called?"
LONG = {"max_tokens": 600, "ignore_eos": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "open_gate",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "integer", "minimum": 0, "maximum": 9999}},
                "required": ["code"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("dynamo"))
    try:
        deployment.start("one")
        deployment.start("two")
        deployment.wait()
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


def test_a_completion_of_token_ids_has_log_probabilities(deployment: Deployment, llm: LLM) -> None:
    ids = llm.tokenizer.encode("The cat is called Pixel. The cat is called")
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (expected,) = llm.generate([ids], params)
    answer = deployment.completion(ids, max_tokens=3, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["text"] == expected.text and choice["finish_reason"] == "length"
    assert expected.logprobs is not None
    found = choice["logprobs"]["token_logprobs"]
    assert found == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])


def test_sampling_is_that_of_the_engine(deployment: Deployment, llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_k=20, seed=11, max_tokens=16)
    (expected,) = llm.chat([{"role": "user", "content": "Hello!"}], params)
    answer = deployment.chat("Hello!", temperature=1.5, top_k=20, seed=11, max_tokens=16)
    assert answer["choices"][0]["message"]["content"] == expected.text


def test_an_answer_follows_its_schema(deployment: Deployment) -> None:
    schema = TOOLS[0]["function"]["parameters"]  # type: ignore[index]
    form = {"type": "json_schema", "json_schema": {"name": "gate", "schema": schema}}
    answer = deployment.chat("The code of the gate is 7315. What is it?", response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"code"}


def test_a_forced_call_is_a_tool_call(deployment: Deployment) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = deployment.chat("The code of the gate is 7315. Open it!", max_tokens=100, **fields)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    assert call["function"]["name"] == "open_gate"
    assert json.loads(call["function"]["arguments"]).keys() == {"code"}


def test_the_second_turn_skips_the_first_wherever_it_went(deployment: Deployment) -> None:
    for number in range(4):
        messages = [
            {"role": "user", "content": f"My name is Robot {number}. " + "You answer kindly. " * 40}
        ]
        first = deployment.chat(messages, max_tokens=8)
        messages.append(first["choices"][0]["message"])
        messages.append({"role": "user", "content": "What is my name?"})
        usage = deployment.chat(messages, max_tokens=8)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"], (number, usage)
    computed = [one.figure("prompt_tokens_computed") for one in deployment.workers.values()]
    assert all(computed), "one worker took every chat"
    assert deployment.expected_hits() > 0, "the router knows of no block"


def test_a_prefix_is_shared_only_under_the_same_salt(deployment: Deployment) -> None:
    question = "A question of which nobody else knows. " * 8

    def cached(salt: str) -> int:
        answer = deployment.chat(question, cache_salt=salt, max_tokens=4)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("alice") == 0
    wait_until(lambda: cached("alice") > 0)  # on the worker that has it
    assert cached("bob") == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 100_000}, "max_tokens is 100000, but prompt has"),
        ({"n": 2, "temperature": 1}, "n is 2: Dynamo's front end"),
        ({"nvext": {"max_thinking_tokens": 5}}, "needs a model that marks its thoughts"),
    ],
)
def test_what_can_not_be_served_is_refused_with_a_sentence(
    deployment: Deployment, fields: dict[str, object], words: str
) -> None:
    answer = deployment.chat("Hello!", **fields)
    assert answer["status"] == 400 and words in answer["message"]


def test_a_client_that_is_gone_is_no_longer_served(deployment: Deployment) -> None:
    with deployment.stream("Hello!", **(LONG | {"max_tokens": 6000})) as chunks:
        next(chunks)
        running = [one.figure("num_requests_running") for one in deployment.workers.values()]
        assert sum(running) == 1
    wait_until(
        lambda: not any(one.figure("num_requests_running") for one in deployment.workers.values()),
        5,
    )


def test_the_engine_is_paused_and_its_cache_emptied(deployment: Deployment) -> None:
    worker = deployment.workers["one"]
    assert worker.control("pause", mode="keep")["status"] == "ok" and worker.figure("paused") == 1
    assert worker.control("resume")["status"] == "ok" and worker.figure("paused") == 0
    assert worker.control("reset_prefix_cache")["status"] == "ok"
    assert worker.figure("kv_blocks_cached") == 0
    assert worker.control("pause", mode="now")["message"].startswith("mode is 'now'; it must be")


def test_a_worker_that_is_told_to_end_answers_first(deployment: Deployment) -> None:
    with deployment.stream("Hello!", **LONG) as chunks:
        next(chunks)
        worker = _busy(deployment)
        engine = worker.engine_pids()
        worker.process.send_signal(signal.SIGTERM)
        *_, last = chunks
    assert last["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert worker.process.wait(30) == 0
    assert engine and not any(map(is_alive, engine))
    _bring_back(deployment, worker)


def test_streams_of_a_killed_worker_go_on_elsewhere_and_it_comes_back(
    deployment: Deployment,
) -> None:
    with deployment.stream("Hello!", **LONG) as chunks:
        next(chunks)
        worker = _busy(deployment)
        engine = worker.engine_pids()
        worker.process.kill()
        *_, last = chunks
    assert last["usage"]["completion_tokens"] == LONG["max_tokens"]
    wait_until(lambda: not any(map(is_alive, engine)), 10)
    _bring_back(deployment, worker)
    wait_until(lambda: _answers(deployment, worker))


def test_a_worker_without_its_engine_ends_for_its_supervisor(deployment: Deployment) -> None:
    with deployment.stream("Hello!", **LONG) as chunks:
        next(chunks)
        worker = _busy(deployment)
        (engine,) = worker.engine_pids()
        os.kill(engine, signal.SIGKILL)
        *_, last = chunks
    assert last["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert worker.process.wait(60) == 1
    assert "The engine process ended with exit code -9" in worker.log.read_text()
    _bring_back(deployment, worker)


def test_a_worker_of_two_ranks_answers_alike(tmp_path: Path, llm: LLM) -> None:
    deployment = Deployment(tmp_path)
    try:
        worker = deployment.start("ranks", "-tp", "2")
        deployment.wait()
        (expected,) = llm.chat(
            [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0)
        )
        assert deployment.chat(QUESTION)["choices"][0]["message"]["content"] == expected.text
        assert len(worker.engine_pids()) == 3, "the launcher and two ranks"
        engine = worker.engine_pids()
    finally:
        deployment.close()
    assert worker.process.returncode == 0 and not any(map(is_alive, engine))


def test_a_prompt_is_computed_by_one_worker_and_answered_by_another(
    tmp_path: Path, llm: LLM
) -> None:
    pytest.importorskip("nixl_cu13", reason="needs NIXL")
    address, host = free_address(), ("--prefix-caching-host-gb", "0.1")
    deployment = Deployment(tmp_path)
    try:
        flags = ("--role", "prefill", "--disaggregation-listen", address)
        prefill = deployment.start("prefill", *flags, *host)
        flags = ("--role", "decode", "--disaggregation-peers", address)
        decode = deployment.start("decode", *flags, *host)
        deployment.wait()
        question = "The cat is called Pixel. " * 40 + QUESTION
        wait_until(lambda: _is_prefilled(deployment, prefill))
        answer = deployment.chat(question, max_tokens=8)
        (expected,) = llm.chat(
            [{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=8)
        )
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert decode.figure("tier_tokens_fetched") >= answer["usage"]["prompt_tokens"] > 200
        computed = decode.figure("prompt_tokens_computed")
        with deployment.stream(question.replace("Pixel", "Rex"), max_tokens=8) as chunks:
            assert list(chunks)[-1]["usage"]["completion_tokens"] > 1
        assert decode.figure("prompt_tokens_computed") == computed
        prefill.end()
        wait_until(lambda: deployment.chat("Hello!", max_tokens=2).get("status") == 503)
        flags = ("--role", "prefill", "--disaggregation-listen", address)
        deployment.start("prefill", *flags, *host)
        deployment.wait()
        wait_until(lambda: "choices" in deployment.chat("Hello!", max_tokens=2))
    finally:
        deployment.close()


def _is_prefilled(deployment: Deployment, worker: Worker) -> bool:
    """Whether the front end knows the prefill worker, which it may learn after the other one."""
    deployment.chat(f"Hello! {os.urandom(8).hex()}", max_tokens=2)
    return worker.figure("generation_tokens") > 0


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ((), {"DYN_KV_CACHE_BLOCK_SIZE": "16"}, "but DYN_KV_CACHE_BLOCK_SIZE is 16"),
        (("--load", "nowhere"), {}, "nowhere"),
        (("--endpoint", "a.b"), {}, "Invalid endpoint format: 'a.b'"),
        (("--max-queue", "3"), {}, "--max-queue is no flag"),
    ],
)
def test_wrong_flags_are_answered_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    worker = Worker(tmp_path, "wrong", *flags, **environment)
    assert worker.process.wait(60) == 2
    assert words in worker.log.read_text()


def _busy(deployment: Deployment) -> Worker:
    """The worker that has a request."""
    (busy,) = [one for one in deployment.workers.values() if one.figure("num_requests_running")]
    return busy


def _bring_back(deployment: Deployment, ended: Worker) -> None:
    (name,) = [name for name, worker in deployment.workers.items() if worker is ended]
    deployment.start(name)
    deployment.wait()


def _answers(deployment: Deployment, before: Worker) -> bool:
    """Whether both workers have taken requests, as new chats go to the one with less to do."""
    deployment.chat(f"Hello! {os.urandom(8).hex()}", max_tokens=2)
    return all(one.figure("generation_tokens") for one in deployment.workers.values())
