"""`echo`: a completion begins with its prompt, and the prompt has log-probabilities too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_answers import COMPLETION, GREEDY, complete, events

PROMPT = "x!abcdefgh"  # a token each


def choices(http: FlaskClient, stream: bool, **body: Any) -> list[dict[str, Any]]:
    """The choices, whole; of a stream, put together from its chunks."""
    if not stream:
        return list(complete(http, **body)["choices"])
    whole: dict[int, dict[str, Any]] = {}
    for chunk in events(http, COMPLETION, body):
        (piece,) = chunk["choices"]
        choice = whole.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            lists = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
            choice["logprobs"] = {name: lists[name] + piece["logprobs"][name] for name in lists}
    return [whole[index] for index in sorted(whole)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_comes_before_the_answer_of_every_choice(
    http: FlaskClient, tokenizer: Tokenizer, stream: bool
) -> None:
    body = {"echo": True, "n": 2, "max_tokens": 3}
    got = choices(http, stream, prompt=[PROMPT, "ab<eos>cd"], **body)
    assert [one["text"] for one in got] == [
        f"{PROMPT}x!a",
        f"{PROMPT}!ab",
        "ab<eos>cdab",  # then the end of the sequence, which ends the answer
        "ab<eos>cdb",
    ]
    ids = tokenizer.encode("ab<eos>cd")
    (from_ids,) = choices(http, stream, prompt=ids, echo=True, max_tokens=1)
    assert from_ids["text"] == "ab<eos>cda"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, "naïve 日本 😀<eos>!"])
def test_the_prompts_tokens_have_logprobs_but_the_first(
    http: FlaskClient, tokenizer: Tokenizer, engine: FakeEngine, prompt: str, stream: bool
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2, "max_tokens": 3}
    ids = tokenizer.encode(prompt)
    for choice in choices(http, stream, **body, ignore_eos=True):
        lists = choice["logprobs"]
        answer = len(lists["tokens"]) - len(ids)
        assert answer == 3
        assert lists["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1) + [-0.5] * 3
        assert lists["top_logprobs"][0] is None
        assert len(lists["top_logprobs"]) == len(lists["text_offset"]) == len(ids) + 3
        assert lists["text_offset"][0] == 0
        assert lists["text_offset"][len(ids)] == len(prompt)
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert choice["text"][offset:].startswith(token)
    assert engine.added[-1].params.prompt_logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
def test_without_new_tokens_only_the_prompt_is_given(http: FlaskClient, stream: bool) -> None:
    body = {"prompt": [PROMPT, "abc"], "echo": True, "max_tokens": 0}
    got = choices(http, stream, **body)
    assert [one["text"] for one in got] == [PROMPT, "abc"]
    assert [one["finish_reason"] for one in got] == ["length", "length"]
    first, second = choices(http, stream, **body, logprobs=0)
    assert first["logprobs"]["tokens"] == list(PROMPT)
    assert first["logprobs"]["token_logprobs"] == [None] + [-1.0] * 9
    assert second["logprobs"]["text_offset"] == [0, 1, 2]


def test_a_prompt_alone_has_no_completion_tokens(http: FlaskClient) -> None:
    usage = complete(http, PROMPT, echo=True, max_tokens=0)["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 10
    assert usage["completion_tokens"] == 0


def test_offsets_inside_a_character_are_those_of_the_character(
    http: FlaskClient, tokenizer: Tokenizer
) -> None:
    prompt = "a😀b"
    ids = tokenizer.encode(prompt)
    assert len(ids) == 4, "the emoji is two tokens"
    lists = complete(http, prompt, max_tokens=4, logprobs=0)["choices"][0]["logprobs"]
    assert lists["text_offset"] == [0, 1, 1, 2]
    assert lists["tokens"][1].startswith("bytes:\\xf0")


def test_an_echo_asked_for_twice_reads_the_same_streamed_or_not(http: FlaskClient) -> None:
    body = {**GREEDY, "prompt": PROMPT, "echo": True, "logprobs": 1}
    whole = http.post(COMPLETION, json=body).get_json()["choices"]
    streamed = choices(http, True, prompt=PROMPT, echo=True, logprobs=1)
    assert json.dumps(whole, sort_keys=True) == json.dumps(streamed, sort_keys=True)
