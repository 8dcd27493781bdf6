"""What is wrong with a body for tokens is named in its client's words, and runs nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.fake_engine import FakeEngine
from tests.server.http.tokens.asking import GENERATE, INFER, generate, infer, infer_body

LIMIT = FakeEngine.max_seq_length
WRONG_SAMPLING = [
    ("temperature", -1),
    ("temperature", 101),
    ("temperature", "warm"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("frequency_penalty", 3),
    ("presence_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias.5", {"5": 101}),
    ("logit_bias", {"1000000": 1}),  # no such token
    ("skip_special_tokens", "yes"),
    ("spaces_between_special_tokens", 5),
    ("stream_interval", 0),
    ("unheard_of", 1),
]
WRONG_OF_SGLANG = [
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.5),
    ("max_new_tokens", LIMIT),
    ("min_new_tokens", 4),  # more than max_new_tokens
    ("min_new_tokens", -1),
    ("sampling_seed", 2**64),
    ("sampling_seed", 1.5),
    ("json_schema", "no JSON"),
    ("json_schema", {"not": {}}),
    ("regex", "("),
    ("ebnf", 'root ::= "a'),
    ("structural_tag", "{}"),
    ("structural_tag.format.type", {"format": {"type": "unknown"}}),
    ("custom_params.thinking_budget", {"thinking_budget": 5}),  # the model has no thoughts
    ("custom_params.return_top_p_token_ids", {"return_top_p_token_ids": True}),
    ("stop_regex", "a"),
    ("beam_width", 2),
    ("max_tokens", 5),  # the name of another server
]
WRONG_OF_VLLM = [
    ("max_tokens", 0),
    ("max_tokens", LIMIT),
    ("min_tokens", 4),
    ("seed", 2**64),
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", -1),
    ("allowed_token_ids", [10**6]),
    ("bad_words", [""]),
    ("structured_outputs", {"json": "no JSON"}),
    ("thinking_token_budget", 5),
    ("logprob_token_ids", [5]),
    ("prompt_logprob_token_ids", [5]),
    ("prompt_logprob_start", 1),
    ("flat_logprobs", True),
    ("trace_decode_token_ids", [5]),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("extra_args", {"a": 1}),
    ("max_new_tokens", 5),
]
WRONG_GENERATE = [
    ("input_ids", {"input_ids": None}),
    ("input_ids", {"text": "both"}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [[]]}),
    ("input_ids", {"input_ids": [[5], []]}),
    ("input_ids", {"input_ids": [5, [6]]}),
    ("input_ids", {"input_ids": [-1]}),
    ("input_ids", {"input_ids": [10**6]}),
    ("input_ids[1]", {"input_ids": [[5], [10**6]]}),
    ("input_ids", {"input_ids": [2**31]}),
    ("input_ids", {"input_ids": [True]}),
    ("input_ids", {"input_ids": ["a"]}),
    ("input_ids", {"input_ids": [1.5]}),
    ("input_ids", {"input_ids": "abc"}),
    ("input_ids", {"input_ids": [5] * LIMIT}),
    ("input_ids", {"input_ids": [[5]] * 1025}),
    ("text", {"text": "", "input_ids": None}),
    ("text", {"text": [], "input_ids": None}),
    ("text", {"text": 5, "input_ids": None}),
    ("text", {"text": "a" * 2_000_000, "input_ids": None}),
    ("sampling_params", {"sampling_params": []}),
    ("sampling_params", {"sampling_params": [{}, {}]}),
    ("sampling_params", {"sampling_params": 5}),
    ("sampling_params", {"input_ids": [[5], [6]], "sampling_params": [{"n": 2}, {}]}),
    ("sampling_params[1].top_p", {"input_ids": [[5], [6]], "sampling_params": [{}, {"top_p": 2}]}),
    (
        "sampling_params[1].min_new_tokens",
        {"input_ids": [[5], [6]], "sampling_params": [{}, {"min_new_tokens": LIMIT}]},
    ),
    ("rid", {"rid": ["a", "b"]}),
    ("rid", {"rid": 5}),
    ("rid", {"rid": ["a", "a"], "input_ids": [[5], [6]]}),
    ("rid", {"rid": "a" * 2000}),
    ("return_logprob", {"return_logprob": "yes"}),
    ("return_logprob", {"return_logprob": [True, False]}),
    ("logprob_start_len", {"return_logprob": True, "logprob_start_len": 3}),
    ("logprob_start_len", {"logprob_start_len": -2}),
    ("top_logprobs_num", {"top_logprobs_num": 21}),
    ("top_logprobs_num", {"top_logprobs_num": [1, 2]}),
    ("token_ids_logprob", {"token_ids_logprob": [5]}),
    ("return_routed_experts", {"return_routed_experts": True}),
    ("routed_experts_start_len", {"routed_experts_start_len": -1}),
    ("routed_experts_start_len", {"routed_experts_start_len": [0, 0]}),
    ("return_hidden_states", {"return_hidden_states": True}),
    ("return_sampling_mask", {"return_sampling_mask": True}),
    ("lora_path", {"lora_path": "an-adapter"}),
    ("lora_path", {"lora_path": [None, "an-adapter"]}),
    ("input_embeds", {"input_embeds": [[0.5]]}),
    ("image_data", {"image_data": "http://x"}),
    ("session_params", {"session_params": {"id": "s"}}),
    ("custom_logit_processor", {"custom_logit_processor": "x"}),
    ("stream", {"stream": "yes"}),
    ("priority", {"priority": 1001}),
    ("timeout", {"timeout": 0}),
    ("cache_salt", {"cache_salt": ["a"]}),
    ("max_thinking_tokens", {"max_thinking_tokens": -2}),
    ("unheard_of", {"unheard_of": 1}),
]
WRONG_INFERENCE = [
    ("token_ids", {"token_ids": None}),
    ("token_ids", {"token_ids": []}),
    ("token_ids", {"token_ids": [[5]]}),
    ("token_ids", {"token_ids": [10**6]}),
    ("token_ids", {"token_ids": [-1]}),
    ("token_ids", {"token_ids": [5] * LIMIT}),
    ("token_ids", {"token_ids": "abc"}),
    ("sampling_params", {"sampling_params": None}),
    ("sampling_params", {"sampling_params": [{}]}),
    ("request_id", {"request_id": 5}),
    ("features", {"features": {"mm_hashes": {}}}),
    ("content_parts", {"content_parts": [{"type": "image_url"}]}),
    ("output_mode", {"output_mode": "text"}),
    ("ec_transfer_params", {"ec_transfer_params": {}}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("priority", {"priority": 0.5}),
    ("unheard_of", {"unheard_of": 1}),
]


def check_refusal(http: FlaskClient, path: str, field: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.data
    error = answer.get_json()["error"]
    assert (error["param"], error["message"][-1]) == (field, ".")
    assert field in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("name", "value"), WRONG_SAMPLING + WRONG_OF_SGLANG)
def test_wrong_sampling_of_sglangs(
    http: FlaskClient, engine: FakeEngine, name: str, value: Any
) -> None:
    params = {"max_new_tokens": 3, name.partition(".")[0]: value}
    field = f"sampling_params.{name}"
    check_refusal(http, GENERATE, field, {"input_ids": [5, 6, 7], "sampling_params": params})
    assert not engine.added


@pytest.mark.parametrize(("name", "value"), WRONG_SAMPLING + WRONG_OF_VLLM)
def test_wrong_sampling_of_vllms(
    http: FlaskClient, engine: FakeEngine, name: str, value: Any
) -> None:
    params = {"max_tokens": 3, name.partition(".")[0]: value}
    field = f"sampling_params.{name}" + (".json" if name == "structured_outputs" else "")
    check_refusal(http, INFER, field, {"token_ids": [5, 6, 7], "sampling_params": params})
    assert not engine.added


@pytest.mark.parametrize(("field", "change"), WRONG_GENERATE)
def test_wrong_fields_of_generate(
    http: FlaskClient, engine: FakeEngine, field: str, change: dict[str, Any]
) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, **change}
    check_refusal(http, GENERATE, field, body)
    assert not engine.added
    generate(http)


@pytest.mark.parametrize(("field", "change"), WRONG_INFERENCE)
def test_wrong_fields_of_inference(
    http: FlaskClient, engine: FakeEngine, field: str, change: dict[str, Any]
) -> None:
    check_refusal(http, INFER, field, {**infer_body(), **change})
    assert not engine.added
    infer(http)


@pytest.mark.parametrize("path", [GENERATE, INFER])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_without_end_are_no_temperatures(http: FlaskClient, path: str, number: str) -> None:
    ids = "input_ids" if path == GENERATE else "token_ids"
    body = f'{{"{ids}": [5], "sampling_params": {{"temperature": {number}}}}}'
    answer = http.post(path, data=body, content_type="application/json")
    assert answer.status_code == 400
    assert answer.get_json()["error"]["param"] == "sampling_params.temperature"


@pytest.mark.parametrize("path", [GENERATE, INFER])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"\xff", b"null"])
def test_what_is_no_object_is_refused(http: FlaskClient, path: str, body: bytes) -> None:
    answer = http.post(path, data=body, content_type="application/json")
    assert answer.status_code == 400 and answer.get_json()["error"]["param"] == "body"


@pytest.mark.parametrize("path", [GENERATE, INFER])
def test_a_model_that_is_not_served_is_not_found(http: FlaskClient, path: str) -> None:
    ids = "input_ids" if path == GENERATE else "token_ids"
    body = {ids: [5], "sampling_params": {}, "model": "other"}
    answer = http.post(path, json=body)
    assert answer.status_code == 404
    assert answer.get_json()["error"]["code"] == "model_not_found"


def test_a_limit_is_said_in_the_clients_words(http: FlaskClient) -> None:
    def message(**params: Any) -> str:
        body = {"input_ids": [5, 6, 7], "sampling_params": params}
        return str(json.loads(http.post(GENERATE, json=body).data)["error"]["message"])

    assert message(max_new_tokens=LIMIT) == (
        f"sampling_params.max_new_tokens is {LIMIT}, but input_ids has 3 tokens and the limit for "
        f"both together is {LIMIT} (--inference-max-seq-length)."
    )
    assert message(max_new_tokens=2, min_new_tokens=3) == (
        "sampling_params.min_new_tokens is 3; it must be at most sampling_params.max_new_tokens, "
        "which is 2."
    )
