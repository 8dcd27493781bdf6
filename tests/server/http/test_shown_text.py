"""What a text shows besides what was said: special tokens, and what ended it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

COMPLETION = "/v1/completions"
PROMPT = "ab<pad>cd<eos>e"  # which the answer repeats, up to the end


def choice(http: FlaskClient, stream: bool, **fields: Any) -> tuple[str, str]:
    """Its text, and why it ended."""
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "stream": stream, **fields}
    answer = http.post(COMPLETION, json=body)
    assert answer.status_code == 200, answer.data
    if not stream:
        (found,) = answer.get_json()["choices"]
        return found["text"], found["finish_reason"]
    *events, _, _ = answer.get_data(as_text=True).split("\n\n")
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return "".join(piece["text"] for piece in pieces), pieces[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "abcd"),
        ({"skip_special_tokens": True, "include_stop_str_in_output": False}, "abcd"),
        ({"skip_special_tokens": None, "include_stop_str_in_output": None}, "abcd"),
        ({"skip_special_tokens": False}, "ab<pad>cd"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<pad>cd<eos>"),
        ({"include_stop_str_in_output": True}, "abcd"),
        ({"include_stop_str_in_output": True, "stop": "cd"}, "abcd"),
        ({"include_stop_str_in_output": True, "stop": ["c", "bc"]}, "abc"),
        ({"stop": "c", "skip_special_tokens": False}, "ab<pad>"),
        ({"stop": "<pad>c", "skip_special_tokens": False}, "ab"),
        (
            {
                "stop": "<pad>c",
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
            },
            "ab<pad>c",
        ),
    ],
)
def test_special_tokens_and_ends_are_shown_where_that_is_wanted(
    http: FlaskClient, stream: bool, fields: dict[str, Any], text: str
) -> None:
    assert choice(http, stream, **fields) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_ends_the_answer_is_shown_as_its_text(http: FlaskClient, stream: bool) -> None:
    answer = http.post("/tokenize", json={"prompt": "d", "add_special_tokens": False})
    ends = {"stop_token_ids": answer.get_json()["tokens"]}
    assert choice(http, stream, **ends) == ("abc", "stop")
    assert choice(http, stream, **ends, include_stop_str_in_output=True) == ("abcd", "stop")


def test_ids_and_log_probabilities_go_with_the_text(http: FlaskClient) -> None:
    body = {"prompt": "ab<eos>", "max_tokens": 9, "temperature": 0, "logprobs": 1}
    for fields, shown in (({}, 2), ({"skip_special_tokens": False}, 2)):
        answer = http.post(COMPLETION, json={**body, **fields}).get_json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == shown
        assert answer["usage"]["completion_tokens"] == 3
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    answer = http.post(COMPLETION, json={**body, **fields}).get_json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "<eos>"]
    assert answer["usage"]["completion_tokens"] == 3


def test_a_turn_finds_an_answer_whose_end_was_shown(reference_http: FlaskClient) -> None:
    """The end that was generated stands in the next prompt once."""
    messages = [{"role": "user", "content": "Who keeps the gate?"}]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "return_token_ids": True}
    body["include_stop_str_in_output"] = True
    first = reference_http.post("/v1/chat/completions", json={**body, "messages": messages})
    (found,) = first.get_json()["choices"]
    assert found["finish_reason"] == "stop"
    messages += [found["message"], {"role": "user", "content": "And then?"}]
    more = reference_http.post("/v1/chat/completions", json={**body, "messages": messages})
    prompt = more.get_json()["prompt_token_ids"]
    ids, before = found["token_ids"], first.get_json()["prompt_token_ids"]
    assert prompt[: len(before)] == before
    assert prompt[len(before) : len(before) + len(ids)] == ids
    assert prompt[len(before) + len(ids)] != ids[-1]
