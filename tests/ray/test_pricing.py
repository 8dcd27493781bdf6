"""What a replica says of a prompt, with its server and without Ray."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_hybrid.ray.arguments import options_of_server
from megatron_hybrid.ray.messages import Price
from megatron_hybrid.ray.ports import free_port
from megatron_hybrid.ray.pricing import Pricing
from megatron_hybrid.ray.process import FirstRank, rank_environment
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from tests.server.running import is_alive, wait_until

FLAGS = ("--device=cpu",)
CHATS = "/v1/chat/completions"


class Asker:
    """A rank's process, and what it says of prompts."""

    def __init__(self) -> None:
        environment = rank_environment(0, 1, "127.0.0.1", free_port(), [0], [])
        self.process = FirstRank(FLAGS, environment)
        self._engine = ReplicaSet([self.process.folder.engine_endpoint(0)])
        self._engine.join("")
        wait_until(lambda: self._engine.ready is not None or self.process.exit_code is not None, 60)
        assert self._engine.ready is not None, self.process.last_words()
        self.pid = self._engine.ready.pid
        self.pricing = Pricing(options_of_server(FLAGS), self.process.folder, self._engine.ready)

    def price(self, name: str, path: str, **body: Any) -> Price | None:
        return self.pricing.ask(name, path, {}, json.dumps(body).encode()).result(10)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self.process.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def close(self) -> None:
        self.pricing.close()
        self._engine.close()
        self.process.end(30)


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    asker = Asker()
    try:
        yield asker
    finally:
        asker.close()
    assert asker.process.exit_code == 0 and not is_alive(asker.pid)
    assert not asker.process.folder.path.exists()


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_the_next_turn_skips_the_last_one_with_its_answer(asker: Asker) -> None:
    chat = messages("My name is Ada. " + "You answer kindly. " * 40)
    before = asker.price("first", CHATS, messages=chat)
    assert before is not None and before.skips == 0 and before.delay >= before.tokens > 64
    answer = asker.post(CHATS, messages=chat, max_tokens=8)
    chat = [*chat, answer["choices"][0]["message"], *messages("What is my name?")]
    usage = answer["usage"]
    least = usage["prompt_tokens"] + usage["completion_tokens"] - 1

    def skips() -> int:
        price = asker.price("second", CHATS, messages=chat)
        assert price is not None
        return price.skips

    wait_until(lambda: skips() >= least, 10)
    known = skips()
    said = asker.post(CHATS, messages=chat, max_tokens=8)["usage"]
    assert said["prompt_tokens_details"]["cached_tokens"] == known


def test_prompts_in_token_ids_have_the_price_of_their_text(asker: Asker) -> None:
    ids, params = list(range(40, 340)), {"max_tokens": 4}
    asked = {
        "/v1/completions": {"prompt": ids, **params},
        "/generate": {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}},
        "/inference/v1/generate": {"token_ids": ids, "sampling_params": params},
    }
    prices = {asker.price(path, path, **body) for path, body in asked.items()}
    (price,) = prices
    assert price is not None and price.tokens == len(ids)


def test_a_prompt_that_parts_behind_the_last_state_skips_to_the_state(asker: Asker) -> None:
    """KV blocks alone would say more."""
    text = "A long story of a cat and a gate. " * 60
    asker.post("/v1/completions", prompt=text, max_tokens=1)
    parting = text[: len(text) // 2] + "And then came a dog."
    price = asker.price("parting", "/v1/completions", prompt=parting)
    usage = asker.post("/v1/completions", prompt=parting, max_tokens=1)["usage"]
    assert price is not None
    assert price.skips == usage["prompt_tokens_details"]["cached_tokens"]


def test_requests_that_run_delay_the_next_one(asker: Asker) -> None:
    body = {"prompt": "Once upon a time. " * 100, "cache_salt": "alone"}
    first = asker.price("one", "/v1/completions", **body)
    asker.pricing.begin("one").result(10)
    there = asker.price("two", "/v1/completions", **body)
    assert first is not None and there is not None and there.answers == 1
    assert there.skips > 0, "a prompt that is computed counts as cached"
    asker.pricing.begin("nobody asked").result(10)
    third = asker.price("three", "/v1/completions", **body)
    assert third is not None and third.answers == 2
    asker.pricing.end("nobody asked")
    asker.pricing.start("one")
    asker.pricing.end("one")
    after = asker.price("four", "/v1/completions", **body)
    assert after is not None and (after.answers, after.skips) == (0, 0)
    assert after.delay == first.delay


def test_a_stored_response_has_its_price_where_it_is(asker: Asker) -> None:
    stored = asker.post("/v1/responses", input="My name is Ada.", max_output_tokens=4)
    assert asker.price("a", "/v1/responses", input="?", previous_response_id=stored["id"])
    elsewhere = {"input": "?", "previous_response_id": "resp_" + "0" * 32}
    assert asker.price("b", "/v1/responses", **elsewhere) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHATS, {"messages": []}), (CHATS, {"messages": messages("Hi"), "max_tokens": -1})],
)
def test_what_is_refused_has_no_price(asker: Asker, path: str, body: dict[str, Any]) -> None:
    assert asker.price("wrong", path, **body) is None


def test_it_takes_little_time(asker: Asker) -> None:
    body = {"messages": messages("Hello! " * 200)}
    asker.price("warm", CHATS, **body)
    start = time.monotonic()
    for number in range(20):
        asker.price(f"{number}", CHATS, **body)
    assert (time.monotonic() - start) / 20 < 0.1
