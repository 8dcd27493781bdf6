from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.serving_http import HttpClient
from bench.serving_requests import OpenAIServer, Outcome, ServingRequest
from tests.tools.bench.scripted_server import CLOSE, ScriptedServer, answer_events, event

TEXT = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
END = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}
DONE = b"data: [DONE]\n\n"


def ask(
    server: ScriptedServer,
    request: ServingRequest | None = None,
    *,
    chat: bool = False,
    **more: Any,
) -> Outcome:
    async def main() -> Outcome:
        async with server.serve():
            client = HttpClient(server.url, more.pop("headers", None))
            endpoint = "/v1/chat/completions" if chat else "/v1/completions"
            measured = OpenAIServer(client, endpoint, "m", chat=chat, **more)
            outcome = await measured.send(request or ServingRequest("r", [1, 2, 3, 4], 3))
            client.close()
            return outcome

    return asyncio.run(main())


def test_a_stream_gives_text_counts_and_times() -> None:
    outcome = ask(ScriptedServer(seconds=0.05))
    assert (outcome.failure, outcome.text, outcome.finish_reason) == (None, "w0 w1 w2 ", "length")
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (4, 2, 3)
    assert len(outcome.arrivals) == 3 and len(outcome.inter_token_latencies) == 2
    assert outcome.time_to_first_token >= 0.05
    assert outcome.latency == pytest.approx(
        outcome.time_to_first_token + sum(outcome.inter_token_latencies)
    )
    assert outcome.time_per_output_token == pytest.approx(sum(outcome.inter_token_latencies) / 2)


def test_the_role_at_a_chats_beginning_is_no_token() -> None:
    def script(body: dict[str, Any]) -> list[Any]:
        role, *rest = answer_events(body, chat=True)
        return [role, 0.1, *rest]

    outcome = ask(ScriptedServer(script), chat=True)
    assert outcome.time_to_first_token >= 0.1 and len(outcome.arrivals) == 3


def test_reasoning_is_output() -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    end = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    outcome = ask(ScriptedServer(lambda body: [event(thought), event(end), DONE]), chat=True)
    assert (outcome.failure, outcome.text, len(outcome.arrivals)) == (None, "a", 2)


def test_bodies_are_openais() -> None:
    server = ScriptedServer()
    ask(server, fields={"temperature": 0.5}, headers={"Authorization": "Bearer k"})
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [1, 2, 3, 4],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    assert "Authorization: Bearer k\r\n" in server.headers[0]
    ask(server, ServingRequest("r", "hello", 3, {"seed": 1}), chat=True)
    body = server.bodies[1]
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 3 and body["seed"] == 1


def test_without_usage_an_event_counts_as_a_token() -> None:
    outcome = ask(ScriptedServer(lambda body: [event(TEXT), event(END), DONE]))
    assert (outcome.failure, outcome.output_tokens, outcome.cached_tokens) == (None, 2, None)


def test_an_answer_without_text_arrives_when_it_ends() -> None:
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
    outcome = ask(ScriptedServer(lambda body: [event(end), event(usage), DONE]))
    assert (outcome.failure, outcome.output_tokens, len(outcome.arrivals)) == (None, 1, 1)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((429, {"error": {"message": "the queue is full"}}), "HTTP 429", "the queue is full"),
        ((500, ["no object"]), "HTTP 500", "no object"),
        ([event(TEXT), event({"error": {"message": "broke"}}), DONE], "error event", "broke"),
        ([event(TEXT), event(END)], "incomplete stream", "last event"),
        ([event(TEXT), DONE], "incomplete stream", "last event"),
        ([DONE], "no answer", "without a token"),
        ([event(TEXT), CLOSE], "connection", "closed the connection"),
        ([b"data: {nonsense\n\n"], "bad event", ""),
    ],
)
def test_failures_have_kinds(answer: Any, kind: str, words: str) -> None:
    outcome = ask(ScriptedServer(lambda body: answer))
    assert outcome.failure == kind and words in outcome.error
    assert outcome.finished >= outcome.sent


def test_a_timeout_is_a_failure_and_closes_the_stream() -> None:
    server = ScriptedServer(lambda body: [event(TEXT), 30.0])
    outcome = ask(server, timeout=0.2)
    assert outcome.failure == "timeout" and "0.2 s" in outcome.error


def test_a_server_that_is_not_there_is_a_failure() -> None:
    async def main() -> Outcome:
        async with ScriptedServer().serve() as server:
            url = server.url
        measured = OpenAIServer(HttpClient(url), "/v1/completions", "m", chat=False)
        return await measured.send(ServingRequest("r", [1], 1))

    assert asyncio.run(main()).failure == "connection"
