"""The offline LLM and HTTP give the same answer to the same request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.thorough import A_THIRD

LETTERS = "x!abcdefgh"  # a token each


@A_THIRD
@pytest.mark.parametrize(
    "end",
    [
        {},
        {"stop_token_ids": "b"},
        {"stop_token_ids": "x"},
        {"stop_token_ids": "c", "stop": ["bc"]},
        {"stop": ["bc", "a"]},
        {"stop": ["hx"], "stop_token_ids": "!"},
        {"ignore_eos": True},
    ],
)
@pytest.mark.parametrize("prompt", [LETTERS, "ab<eos>cd", "naïve 日本"])
def test_an_answer_is_the_same(
    http: FlaskClient, tokenizer_folder: Path, tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch, prompt: str, end: dict[str, Any],
) -> None:  # fmt: skip
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "n": 2, **end}
    if "stop_token_ids" in end:
        options["stop_token_ids"] = tokenizer.encode(end["stop_token_ids"])
    ids = tokenizer.encode(prompt)
    body = {"prompt": ids, "logprobs": 0, "return_token_ids": True, **options}
    got = http.post("/v1/completions", json=body).get_json()["choices"]

    engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    monkeypatch.setattr("megatron_hybrid.llm.build_engine", lambda config: engine)
    for name in ("stop", "stop_token_ids"):
        options[name] = tuple(options.get(name, ()))
    llm = LLM(tokenizer_model=str(tokenizer_folder))
    (output,) = llm.generate(ids, SamplingParams(logprobs=0, **options), progress=False)
    assert [
        (one.text, one.token_ids, one.finish_reason.value, len(one.logprobs or []))
        for one in output.choices
        if one.finish_reason is not None
    ] == [
        (one["text"], one["token_ids"], one["finish_reason"], len(one["logprobs"]["tokens"]))
        for one in got
    ]
