"""`return_token_ids`: the ids of prompts and answers, streamed or not, as vLLM gives them."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import RequestEvent
from megatron_hybrid.server.http.choice import Choice
from megatron_hybrid.server.http.protocol.generation_request import parse_completion
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_answers import CHAT, COMPLETION, GREEDY, chat, complete, events

LETTERS = "x!abcdefgh"  # a token each
WITH_IDS = {"return_token_ids": True}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def test_a_completions_choices_have_the_ids_of_their_prompt_and_their_answer(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    ids = [tokenizer.encode(LETTERS), tokenizer.encode("abc")]
    answer = complete(http, [LETTERS, "abc"], n=2, max_tokens=2, **WITH_IDS)
    choices = answer["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [ids[0], ids[0], ids[1], ids[1]]
    assert [choice["token_ids"] for choice in choices] == [
        tokenizer.encode(text) for text in ("x!", "!a", "ab", "bc")
    ]
    assert "prompt_token_ids" not in answer


def test_a_chat_has_its_prompts_ids_once(http: FlaskClient, tokenizer: Tokenizer) -> None:
    answer = chat(http, "Hello", n=2, ignore_eos=True, **WITH_IDS)
    prompt = http.post("/tokenize", json=HELLO).get_json()["tokens"]
    assert answer["prompt_token_ids"] == prompt
    for index, choice in enumerate(answer["choices"]):
        assert choice["token_ids"] == prompt[index : index + 6]
        assert "prompt_token_ids" not in choice


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_streamed_completions_ids_add_up(
    http: FlaskClient, tokenizer: Tokenizer, logprobs: int | None
) -> None:
    prompts = ["naïve 日本 😀!", LETTERS]
    body = {"prompt": prompts, "max_tokens": 12, "ignore_eos": True, **WITH_IDS}
    chunks = events(http, COMPLETION, {**body, "logprobs": logprobs})
    pieces = [chunk["choices"][0] for chunk in chunks]
    for index, whole in enumerate(complete(http, **body)["choices"]):
        own = [piece for piece in pieces if piece["index"] == index]
        assert own[0]["prompt_token_ids"] == tokenizer.encode(prompts[index])
        assert all("prompt_token_ids" not in piece for piece in own[1:])
        assert [token for piece in own for token in piece["token_ids"]] == whole["token_ids"]
        assert "".join(piece["text"] for piece in own) == whole["text"]
        assert len(whole["token_ids"]) == 12
    assert all("prompt_token_ids" not in chunk for chunk in chunks)


def test_ids_do_not_wait_for_their_text(
    http: FlaskClient, tokenizer: Tokenizer, engine: FakeEngine
) -> None:
    engine.step_seconds = 0.03  # else one event may hold several tokens
    prompt = "😀"
    chunks = events(http, COMPLETION, {"prompt": prompt, "max_tokens": 2, **WITH_IDS})
    first, *rest = [chunk["choices"][0] for chunk in chunks]
    assert (first["text"], first["token_ids"]) == ("", tokenizer.encode(prompt)[:1])
    assert "".join(piece["text"] for piece in rest) == prompt


def test_a_streamed_chats_first_chunk_has_the_prompts_ids(http: FlaskClient) -> None:
    whole = chat(http, "Hello", n=2, ignore_eos=True, **WITH_IDS)
    usage = {"stream_options": {"include_usage": True}}
    body = {**HELLO, "n": 2, "ignore_eos": True, **WITH_IDS, **usage}
    first, *rest, last = events(http, CHAT, body)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["usage"] is None
    assert all("prompt_token_ids" not in chunk for chunk in [*rest, last])
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in rest if c["choices"][0]["index"] == index]
        got = [token for piece in own for token in piece.get("token_ids", [])]
        assert got == choice["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_answers_have_no_ids_unless_they_are_wanted(
    http: FlaskClient, path: str, stream: bool
) -> None:
    body = HELLO if path == CHAT else {"prompt": "Hello"}
    for fields in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        answer = http.post(path, json={**GREEDY, **body, **fields, "stream": stream})
        assert answer.status_code == 200
        assert b"token_ids" not in answer.data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["<eos>", "!"])
def test_the_id_that_ends_an_answer_is_one_of_them(
    http: FlaskClient, tokenizer: Tokenizer, end: str, stream: bool
) -> None:
    """As usage counts it, and as the next turn's prompt may need it."""
    prompt = tokenizer.encode(f"ab{end}cd")
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 9, **WITH_IDS}
    body["stop_token_ids"] = tokenizer.encode("!")
    if stream:
        choices = [chunk["choices"][0] for chunk in events(http, COMPLETION, body)]
    else:
        choices = complete(http, **body)["choices"]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert [token for choice in choices for token in choice["token_ids"]] == prompt[:3]


@pytest.mark.parametrize("stream", [False, True])
def test_ids_after_a_stop_string_are_none_of_them(
    http: FlaskClient, tokenizer: Tokenizer, stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": LETTERS, "stop": "bc", "max_tokens": 30, **WITH_IDS}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(http, COMPLETION, body)]
    else:
        choices = complete(http, **body)["choices"]
    assert "".join(choice["text"] for choice in choices) == "x!a"
    got = [token for choice in choices for token in choice["token_ids"]]
    assert got == tokenizer.encode("x!abc")  # the stop string was generated


def test_ids_behind_the_stop_string_in_one_event_are_none_of_them(tokenizer: Tokenizer) -> None:
    """A reader that is late gets several tokens at once."""
    body = {"prompt": LETTERS, "stop": "bc", **WITH_IDS}
    choice = Choice(0, tokenizer, parse_completion(body).generation)
    event = RequestEvent("cmpl-1", 0, prompt_tokens=3, token_ids=tokenizer.encode(LETTERS))
    delta = choice.advance(event)
    assert (delta.text, delta.finish_reason) == ("x!a", "stop")
    assert delta.token_ids == tokenizer.encode("x!abc")


def test_an_echo_alone_has_no_ids_of_an_answer(http: FlaskClient, tokenizer: Tokenizer) -> None:
    (choice,) = complete(http, "abc", echo=True, max_tokens=0, **WITH_IDS)["choices"]
    assert choice["text"] == "abc"
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (tokenizer.encode("abc"), [])
