from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.serving_clients import Clients, ClientSettings, planned_requests
from bench.serving_conversations import (
    Conversation,
    Turn,
    draw,
    load_conversations,
)
from bench.serving_datasets import DatasetError
from bench.serving_http import HttpClient
from bench.serving_requests import OpenAIServer
from bench.serving_tokens import TokenSource
from tests.tools.bench.scripted_server import ScriptedServer, answer_events

WORDS = TokenSource(None)


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def chats(count: int, turns: int) -> list[Conversation]:
    return [
        Conversation(f"c{c}", tuple(Turn(f"{c}:{t}", 2) for t in range(turns)), f"system {c}")
        for c in range(count)
    ]


def run(
    server: ScriptedServer, conversations: list[Conversation], settings: ClientSettings
) -> Clients:
    async def main() -> Clients:
        async with server.serve():
            client = HttpClient(server.url)
            measured = OpenAIServer(client, "/v1/chat/completions", "m", chat=True)
            clients = Clients(measured, conversations, settings)
            await clients.run()
            client.close()
            return clients

    return asyncio.run(main())


def test_every_prompt_holds_all_earlier_answers() -> None:
    server = ScriptedServer()
    clients = run(server, chats(1, 3), ClientSettings())
    answer = {"role": "assistant", "content": "w0 w1 "}
    said = [{"role": "system", "content": "system 0"}, {"role": "user", "content": "0:0"}]
    assert server.bodies[0]["messages"] == said
    said += [answer, {"role": "user", "content": "0:1"}]
    assert server.bodies[1]["messages"] == said
    said += [answer, {"role": "user", "content": "0:2"}]
    assert server.bodies[2]["messages"] == said
    assert clients.histories["c0"] == [*said, answer]
    assert [outcome.request_id for outcome in clients.outcomes] == ["c0.0", "c0.1", "c0.2"]


def test_a_client_sends_one_request_at_a_time() -> None:
    server = ScriptedServer(seconds=0.02)
    clients = run(server, chats(9, 2), ClientSettings(num_clients=3, early_stop=False))
    assert server.peak == 3 and len(clients.outcomes) == 18


@pytest.mark.parametrize("sampling", ["round_robin", "random"])
def test_a_conversations_turns_are_in_order(sampling: str) -> None:
    settings = ClientSettings(max_active_conversations=4, sampling=sampling)
    clients = run(ScriptedServer(), chats(6, 3), settings)
    order = [outcome.request_id for outcome in clients.outcomes]
    assert sorted(order) == sorted(f"c{c}.{t}" for c in range(6) for t in range(3))
    for c in range(6):
        assert [name for name in order if name.startswith(f"c{c}.")] == [
            f"c{c}.{t}" for t in range(3)
        ]
    rotated = [f"c{c}.{t}" for t in range(3) for c in range(4)]
    assert (order[:4] == rotated[:4]) == (sampling == "round_robin")


def test_max_turns_counts_both_sides() -> None:
    for max_turns, requests in ((1, 1), (2, 1), (3, 2), (4, 2), (100, 5)):
        settings = ClientSettings(max_turns=max_turns)
        server = ScriptedServer()
        run(server, chats(1, 5), settings)
        assert len(server.bodies) == planned_requests(chats(1, 5), settings) == requests


def test_max_num_requests_is_of_all_clients() -> None:
    server = ScriptedServer(seconds=0.01)
    run(server, chats(8, 5), ClientSettings(num_clients=4, max_num_requests=10))
    assert len(server.bodies) == 10


def test_all_clients_stop_with_the_first() -> None:
    short, *long = chats(2, 40)
    short = Conversation("short", short.turns[:1])
    for early_stop in (True, False):
        server = ScriptedServer(seconds=0.01)
        run(server, [short, *long], ClientSettings(num_clients=2, early_stop=early_stop))
        assert (len(server.bodies) == 41) == (not early_stop)


def test_a_conversation_ends_with_its_first_failure() -> None:
    def script(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] == "0:1":
            return (503, {"error": {"message": "down"}})
        return answer_events(body, chat=True)

    server = ScriptedServer(script)
    clients = run(server, chats(2, 4), ClientSettings())
    failures = [outcome.failure for outcome in clients.outcomes]
    assert failures.count("HTTP 503") == 1 and len(failures) == 2 + 4


def test_limits_go_before_the_files_lengths() -> None:
    server = ScriptedServer()
    run(server, chats(1, 1), ClientSettings(limit_max_tokens=7, limit_min_tokens=3))
    body = server.bodies[0]
    assert (body["max_completion_tokens"], body["min_tokens"]) == (7, 3)
    server = ScriptedServer()
    run(server, chats(1, 1), ClientSettings())
    assert server.bodies[0]["max_completion_tokens"] == 2
    assert "min_tokens" not in server.bodies[0]


def test_what_cannot_be_run_is_said_before_the_start() -> None:
    unknown = [Conversation("c", (Turn("a"),))]
    with pytest.raises(DatasetError, match="--limit-max-tokens"):
        run(ScriptedServer(), unknown, ClientSettings())
    with pytest.raises(DatasetError, match="--max-active-conversations"):
        run(ScriptedServer(), chats(9, 1), ClientSettings(8, max_active_conversations=4))


def test_generated_conversations_follow_the_file(tmp_path: Path) -> None:
    def constant(value: int) -> dict[str, Any]:
        return {"distribution": "constant", "value": value}

    path = tmp_path / "c.json"
    settings = {
        "filetype": "generate_conversations",
        "num_conversations": 3,
        "prompt_input": {
            "num_turns": constant(6),
            "common_prefix_num_tokens": constant(10),
            "prefix_num_tokens": constant(5),
            "num_tokens": constant(4),
        },
        "prompt_output": {"num_tokens": constant(8)},
    }
    path.write_text(json.dumps(settings))
    made = load_conversations(path, WORDS, generator())
    assert made == load_conversations(path, WORDS, generator())
    assert [len(one.turns) for one in made] == [3, 3, 3]
    first = [one.turns[0].text.split() for one in made]
    assert [len(words) for words in first] == [19, 19, 19]
    assert first[0][:10] == first[1][:10] and first[0][10:] != first[1][10:]
    assert [len(turn.text.split()) for turn in made[0].turns[1:]] == [4, 4]
    assert {turn.max_tokens for one in made for turn in one.turns} == {8}
    del settings["prompt_output"]
    path.write_text(json.dumps(settings))
    with pytest.raises(DatasetError, match="prompt_output"):
        load_conversations(path, WORDS, generator())


def test_without_a_file_there_are_some() -> None:
    made = load_conversations(None, WORDS, generator())
    assert len(made) == 24 and all(3 <= len(one.turns) <= 6 for one in made)


def test_conversations_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path.write_text(json.dumps([{"id": "x", "messages": messages}]))
    assert load_conversations(path, WORDS, generator()) == [
        Conversation("x", (Turn("a"), Turn("c")), "s")
    ]
    path.write_text(json.dumps([{"id": "x", "messages": messages[2:]}]))
    with pytest.raises(DatasetError, match="message 0 is of 'assistant'"):
        load_conversations(path, WORDS, generator())


def test_distributions() -> None:
    def values(spec: dict[str, Any]) -> list[int]:
        source = generator()
        return [draw("size", spec, source) for _ in range(4000)]

    assert set(values({"distribution": "constant", "value": 5})) == {5}
    assert set(values({"distribution": "uniform", "min": 2, "max": 4})) == {2, 3, 4}
    lognormal = values({"distribution": "lognormal", "average": 1000, "median_ratio": 0.8})
    assert np.mean(lognormal) == pytest.approx(1000, rel=0.05)
    assert np.median(lognormal) == pytest.approx(800, rel=0.05)
    assert np.mean(values({"distribution": "poisson", "alpha": 10})) == pytest.approx(10, rel=0.05)
    zipf = values({"distribution": "zipf", "alpha": 1.5, "max": 9})
    assert max(zipf) == 9 and zipf.count(1) > zipf.count(2)
    for spec in ({"distribution": "normal"}, {"distribution": "uniform", "min": 1}):
        with pytest.raises(DatasetError, match="size"):
            values(spec)
