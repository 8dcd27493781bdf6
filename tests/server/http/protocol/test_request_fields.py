"""Every field of a request reaches the engine as it was meant, or shapes the answer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.protocol.requests import Sampling
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETION: {"prompt": "Hello"},
}
# What a client sends, and what SamplingParams should then hold; none of them a default.
SENT: dict[str, tuple[Any, Any]] = {
    "temperature": (0.25, 0.25),
    "top_p": (0.5, 0.5),
    "top_k": (7, 7),
    "min_p": (0.125, 0.125),
    "seed": (-3, -3),
    "n": (2, 2),
    "stop": (["ab", "c"], ("ab", "c")),
    "stop_token_ids": ([3, 4], (3, 4)),
    "ignore_eos": (True, True),
    "min_tokens": (2, 2),
    "presence_penalty": (1.5, 1.5),
    "frequency_penalty": (-1, -1),
    "repetition_penalty": (1.25, 1.25),
    "logit_bias": ({"50": 3.5, "0": -100}, ((50, 3.5), (0, -100))),
    "allowed_token_ids": ([50, 7], (50, 7)),
    "bad_words": (["ab", " c"], None),  # see `sent`
}


def sampled_with(http: FlaskClient, engine: FakeEngine, path: str, **fields: Any) -> SamplingParams:
    body = json.dumps({**HELLO[path], "max_tokens": 4, **fields})
    answer = http.post(path, data=body, content_type="application/json")
    assert answer.status_code == 200, answer.data
    return engine.added[-1].params


@pytest.fixture
def sent(tokenizer: Tokenizer) -> dict[str, tuple[Any, Any]]:
    """SENT, and what the tokenizer makes of words."""
    own = [tuple(tokenizer.encode(text)) for text in ("ab", " ab", "c", " c")]
    only = (own[0], *([own[1]] if own[1][-2:] != own[0] else []), own[2])
    if own[3][-1:] != own[2]:
        only += (own[3],)
    return {**SENT, "bad_words": (SENT["bad_words"][0], only)}


def test_every_sampling_field_has_a_case() -> None:
    assert set(SENT) == set(Sampling.__struct_fields__)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_sampling_field_reaches_the_engine(
    http: FlaskClient, engine: FakeEngine, path: str, sent: dict[str, tuple[Any, Any]]
) -> None:
    plain = sampled_with(http, engine, path)
    assert plain == SamplingParams(max_tokens=4)
    for name, (value, wanted) in sent.items():
        params = sampled_with(http, engine, path, **{name: value})
        assert params == dataclasses.replace(plain, **{name: wanted}), name
    everything = sampled_with(
        http, engine, path, **{name: value for name, (value, _) in sent.items()}
    )
    assert everything == SamplingParams(
        max_tokens=4, **{name: wanted for name, (_, wanted) in sent.items()}
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_response_format_becomes_a_grammar(
    http: FlaskClient, engine: FakeEngine, path: str
) -> None:
    def grammar(value: dict[str, Any]) -> Any:
        return sampled_with(http, engine, path, response_format=value).grammar

    def schema_of(value: dict[str, Any]) -> Any:
        found = grammar(value)
        assert found.kind == "json_schema"
        return json.loads(found.text)

    assert grammar({"type": "text"}) is None
    assert schema_of({"type": "json_object"}) == {"type": "object"}
    schema = {
        "type": "object",
        "properties": {"größe": {"type": "integer", "minimum": 0, "maximum": 300}},
        "required": ["größe"],
        "additionalProperties": False,
    }
    named = {"name": "size", "schema": schema, "strict": True, "description": "How large."}
    assert schema_of({"type": "json_schema", "json_schema": named}) == schema
    assert schema_of({"type": "json_schema", "json_schema": {"name": "any"}}) == {"type": "object"}


def test_the_newer_name_of_max_tokens_means_the_same(http: FlaskClient, engine: FakeEngine) -> None:
    params = sampled_with(http, engine, CHAT, max_tokens=None, max_completion_tokens=3)
    assert params.max_tokens == 3


def test_the_engine_is_told_when_a_request_came(http: FlaskClient, engine: FakeEngine) -> None:
    arrivals = []
    add_request = engine.add_request

    def remember(*args: Any, arrived: float | None = None, **others: Any) -> None:
        arrivals.append(arrived)
        add_request(*args, arrived=arrived, **others)

    engine.add_request = remember  # type: ignore[method-assign]
    sampled_with(http, engine, COMPLETION)
    sampled_with(http, engine, CHAT)
    first, second = arrivals
    assert first is not None and second is not None
    assert first < second
