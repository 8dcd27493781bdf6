"""Arguments of a wrong kind: each is refused by its name, before anything is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hybrid import LLM, ConfigurationError, InvalidRequestError, SamplingParams
from tests.engine.symbolic import CheckedEngine, expected_answer, make_engine
from tests.text.make_tokenizers import byte_level, save

HELLO = {"role": "user", "content": "Hello"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine() -> CheckedEngine:
    return make_engine()


@pytest.fixture
def llm(engine: CheckedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("megatron_hybrid.llm.build_engine", lambda config: engine)
    return LLM(tokenizer_model=str(folder))


def assert_refused(engine: CheckedEngine, field: str, call: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    engine.step()  # those of the call that were queued are aborted
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([1.5], "prompt"),
        ([True, 2], "prompt"),
        (np.array([1.5]), "prompt"),
        ("\ud800", "prompt"),
        ([[1, 2], [1.7, 2]], "prompts[1]"),
        ([[True]], "prompts[0]"),
        (["a", 5], "prompts[1]"),
        ([["a"]], "prompts[0]"),
        ([b"a"], "prompts[0]"),
        (b"abc", "prompts"),
        (5, "prompts"),
        (None, "prompts"),
        ({"prompt": "a"}, "prompts"),
    ],
)
def test_prompts(llm: LLM, engine: CheckedEngine, prompts: Any, field: str):
    assert_refused(engine, field, lambda: llm.generate(prompts, PARAMS, progress=False))


@pytest.mark.parametrize("prompt", [5, None, ["a"], [1.5], [[1]], "\ud800"])
def test_a_streams_prompt(llm: LLM, engine: CheckedEngine, prompt: Any):
    assert_refused(engine, "prompt", lambda: next(llm.stream(prompt, PARAMS)))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        (5, "messages"),
        (None, "messages"),
        (HELLO, "messages"),
        ([[]], "messages"),
        (["hi"], "messages[0]"),
        ([HELLO, "hi"], "messages[1]"),
        ([[HELLO], 5], "messages[1]"),
        ([[HELLO], [HELLO, 5]], "messages[1][1]"),
        ([{**HELLO, "content": object()}], "messages[0].content"),
        ([{**HELLO, "content": "\ud800"}], "messages"),
    ],
)
def test_messages(llm: LLM, engine: CheckedEngine, messages: Any, field: str):
    assert_refused(engine, field, lambda: llm.chat(messages, PARAMS, progress=False))
    if isinstance(messages, list) and isinstance(messages[0], dict):
        assert_refused(engine, field, lambda: next(llm.stream(messages, PARAMS)))


@pytest.mark.parametrize(
    ("params", "field"),
    [({"n": 2}, "params"), ("ab", "params"), (5, "params"), ([PARAMS, {}], "params[1]")],
)
def test_params(llm: LLM, engine: CheckedEngine, params: Any, field: str):
    assert_refused(engine, field, lambda: llm.generate([[1], [2]], params, progress=False))
    assert_refused(engine, "params", lambda: next(llm.stream([1], params)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cache_salt", 5),
        ("cache_salt", None),
        ("cache_salt", "\ud800"),
        ("cache_salt", "x" * 1025),
        ("priority", "1"),
        ("priority", 1.5),
        ("cache_checkpoints", [1.5]),
        ("cache_checkpoints", [True]),
        ("cache_checkpoints", "12"),
        ("cache_checkpoints", 5),
        ("cache_checkpoints", None),
    ],
)
def test_options(llm: LLM, engine: CheckedEngine, option: str, value: Any):
    options: Any = {option: value}
    assert_refused(engine, option, lambda: llm.generate([1, 2], PARAMS, **options))
    assert_refused(engine, option, lambda: next(llm.stream([1, 2], PARAMS, **options)))


def test_numpys_numbers_are_numbers(llm: LLM, engine: CheckedEngine):
    options: Any = {"priority": np.int64(1), "cache_checkpoints": np.array([2])}
    for prompts in (np.array([5, 6, 7]), np.array([[5, 6, 7]]), [np.array([5, 6, 7])]):
        (output,) = llm.generate(prompts, PARAMS, **options)
        assert output.prompt_token_ids == [5, 6, 7]
        assert output.token_ids == expected_answer([5, 6, 7], 3)


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(ConfigurationError, match="config is .* EngineConfig"):
        LLM(config={"load": "x"})  # type: ignore[arg-type]
