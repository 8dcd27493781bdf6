"""What a request says of the cache and of its place in the queue reaches the engine."""

from __future__ import annotations

from typing import Any

from flask.testing import FlaskClient

from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Who are you?"},
]


def post(http: FlaskClient, path: str, **body: Any) -> None:
    answer = http.post(path, json={"max_tokens": 1, "temperature": 0, **body})
    assert answer.status_code == 200, answer.data


def test_priority_and_checkpoints_reach_the_engine(http: FlaskClient, engine: FakeEngine) -> None:
    wanted = {"priority": -1000, "cache_checkpoints": [9, 4], "cache_salt": "mine"}
    post(http, COMPLETION, prompt=[[7] * 9, [8] * 10], **wanted)
    post(http, CHAT, messages=MESSAGES, **wanted)
    assert len(engine.added) == 3
    for added in engine.added:
        assert added.priority == -1000
        assert added.cache_checkpoints == (9, 4)
        assert added.cache_salt == "mine"


def test_left_out_they_mean_nothing_special(http: FlaskClient, engine: FakeEngine) -> None:
    for path, prompt in ((COMPLETION, {"prompt": "Hello"}), (CHAT, {"messages": MESSAGES})):
        post(http, path, **prompt)
        post(http, path, **prompt, priority=None, cache_checkpoints=None)
    for added in engine.added:
        assert (added.priority, added.cache_checkpoints) == (0, ())


def test_a_chats_message_ends_reach_the_engine_and_a_completion_has_none(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    post(http, CHAT, messages=MESSAGES)
    post(http, COMPLETION, prompt="Hello")
    chat, completion = engine.added
    pieces = [f"<|{message['role']}|>{message['content']}<eos>" for message in MESSAGES]
    lengths = [len(tokenizer.encode("".join(pieces[:count]))) for count in (1, 2, 3, 4)]
    assert chat.message_ends == tuple(lengths)
    assert lengths[-1] == len(chat.prompt) - 1
    assert completion.message_ends == ()


def test_a_chats_checkpoints_are_positions_in_the_rendered_prompt(
    http: FlaskClient, engine: FakeEngine
) -> None:
    post(http, CHAT, messages=MESSAGES)
    length = len(engine.added[0].prompt)
    post(http, CHAT, messages=MESSAGES, cache_checkpoints=[length])
    body = {"messages": MESSAGES, "cache_checkpoints": [1, length + 1]}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 400
    error = answer.get_json()["error"]
    assert error["param"] == "cache_checkpoints"
    assert f"position {length + 1}, but messages has {length} tokens" in error["message"]
