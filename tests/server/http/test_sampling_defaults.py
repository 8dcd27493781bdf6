"""Requests that leave their sampling open get the model's own, and what they set wins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient

from megatron_hybrid import reference_model
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.request import Unasked
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.protocol.generation_request import parse_chat, parse_completion
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.options import FrontEndSettings, ParseOptions, ServerOptions
from megatron_hybrid.server.sampling_defaults import describe
from tests.server.conftest import RunningLoop
from tests.server.test_options import parsed

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {"prompt": "Hello"}
FILE = {
    "do_sample": False,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.05,
    "max_new_tokens": 300,
    "eos_token_id": [1, 2],
    "pad_token_id": None,
}
DEFAULTS = (
    ("temperature", 0.6),
    ("top_p", 0.95),
    ("top_k", 20),
    ("min_p", 0.0),
    ("repetition_penalty", 1.05),
    ("max_tokens", 300),
)
OPTIONS = ParseOptions(sampling_defaults=DEFAULTS)


def model_with(folder: Path, file: object) -> str:
    """The reference model with such a generation_config.json."""
    shutil.copytree(reference_model.path(), folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps(file))
    return str(folder / "model")


def test_the_file_says_what_is_taken_unless_it_is_left_out(tmp_path: Path) -> None:
    model = model_with(tmp_path, FILE)
    _, options, _ = parsed("--load", model)
    assert options.sampling_defaults == DEFAULTS
    assert "temperature 0.6, top_p 0.95, top_k 20," in describe(options.sampling_defaults)
    for word in ("none", "vllm"):
        _, without, _ = parsed("--load", model, "--generation-config", word)
        assert without.sampling_defaults == ()
    _, plain, _ = parsed()
    assert plain.sampling_defaults == ()
    (tmp_path / "model" / "generation_config.json").unlink()
    assert parsed("--load", model)[1].sampling_defaults == ()
    sent = msgspec.json.encode(FrontEndSettings(options, "/folder", "digest"))
    read = msgspec.json.decode(sent, type=FrontEndSettings).options.sampling_defaults
    assert read == DEFAULTS and type(dict(read)["top_k"]) is int


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"temperature": -1}, "temperature in .* can't be taken: temperature is -1; it must be a"),
        ({"top_k": "all"}, "top_k in .*generation_config.json can't be taken"),
        ({"max_new_tokens": 0}, "max_new_tokens in .* --generation-config none"),
        ([], "must hold a JSON object"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused_at_start(
    tmp_path: Path, file: object, words: str
) -> None:
    model = model_with(tmp_path, file)
    with pytest.raises(ConfigurationError, match=words):
        parsed("--load", model)
    parsed("--load", model, "--generation-config", "none")


def test_what_is_left_open_or_null_is_the_models() -> None:
    for body in (CHAT, {**CHAT, "temperature": None, "top_k": None, "max_tokens": None}):
        params = parse_chat(body, OPTIONS).generation.params
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
        assert params.repetition_penalty == 1.05
        assert params.max_tokens == 300 and isinstance(params.max_tokens, Unasked)
    text = parse_completion(TEXT, OPTIONS).generation.params
    assert (text.temperature, text.top_k, text.max_tokens) == (0.6, 20, 16)


def test_what_a_request_sets_wins() -> None:
    body = {**CHAT, "temperature": 0, "top_k": -1, "top_p": 1, "max_completion_tokens": 9}
    params = parse_chat(body, OPTIONS).generation.params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0, -1, 1, 9)
    assert params.repetition_penalty == 1.05
    assert parse_chat(CHAT).generation.params.max_tokens is None
    least = parse_chat({**CHAT, "min_tokens": 400}, OPTIONS).generation.params
    assert least.max_tokens == 400


def served(running: RunningLoop, serving: Serving, options: ServerOptions) -> FlaskClient:
    return create_app(Serving(running.engines, serving.tokenizer, options)).test_client()


def test_answers_and_the_description_follow(
    running: RunningLoop, serving: Serving, options: ServerOptions, http: FlaskClient
) -> None:
    ours = options.replace(sampling_defaults=(("temperature", 0.0), ("max_tokens", 3)))
    app = served(running, serving, ours)
    usage = app.post("/v1/chat/completions", json=CHAT).get_json()["usage"]
    assert usage["completion_tokens"] == 3
    usage = app.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}).get_json()["usage"]
    assert usage["completion_tokens"] == 2
    for client, temperature, longest in ((app, 0.0, 3), (http, 1.0, None)):
        schemas = client.get("/openapi.json").get_json()["components"]["schemas"]
        chat, text = (schemas[name]["properties"] for name in ("ChatRequest", "CompletionRequest"))
        assert chat["temperature"]["default"] == text["temperature"]["default"] == temperature
        assert chat["max_tokens"].get("default") == longest
        assert text["max_tokens"].get("default") == 16
