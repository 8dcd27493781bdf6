"""Where a prompt begins and ends: truncate_prompt_tokens, add_generation_prompt and
continue_final_message."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TOKENIZE = "/tokenize"
HELLO = {"role": "user", "content": "Hello"}
BEGUN = {"role": "assistant", "content": "Good mor"}
UP_TO_IT = "<|user|>Hello<eos><|assistant|>Good mor"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, f"{UP_TO_IT}<eos><|assistant|>"),
        ({"add_generation_prompt": None}, f"{UP_TO_IT}<eos><|assistant|>"),
        ({"add_generation_prompt": True}, f"{UP_TO_IT}<eos><|assistant|>"),
        ({"add_generation_prompt": False}, f"{UP_TO_IT}<eos>"),
        ({"continue_final_message": True}, UP_TO_IT),
        ({"continue_final_message": True, "add_generation_prompt": False}, UP_TO_IT),
    ],
)
def test_a_chats_prompt_ends_as_is_wanted(
    http: FlaskClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
    wanted: str,
) -> None:
    body = {"messages": [HELLO, BEGUN], **fields}
    answer = http.post(CHAT, json={**body, "max_tokens": 2})
    assert answer.status_code == 200, answer.data
    text = tokenizer.decode(engine.added[-1].prompt, skip_special_tokens=False)
    assert text == wanted
    assert http.post(TOKENIZE, json=body).get_json()["tokens"] == engine.added[-1].prompt


@pytest.mark.parametrize(
    ("messages", "fields", "field"),
    [
        ([HELLO], {}, "continue_final_message"),
        ([HELLO, {**BEGUN, "content": None}], {}, "continue_final_message"),
        ([HELLO, {**BEGUN, "content": " \n"}], {}, "continue_final_message"),
        ([HELLO, BEGUN, HELLO], {}, "continue_final_message"),
        ([HELLO, BEGUN], {"add_generation_prompt": True}, "add_generation_prompt"),
        ([HELLO, BEGUN], {"add_generation_prompt": 1}, "add_generation_prompt"),
        ([HELLO, BEGUN], {"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
def test_what_has_no_such_end_is_refused(
    http: FlaskClient, messages: list[Any], fields: dict[str, Any], field: str
) -> None:
    body = {"messages": messages, "continue_final_message": True, **fields}
    for path in (CHAT, TOKENIZE):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.data
        assert answer.get_json()["error"]["param"] == field


def test_a_model_goes_on_with_its_own_answer(reference_http: FlaskClient) -> None:
    """With the tokens of the answer that was cut, remembered or not."""
    body: dict[str, Any] = {"messages": [HELLO], "temperature": 0, "return_token_ids": True}
    whole = reference_http.post(CHAT, json={**body, "max_tokens": 40}).get_json()["choices"][0]
    cut = reference_http.post(CHAT, json={**body, "max_tokens": 4}).get_json()
    first = cut["choices"][0]
    body["messages"] = [HELLO, first["message"]]
    more = reference_http.post(CHAT, json={**body, "continue_final_message": True}).get_json()
    rest = more["choices"][0]
    assert more["prompt_token_ids"] == cut["prompt_token_ids"] + first["token_ids"]
    assert first["token_ids"] + rest["token_ids"] == whole["token_ids"]
    together = first["message"]["content"] + rest["message"]["content"]
    assert together == whole["message"]["content"]


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_the_last_tokens_of_a_prompt_are_kept(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer, count: int
) -> None:
    ids = tokenizer.encode("x!abcdefgh")
    for prompt in ("x!abcdefgh", ids):
        fields = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True}
        fields["truncate_prompt_tokens"] = count
        answer = http.post(COMPLETION, json=fields).get_json()
        assert engine.added[-1].prompt == ids[-count:]
        text = tokenizer.decode(ids[-count:])
        assert answer["choices"][0]["text"] == text + text[0]
        assert answer["usage"]["prompt_tokens"] == len(ids[-count:])


def test_ends_of_messages_move_with_the_last_tokens_of_a_chat(
    http: FlaskClient, engine: FakeEngine
) -> None:
    body = {"messages": [HELLO, {"role": "assistant", "content": "Hi"}, HELLO], "max_tokens": 1}
    http.post(CHAT, json=body)
    whole = engine.added[-1]
    cut = whole.message_ends[0] + 1
    http.post(CHAT, json={**body, "truncate_prompt_tokens": len(whole.prompt) - cut})
    last = engine.added[-1]
    assert last.prompt == whole.prompt[cut:]
    assert last.message_ends == tuple(end - cut for end in whole.message_ends[1:])


def test_a_prompt_that_is_too_long_fits_once_it_is_cut(http: FlaskClient) -> None:
    body = {"prompt": [7] * 500, "max_tokens": 4}
    assert http.post(COMPLETION, json=body).status_code == 400
    assert http.post(COMPLETION, json={**body, "truncate_prompt_tokens": 20}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "room"), [({"max_tokens": 4}, 4), ({}, 1), ({"min_tokens": 9}, 9)]
)
def test_a_prompt_can_be_cut_to_what_leaves_room_for_the_answer(
    http: FlaskClient, engine: FakeEngine, fields: dict[str, Any], room: int
) -> None:
    limit = engine.max_seq_length
    for length in (limit - room - 1, limit - room, limit - room + 1, 500):
        ids = [7] * length
        body = {"prompt": ids, "truncate_prompt_tokens": -1, **fields}
        assert http.post(COMPLETION, json=body).status_code == 200
        assert engine.added[-1].prompt == ids[-(limit - room) :]
    chat = {"messages": [{"role": "user", "content": "x" * 500}], "truncate_prompt_tokens": -1}
    assert http.post(CHAT, json={**chat, **fields}).status_code == 200
    assert len(engine.added[-1].prompt) == limit - room
