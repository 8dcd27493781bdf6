"""The official `openai` client, over a socket: every field it has a name for, and ours besides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from werkzeug.serving import make_server

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from tests.server.fake_engine import FakeEngine

openai = pytest.importorskip("openai")

MESSAGES: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "somebody"},
]
SHARED: dict[str, Any] = {
    "model": "fake",
    "temperature": 0.0,
    "top_p": 0.5,
    "n": 2,
    "seed": 7,
    "stop": ["never this"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"50": 3},
    "user": "somebody",
}
OURS: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "priority": -1,
    "cache_salt": "mine",
    "cache_checkpoints": [4],
    "timeout": 60,
}


@pytest.fixture
def client(serving: Serving) -> Iterator[Any]:
    server = make_server("127.0.0.1", 0, create_app(serving), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client:
        yield client
    server.shutdown()
    thread.join(10)


def check_params(engine: FakeEngine, max_tokens: int) -> None:
    params = engine.added[-1].params
    assert params.max_tokens == max_tokens
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.125, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.logit_bias, params.min_tokens) == (((50, 3.0),), 2)
    assert (params.seed, params.n, params.top_p) == (7, 2, 0.5)
    assert (params.stop, params.stop_token_ids) == (("never this",), (3,))
    assert (engine.added[-1].cache_salt, engine.added[-1].priority) == ("mine", -1)


def test_a_chat_with_every_field(client: Any, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "text"},
        extra_body={**OURS, "chat_template_kwargs": {"greeting": "Sure:"}},
        **SHARED,
    )
    check_params(engine, 4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content) == 4
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_adds_up_to_the_whole(client: Any) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, **SHARED}
    whole = client.chat.completions.create(**body)
    texts = ["", ""]
    chunks = list(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []


def test_a_response_format_is_handed_on(client: Any, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=2,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
    )
    grammar = engine.added[-1].params.grammar
    assert grammar is not None
    assert '"integer"' in grammar.text


def test_a_completion_with_every_field(client: Any, engine: FakeEngine) -> None:
    answer = client.completions.create(
        prompt="abc def",
        max_tokens=4,
        logprobs=2,
        echo=True,
        best_of=1,
        suffix=None,
        extra_body=OURS,
        **SHARED,
    )
    check_params(engine, 4)
    assert answer.choices[0].text.startswith("abc def")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.choices[0].logprobs.text_offset[0] == 0


def test_a_streamed_completion_adds_up_to_the_whole(client: Any) -> None:
    body: dict[str, Any] = {"prompt": [[5, 6, 7, 8, 9], [7, 8, 9, 10]], "max_tokens": 6, **SHARED}
    whole = client.completions.create(**body)
    texts = [""] * 4
    for chunk in client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_models_are_listed_and_errors_have_the_clients_classes(
    client: Any, engine: FakeEngine
) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", extra_body={"surprise": 1})
    assert (bad.value.param, bad.value.code) == ("surprise", "unknown_parameter")
    engine.step_seconds = 0.05
    slow: dict[str, Any] = {"model": "fake", "prompt": "abc", "max_tokens": 100, "temperature": 0}
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(**slow, extra_body={"timeout": 0.2})
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    with pytest.raises(openai.APIError, match="given up after"):
        list(client.completions.create(**slow, stream=True, extra_body={"timeout": 0.3}))
