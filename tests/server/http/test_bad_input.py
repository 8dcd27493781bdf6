"""Whatever is wrong with a request gets a 400 that names the field; the next one is served."""

from __future__ import annotations

import inspect
import json
from typing import Any

import openai
import pytest
from flask.testing import FlaskClient

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


# (field named in the answer, what is added to a good body)
BAD_IN_BOTH: list[tuple[str, dict[str, Any]]] = [
    ("surprise", {"surprise": 1}),
    ("model", {"model": 5}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),  # only with echo
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "8"}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 10**6}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": 10**400}),
    ("temperature", {"temperature": [1]}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": float("-inf")}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 0.5}),
    ("min_p", {"min_p": 2}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": True}),
    ("n", {"n": "two"}),
    ("seed", {"seed": 1.5}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": "1"}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": 3}),
    ("stop", {"stop": ["a", 3]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": "a" * 1025}),
    ("stop_token_ids", {"stop_token_ids": 3}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": ["a"]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("ignore_eos", {"ignore_eos": "yes"}),
    ("stream", {"stream": "true"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("stream_options.extra", {"stream": True, "stream_options": {"extra": 1}}),
    ("user", {"user": 7}),
    ("cache_salt", {"cache_salt": 7}),
    ("cache_salt", {"cache_salt": "x" * 1025}),
    (
        "stream_options.continuous_usage_stats",
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": 1}},
    ),
    ("metadata", {"metadata": []}),
    ("metadata", {"metadata": {str(i): "" for i in range(65)}}),
    ("metadata", {"metadata": {"a" * 1025: ""}}),
    ("metadata.a", {"metadata": {"a": "b" * 1025}}),
    ("metadata.a", {"metadata": {"a": {"b": "c"}}}),
    ("store", {"store": "yes"}),
    ("service_tier", {"service_tier": 1}),
    ("service_tier", {"service_tier": "a" * 65}),
    ("prompt_cache_key", {"prompt_cache_key": 5}),
    ("prompt_cache_retention", {"prompt_cache_retention": True}),
    ("prompt_cache_options", {"prompt_cache_options": "explicit"}),
    ("safety_identifier", {"safety_identifier": {}}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": "1"}),
    ("frequency_penalty", {"frequency_penalty": -2.01}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": float("nan")}),
    ("logit_bias", {"logit_bias": [[50, 1]]}),
    ("logit_bias", {"logit_bias": {"fifty": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"050": 1}}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
    ("logit_bias", {"logit_bias": {"100000": 1}}),
    ("logit_bias.50", {"logit_bias": {"50": 101}}),
    ("logit_bias.50", {"logit_bias": {"50": "1"}}),
    ("logit_bias.50", {"logit_bias": {"50": None}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [5, -1]}),
    ("allowed_token_ids", {"allowed_token_ids": ["a"]}),
    ("allowed_token_ids", {"allowed_token_ids": [100000]}),
    ("allowed_token_ids", {"allowed_token_ids": [1] * 4097}),
    ("allowed_token_ids", {"allowed_token_ids": [5], "response_format": {"type": "json_object"}}),
    ("bad_words", {"bad_words": "cat"}),
    ("bad_words", {"bad_words": ["cat", ""]}),
    ("bad_words", {"bad_words": [[5, 6]]}),
    ("bad_words", {"bad_words": ["a" * 257]}),
    ("bad_words", {"bad_words": ["0123456789" * 5]}),
    ("bad_words", {"bad_words": ["a"] * 513}),
    ("skip_special_tokens", {"skip_special_tokens": 0}),
    ("include_stop_str_in_output", {"include_stop_str_in_output": "yes"}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": "5"}),
    ("cache_checkpoints", {"truncate_prompt_tokens": 2, "cache_checkpoints": [3]}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 2.0}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("timeout", {"timeout": 0}),
    ("timeout", {"timeout": 86401}),
    ("timeout", {"timeout": "1s"}),
    ("response_format", {"response_format": "json"}),
    ("response_format.type", {"response_format": {}}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.schema", {"response_format": {"type": "json_object", "schema": {}}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.name", json_schema()),
    ("response_format.json_schema.name", json_schema(name="two words")),
    ("response_format.json_schema.schema", json_schema(name="a", schema=[])),
    ("response_format.json_schema.strict", json_schema(name="a", strict="yes")),
    ("response_format.json_schema.more", json_schema(name="a", more=1)),
    ("response_format", json_schema(name="a", schema={"type": "cat"})),
    ("priority", {"priority": 1001}),
    ("priority", {"priority": -1001}),
    ("priority", {"priority": 0.5}),
    ("priority", {"priority": False}),
    ("priority", {"priority": "high"}),
    ("priority", {"priority": [1]}),
    ("return_token_ids", {"return_token_ids": 1}),
    ("cache_checkpoints", {"cache_checkpoints": 4}),
    ("cache_checkpoints", {"cache_checkpoints": [0]}),
    ("cache_checkpoints", {"cache_checkpoints": [-1]}),
    ("cache_checkpoints", {"cache_checkpoints": [1, "2"]}),
    ("cache_checkpoints", {"cache_checkpoints": [1.0]}),
    ("cache_checkpoints", {"cache_checkpoints": [True]}),
    ("cache_checkpoints", {"cache_checkpoints": [None]}),
    ("cache_checkpoints", {"cache_checkpoints": [10**30]}),
    ("cache_checkpoints", {"cache_checkpoints": [1, 100]}),
    ("cache_checkpoints", {"cache_checkpoints": [1] * 65}),
]
BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "Hello"}),
    ("messages[0]", {"messages": ["Hello"]}),
    ("messages[0].role", {"messages": [{"content": "Hello"}]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "Hello"}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "Hello"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[1].content", {"messages": [*HELLO, {"role": "user", "content": {"a": 1}}]}),
    ("messages[0].color", {"messages": [{"role": "user", "content": "Hello", "color": "red"}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "Hello", "name": 5}]}),
    (
        "messages[0].tool_calls[0].type",
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
    ),
    (
        "messages[0].content[1].type",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "url": "b"}],
                }
            ]
        },
    ),
    *(
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [part]}]})
        for part in (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": "b"}},
            {"type": "video_url", "video_url": {"url": "b"}},
        )
    ),
    (
        "messages[0].content[0].text",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    ),
    ("messages", {"messages": [{"role": "user", "content": "forbidden"}]}),
    ("messages", {"messages": [{"role": "user", "content": "Hello there " * 100}]}),
    ("max_completion_tokens", {"max_completion_tokens": -3}),
    ("max_completion_tokens", {"max_completion_tokens": 10_000}),
    ("max_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("reasoning_effort", {"reasoning_effort": 3}),
    ("verbosity", {"verbosity": ["low"]}),
    (
        "messages[0].reasoning_content",
        {"messages": [{"role": "assistant", "reasoning_content": 5}]},
    ),
    ("messages[0].reasoning", {"messages": [{"role": "assistant", "reasoning": ["a"]}]}),
    ("messages[0].reasoning", {"messages": [{"role": "user", "content": "", "reasoning": "a"}]}),
    ("messages[0].refusal", {"messages": [{"role": "assistant", "refusal": 5}]}),
    ("messages[0].refusal", {"messages": [{"role": "user", "content": "", "refusal": "a"}]}),
    ("messages[0].annotations", {"messages": [{"role": "assistant", "annotations": "a"}]}),
    ("messages[0].audio", {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}),
    ("messages[0].function_call", {"messages": [{"role": "assistant", "function_call": {}}]}),
    ("messages[0].cache_control", {"messages": [{**HELLO[0], "cache_control": "ephemeral"}]}),
    (
        "messages[0].content[0].cache_control",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": 1}]}
            ]
        },
    ),
    (
        "messages[0].content[0].color",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "color": 1}]}]},
    ),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    ("prompt", {"prompt": "Hello"}),
]
BAD_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["Hello", ""]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [1, 2.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [[1], [None]]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [10**6]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": [7] * 128}),
    ("prompt", {"prompt": "Hello there " * 100}),
    ("prompt", {"prompt": ["a"] * 65, "n": 16}),
    ("prompt", {"prompt": ["a"] * 9, "n": 128}),
    ("cache_checkpoints", {"prompt": [[7] * 20, [7] * 10], "cache_checkpoints": [11]}),
    ("logprobs", {"logprobs": True}),
    ("logprobs", {"logprobs": 21}),
    ("echo", {"echo": "yes"}),
    ("best_of", {"best_of": 2}),
    ("suffix", {"suffix": "end"}),
    ("messages", {"messages": HELLO}),
]


def check_refused(http: FlaskClient, path: str, data: bytes, field: str) -> dict[str, Any]:
    answer = http.post(path, data=data, content_type="application/json")
    assert answer.status_code == 400, answer.data
    error = answer.get_json()["error"]
    assert error["param"] == field
    assert field in error["message"].replace("The body", "body")
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    return dict(error)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_calls_itself_something_else_is_refused(http: FlaskClient, kind: str) -> None:
    for path in (CHAT, COMPLETION, "/tokenize", "/abort", "/reset_prefix_cache"):
        answer = http.post(path, data=b"{}", content_type=kind)
        assert answer.status_code == 415
        error = answer.get_json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert kind in error["message"]


def test_unknown_paths_and_methods_get_error_objects(http: FlaskClient) -> None:
    answer = http.post("/v1/nothing", json={})
    assert answer.status_code == 404
    assert answer.get_json()["error"]["code"] == "not_found"
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "BREW"):
        answer = http.open(COMPLETION, method=method)
        assert answer.status_code == 405
        assert set(answer.headers["Allow"].split(", ")) == {"POST", "OPTIONS"}
        assert answer.get_json()["error"]["code"] == "method_not_allowed"


def test_head_and_options_answer_without_a_body(http: FlaskClient) -> None:
    answer = http.head("/v1/models")
    assert (answer.status_code, answer.data) == (200, b"")
    assert answer.mimetype == "application/json"
    answer = http.options(CHAT)
    assert (answer.status_code, answer.data) == (200, b"")
    assert set(answer.headers["Allow"].split(", ")) == {"POST", "OPTIONS"}


def check_served(http: FlaskClient) -> None:
    answer = http.post(COMPLETION, json={"prompt": "Hello", "max_tokens": 2, "temperature": 0})
    assert answer.status_code == 200, answer.data


@pytest.fixture(scope="module")
def cases() -> list[tuple[str, str, dict[str, Any]]]:
    chat = {"model": "fake", "messages": HELLO}
    completion = {"model": "fake", "prompt": "Hello"}
    return [
        *((CHAT, field, chat | bad) for field, bad in BAD_IN_BOTH + BAD_CHATS),
        *((COMPLETION, field, completion | bad) for field, bad in BAD_IN_BOTH + BAD_COMPLETIONS),
    ]


def test_a_bad_field_is_named_and_the_next_request_served(
    http: FlaskClient, cases: list[tuple[str, str, dict[str, Any]]]
) -> None:
    for path, field, body in cases:
        check_refused(http, path, json.dumps(body).encode(), field)
    check_served(http)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'"text"', "body"),
        (b"{'prompt': 'a'}", "body"),
        (b'{"prompt": "a"} x', "body"),
        (b"[" * 100_000, "body"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body"),
        (b"\xff\xfe{}", "body"),
        (b'{"prompt": "a\xff"}', "prompt"),
        (b'{"prompt": ["a", "b\xc3"]}', "prompt[1]"),
        (b'{"prompt": "\xed\xa0\x80"}', "prompt"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "user": "\\udfff"}', "user"),
        (b'{"prompt": "a", "stop": ["\\ud83d"]}', "stop[0]"),
        (b'{"prompt": "a", "x\\ud800": 1}', "body"),
    ],
)
def test_a_body_that_is_no_json_or_no_text_is_refused(
    http: FlaskClient, data: bytes, field: str
) -> None:
    check_refused(http, COMPLETION, data, field)
    check_served(http)


def test_wrong_bytes_in_a_message_are_named(http: FlaskClient) -> None:
    data = b'{"messages": [{"role": "user", "content": "a\xffb"}]}'
    check_refused(http, CHAT, data, "messages[0].content")


def test_a_pair_of_surrogates_is_one_character(http: FlaskClient) -> None:
    body = b'{"prompt": "\\ud83d\\ude00", "temperature": 0, "max_tokens": 1}'
    answer = http.post(COMPLETION, data=body, content_type="application/json")
    assert answer.status_code == 200


def test_a_prompt_that_is_too_long_has_openais_code(http: FlaskClient) -> None:
    for body in ({"prompt": [7] * 500}, {"prompt": [7] * 100, "max_tokens": 100}):
        error = http.post(COMPLETION, json=body).get_json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_a_checkpoint_beyond_one_of_several_prompts_names_that_prompt(http: FlaskClient) -> None:
    body = {"prompt": [[7] * 20, [7] * 10], "cache_checkpoints": [4, 11], "max_tokens": 1}
    error = check_refused(http, COMPLETION, json.dumps(body).encode(), "cache_checkpoints")
    assert "position 11, but prompt[1] has 10 tokens" in error["message"]
    assert http.post(COMPLETION, json={**body, "cache_checkpoints": [10]}).status_code == 200


def test_null_and_openais_defaults_change_nothing(http: FlaskClient) -> None:
    defaults: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "min_tokens": 0,
        "priority": 0,
        "cache_checkpoints": [],
        "n": 1,
        "seed": None,
        "stop": None,
        "stop_token_ids": [],
        "stream": False,
        "stream_options": None,
        "user": "somebody",
        "safety_identifier": "the same one",
        "max_tokens": 3,
        "temperature": None,
        "top_p": 1,
        "top_k": -1,
    }
    chat = {"messages": HELLO, "tools": [], "tool_choice": "auto", "logprobs": False, "store": None}
    completion = {"prompt": "Hello", "echo": False, "best_of": 1, "suffix": None, "logprobs": None}
    assert http.post(CHAT, json={**defaults, **chat}).status_code == 200
    assert http.post(COMPLETION, json={**defaults, **completion}).status_code == 200


def test_every_parameter_of_openais_client_is_known(http: FlaskClient) -> None:
    """As null: what is not supported is refused only when it asks for something."""
    for path, resource, own in (
        (CHAT, openai.resources.chat.Completions, {"messages": HELLO, "max_tokens": 3}),
        (COMPLETION, openai.resources.Completions, {"prompt": "Hello"}),
    ):
        names = set(inspect.signature(resource.create).parameters)
        names -= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        assert len(names) > 15
        answer = http.post(path, json={**dict.fromkeys(names), **own})
        assert answer.status_code == 200, answer.get_json()


def test_a_huge_body_is_refused(http: FlaskClient) -> None:
    http.application.config["MAX_CONTENT_LENGTH"] = 1000
    answer = http.post(COMPLETION, json={"prompt": "a" * 2000})
    assert answer.status_code == 413
    assert "error" in answer.get_json()
    check_served(http)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "more": 1}, "more"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/abort", {}, "request_id"),
        ("/abort", {"request_id": 5}, "request_id"),
    ],
)
def test_the_small_routes_name_bad_fields_too(
    http: FlaskClient, path: str, body: dict[str, Any], field: str
) -> None:
    check_refused(http, path, json.dumps(body).encode(), field)
