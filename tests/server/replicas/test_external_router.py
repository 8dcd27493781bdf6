"""Two replicas behind routers as they come from the package index: what docs/routing.md says of
them."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron_hybrid.cache.block_hash import SequenceKeys, Tokens, root_key
from megatron_hybrid.kv_events import KVEventSubscriber
from tests.server.replicas.routers import COMMANDS, events, get, post, python_with, refusal, router
from tests.server.running import ServerProcess, wait_until

QUESTIONS = ["Hello! Who are you?", "And what can you do?", "What did I ask you first?"]


class Deployment(NamedTuple):
    router: str  # its package
    url: str  # of the router
    servers: list[ServerProcess]
    endpoints: list[tuple[str, str]]  # of each one's KV events, and their replay


@pytest.fixture(scope="module", params=COMMANDS)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    python_with(request.param)
    folder = tmp_path_factory.mktemp("events")
    endpoints = [(f"ipc://{folder}/e{k}", f"ipc://{folder}/r{k}") for k in range(2)]

    def start(endpoint: str, replay: str) -> ServerProcess:
        events = {
            "enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay
        }  # fmt: skip
        return ServerProcess(
            *("-m", "megatron_hybrid.cli", "serve", "--device", "cpu", "--port", "0"),
            *("--engine-restart-timeout", "1", "--shutdown-timeout", "1"),
            *("--kv-events-config", json.dumps(events)),
        )

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            servers = list(pool.map(lambda pair: start(*pair), endpoints))
        for server in servers:
            stack.enter_context(server)
        urls = [server.url for server in servers]
        url = stack.enter_context(router(request.param, urls, folder))
        yield Deployment(request.param, url, servers, endpoints)


def chat(name: str) -> list[dict[str, str]]:
    """One whose text begins like no other's."""
    return [{"role": "system", "content": f"{name * 30} is your name. You answer kindly."}]


def ask(url: str, messages: list[dict[str, str]], question: str) -> dict[str, Any]:
    """One more turn; the usage."""
    messages.append({"role": "user", "content": question})
    body = {"model": "reference_model", "messages": messages, "max_tokens": 12, "temperature": 0}
    answer = post(f"{url}/v1/chat/completions", body)
    messages.append(answer["choices"][0]["message"])
    return answer["usage"]


def prompt_tokens(server: ServerProcess) -> int:
    return get(f"{server.url}/stats")["engine"]["prompt_tokens"]


def ask_and_see_who_takes_it(
    deployment: Deployment, messages: list[dict[str, str]], question: str
) -> tuple[dict[str, Any], int]:
    """The usage, and the replica."""
    before = [prompt_tokens(server) for server in deployment.servers]
    usage = ask(deployment.url, messages, question)
    after = [prompt_tokens(server) for server in deployment.servers]
    (replica,) = (k for k in range(len(before)) if after[k] > before[k])
    return usage, replica


def test_the_router_learns_the_models_name(deployment: Deployment) -> None:
    (model,) = get(f"{deployment.url}/v1/models")["data"]
    assert model["id"] == "reference_model"


def test_chats_stay_with_the_replicas_that_have_them_cached(deployment: Deployment) -> None:
    chats = [chat(name) for name in ("Anna", "Bert", "Carl", "Dora")]
    with ThreadPoolExecutor(4) as pool:  # an idle router gives everything to the first replica
        before = list(pool.map(lambda messages: ask(deployment.url, messages, "Hi!"), chats))
    assert all(prompt_tokens(server) > 0 for server in deployment.servers), "one had nothing to do"
    for question in QUESTIONS:
        for which, messages in enumerate(chats):
            usage = ask(deployment.url, messages, question)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            # all that was computed for the turn before it
            assert cached == before[which]["total_tokens"] - 1
            before[which] = usage


def test_kv_events_tell_a_router_what_each_replica_would_skip(deployment: Deployment) -> None:
    messages = chat("Emil")
    ask(deployment.url, messages, QUESTIONS[0])
    subscribers = [KVEventSubscriber(*endpoints) for endpoints in deployment.endpoints]
    following = [*messages, {"role": "user", "content": QUESTIONS[1]}]
    # Each knows the tokens of the answers that it gave itself.
    prompts = [
        np.array(post(f"{server.url}/tokenize", {"messages": following})["tokens"], dtype=np.int32)
        for server in deployment.servers
    ]

    def skippable() -> list[int]:
        found = []
        for subscriber, tokens in zip(subscribers, prompts, strict=True):
            contents = subscriber.contents

            def text(start: int, end: int, tokens: Tokens = tokens) -> Tokens:
                return tokens[start:end]

            root = root_key(contents.epoch, stored_as=contents.stored_as)
            keys = SequenceKeys(root, contents.block_size, text)
            found.append(contents.skippable(keys, len(tokens)))
        return found

    def know_it() -> bool:
        for subscriber in subscribers:
            subscriber.receive()
        return all(subscriber.is_current for subscriber in subscribers) and any(skippable())

    wait_until(know_it)
    there = skippable()
    usage, took = ask_and_see_who_takes_it(deployment, messages, QUESTIONS[1])
    assert there[took] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert there[1 - took] == 0
    for server in deployment.servers:
        post(f"{server.url}/reset_prefix_cache", {})
    wait_until(lambda: not know_it() and not any(skippable()))
    for subscriber in subscribers:
        subscriber.close()


def test_answers_stream_through_the_router(deployment: Deployment) -> None:
    body = {
        "model": "reference_model",
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    *found, last = events(f"{deployment.url}/v1/chat/completions", body)
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in found]
    assert chunks[-1]["usage"]["completion_tokens"] == 200
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]]
    assert sum(bool(piece) for piece in pieces) > 1, "it came in one piece"


def test_a_tool_is_called_and_its_result_taken_back(deployment: Deployment) -> None:
    parameters = {
        "type": "object",
        "properties": {"name": {"enum": ["gate", "door"]}},
        "required": ["name"],
    }
    tool = {"type": "function", "function": {"name": "code_of", "parameters": parameters}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the code of the gate?"}]
    body = {"model": "reference_model", "tools": [tool], "temperature": 0, "max_tokens": 60}
    url = f"{deployment.url}/v1/chat/completions"
    only_one = {"tool_choice": "required", "parallel_tool_calls": False}
    asking = {**body, "messages": messages, **only_one}
    (choice,) = post(url, asking)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "code_of"
    assert list(json.loads(call["function"]["arguments"])) == ["name"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7315"}
    messages += [choice["message"], result]
    assert post(url, {**body, "messages": messages})["usage"]["completion_tokens"] > 0
    *found, _ = events(url, asking)
    deltas = [json.loads(event)["choices"][0]["delta"] for event in found]
    pieces = [one["function"] for delta in deltas for one in delta.get("tool_calls", [])]
    said = "".join(piece.get("arguments", "") for piece in pieces)
    assert json.loads(said) == json.loads(call["function"]["arguments"])


def test_texts_are_continued(deployment: Deployment) -> None:
    body = {"model": "reference_model", "prompt": "The cat is called", "max_tokens": 4}
    answer = post(f"{deployment.url}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 4


def test_responses_and_messages_go_through_smg_and_vllms(deployment: Deployment) -> None:
    asked = {"model": "reference_model", "input": "Hello!", "max_output_tokens": 8}
    turns = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    response, message = f"{deployment.url}/v1/responses", f"{deployment.url}/v1/messages"
    if deployment.router == "sglang_router":
        assert refusal(message, {**turns, "model": "reference_model"})[0] == 404
        return
    assert post(response, asked)["usage"]["output_tokens"] > 0
    *_, last = events(response, asked)
    assert json.loads(last)["type"] in ("response.completed", "response.incomplete")
    assert post(message, {**turns, "model": "reference_model"})["usage"]["output_tokens"] > 0
    *_, last = events(message, {**turns, "model": "reference_model"})
    assert json.loads(last)["type"] == "message_stop"


def test_a_stored_response_is_found_where_the_router_asks_every_server(
    deployment: Deployment,
) -> None:
    url = f"{deployment.url}/v1/responses"
    made = post(url, {"model": "reference_model", "input": "Hello!", "max_output_tokens": 8})
    if deployment.router == "smg":  # looks among its own alone
        with pytest.raises(urllib.error.HTTPError) as missing:
            get(f"{url}/{made['id']}")
        with missing.value as error:
            assert error.code == 404
    else:
        assert get(f"{url}/{made['id']}") == made


def test_the_router_knows_the_load_of_each_server(deployment: Deployment) -> None:
    if deployment.router == "sglang_router":
        return  # it counts its own requests
    url = f"{deployment.url}/get_loads"
    if deployment.router == "smg":  # asks every ten seconds
        wait_until(lambda: len(get(url)["loads"]) == len(deployment.servers), 30)
        loads = get(url)["loads"]
        assert [one["num_total_reqs"] for one in loads] == [0, 0]
        assert all(one["max_total_num_tokens"] > 0 for one in loads)
    else:  # -1 would be unknown
        assert [one["load"] for one in get(url)["workers"]] == [0, 0]


def test_a_wrong_request_gets_our_own_error(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "reference_model", "messages": messages, "max_tokens": 10**9}
    status, answer = refusal(f"{deployment.url}/v1/chat/completions", body)
    assert status == 400
    renames = deployment.router == "sglang_router"
    field = "max_completion_tokens" if renames else "max_tokens"
    assert json.loads(answer)["error"]["param"] == field


def test_when_one_replica_is_killed_the_other_serves(deployment: Deployment) -> None:
    """The last test: it takes one of the replicas away."""
    messages = chat("Fred")
    _, replica = ask_and_see_who_takes_it(deployment, messages, QUESTIONS[0])
    deployment.servers[replica].process.kill()
    for question in QUESTIONS[1:]:
        assert ask(deployment.url, messages, question)["completion_tokens"] > 0
    for name in ("Gina", "Hugo", "Ida"):
        ask(deployment.url, chat(name), QUESTIONS[0])
    assert get(f"{deployment.servers[1 - replica].url}/health")["status"] == "ok"
