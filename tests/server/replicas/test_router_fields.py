"""What becomes of every field of ours on its way through other people's routers: the table in
docs/routing.md."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import fields

from megatron_hybrid.server.http.protocol.anthropic import MessagesRequest
from megatron_hybrid.server.http.protocol.parsing import field_descriptions
from megatron_hybrid.server.http.protocol.requests import ChatRequest, CompletionRequest
from megatron_hybrid.server.http.protocol.responses import ResponsesRequest
from tests.server.replicas.recording_server import MODEL, REFUSAL, RecordingServer
from tests.server.replicas.routers import COMMANDS, post, refusal, router

CHAT = "/v1/chat/completions"
UNKNOWN = "unknown_field"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
USER = {"role": "user", "content": "Hi"}
# A value of each field, none of them what it has if left out.
VALUES: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "n": 2},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    **{"stop": ["a"], "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2},
    **{"logit_bias": {"5": 1.0}, "allowed_token_ids": [1, 2], "bad_words": ["x"]},
    **{"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    **{"structured_outputs": {"regex": "a"}, "guided_json": SCHEMA, "guided_regex": "a"},
    **{"guided_choice": ["a"], "guided_grammar": 'root ::= "a"', "return_token_ids": True},
    "return_weight_versions": True,
    **{"regex": "a", "ebnf": 'root ::= "a"', "json_schema": json.dumps(SCHEMA)},
    **{"skip_special_tokens": False, "include_stop_str_in_output": True},
    **{"cache_salt": "pepper", "priority": 3, "cache_checkpoints": [5], "timeout": 60},
    **{"kv_transfer_params": {"peer": "p:1"}, "truncate_prompt_tokens": 9},
    **{"user": "u", "safety_identifier": "u", "store": True},
    **{"metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
    **{"prompt_cache_retention": "24h", "prompt_cache_options": {"a": 1}, "verbosity": "low"},
    **{"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "enable_thinking": False},
    **{"thinking_token_budget": 4, "thinking_budget": 4},
    **{"custom_params": {"thinking_budget": 4}, "parallel_tool_calls": False},
    **{"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    **{"add_generation_prompt": False, "continue_final_message": True},
    **{"max_tokens": 9, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2},
}
# Of the other routes, where they differ.
COMPLETION_VALUES: dict[str, Any] = {"logprobs": 2, "echo": True}
RESPONSE_VALUES: dict[str, Any] = {
    **{"instructions": "be", "previous_response_id": "resp_1", "max_output_tokens": 9},
    **{"include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}},
    **{"text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled"},
    **{"max_tool_calls": 3, "store": False, "tools": [{"type": "function", **FUNCTION}]},
}
MESSAGE_VALUES: dict[str, Any] = {
    **{"system": "be", "stop_sequences": ["a"], "metadata": {"user_id": "u"}, "max_tokens": 2048},
    **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": {"type": "any"}},
    **{"tools": [{"name": "f", "input_schema": SCHEMA}], "output_config": {"effort": "low"}},
    "cache_control": {"type": "ephemeral"},
}


class Route(NamedTuple):
    """What is sent: a field of `kind` with its value, in `body`, and with what that field needs."""

    kind: Any
    body: dict[str, Any]
    values: dict[str, Any]
    needs: Mapping[str, tuple[str, ...]]


NEEDS = {
    **{"tool_choice": ("tools",), "parallel_tool_calls": ("tools",)},
    "stream_options": ("stream",),
}
ROUTES = {
    CHAT: Route(
        ChatRequest,
        {"model": MODEL, "messages": [USER]},
        VALUES,
        {**NEEDS, "top_logprobs": ("logprobs",)},
    ),
    "/v1/completions": Route(
        CompletionRequest,
        {"model": MODEL, "prompt": "Hi"},
        VALUES | COMPLETION_VALUES,
        NEEDS,
    ),
    "/v1/responses": Route(
        ResponsesRequest,
        {"model": MODEL, "input": "Hi"},
        VALUES | RESPONSE_VALUES,
        {**NEEDS, "top_logprobs": ("include",)},
    ),
    "/v1/messages": Route(
        MessagesRequest,
        {"model": MODEL, "messages": [USER], "max_tokens": 9},
        VALUES | MESSAGE_VALUES,
        {**NEEDS, "thinking": ("max_tokens",)},
    ),
}


class Outcome(NamedTuple):
    """Of all fields of a route. added: what comes without being sent, other than null and false."""

    dropped: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


DRAWING = "temperature top_k repetition_penalty"  # set where the model's own would hold
WITH_TOOLS = "tool_choice"  # auto
NOT_OPENAIS = """
    allowed_token_ids bad_words cache_checkpoints cache_salt chat_template_kwargs enable_thinking
    ignore_eos logit_bias min_tokens n prompt_cache_options seed stop_token_ids structured_outputs
    thinking_token_budget timeout unknown_field
"""
EXPECTED = {
    ("sglang_router", CHAT): Outcome(
        dropped=names(
            """
            add_generation_prompt allowed_token_ids bad_words cache_checkpoints cache_salt
            custom_params enable_thinking guided_choice guided_grammar guided_json guided_regex
            include_stop_str_in_output json_schema kv_transfer_params max_tokens priority
            prompt_cache_options prompt_cache_retention return_token_ids return_weight_versions
            store structured_outputs
            thinking_budget thinking_token_budget timeout truncate_prompt_tokens unknown_field user
            """
        ),
        changed=names("stream_options"),
        refused=names("verbosity"),
        added=names("max_completion_tokens separate_reasoning skip_special_tokens")
        | names(f"stream_reasoning {WITH_TOOLS}"),
    ),
    ("sglang_router", "/v1/completions"): Outcome(
        changed=names("stream_options"), added=names("skip_special_tokens")
    ),
    ("sglang_router", "/v1/responses"): Outcome(
        dropped=names(NOT_OPENAIS)
        | names("prompt_cache_key prompt_cache_retention safety_identifier stream_options"),
        changed=names("text"),
        added=names(f"{DRAWING} top_p store parallel_tool_calls {WITH_TOOLS}"),
    ),
    ("smg", CHAT): Outcome(added=names(WITH_TOOLS)),
    ("smg", "/v1/completions"): Outcome(),
    ("smg", "/v1/responses"): Outcome(
        refused=names(NOT_OPENAIS),
        added=names(f"{DRAWING} store parallel_tool_calls {WITH_TOOLS}"),
    ),
    ("smg", "/v1/messages"): Outcome(),
    ("vllm_router", CHAT): Outcome(
        changed=names("stream_options tools"),
        added=names("include_reasoning separate_reasoning skip_special_tokens stream_reasoning"),
    ),
    ("vllm_router", "/v1/completions"): Outcome(
        changed=names("stream_options"), added=names("skip_special_tokens")
    ),
    ("vllm_router", "/v1/responses"): Outcome(),
    ("vllm_router", "/v1/messages"): Outcome(),
}


class Behind(NamedTuple):
    router: str
    url: str
    server: RecordingServer


@pytest.fixture(scope="module", params=COMMANDS)
def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Behind]:
    with RecordingServer() as server:
        folder = tmp_path_factory.mktemp("router")
        # Else some refusals in a row end it: sglang_router counts them as failures.
        flags = ("--disable-circuit-breaker",)
        with router(request.param, [server.url], folder, *flags) as url:
            yield Behind(request.param, url, server)


def arriving(behind: Behind, path: str, sent: dict[str, Any]) -> dict[str, Any] | None:
    """The body that the server gets; None: none."""
    behind.server.arrived.clear()
    with contextlib.suppress(urllib.error.HTTPError):
        post(behind.url + path, sent)
    found = [body for at, body in behind.server.arrived if at == path]
    return found[0] if found else None


def outcome(behind: Behind, path: str) -> Outcome:
    """The fields that are dropped, changed or refused, and those that come without being sent."""
    route = ROUTES[path]
    values = {**route.values, UNKNOWN: {"a": [1]}}
    dropped, changed, refused, added = set(), set(), set(), set()
    for name in [*(one.encode_name for one in fields(route.kind)), UNKNOWN]:
        if name not in values:
            continue
        needed = {other: values[other] for other in route.needs.get(name, ())}
        sent = {**route.body, **needed, name: values[name]}
        body = arriving(behind, path, sent)
        if body is None:
            refused.add(name)
            continue
        added |= {other for other, value in body.items() if other not in sent and value}
        if name not in body:
            dropped.add(name)
        elif body[name] != sent[name]:
            changed.add(name)
    return Outcome(*map(frozenset, (dropped, changed, refused, added)))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_every_field_that_does_something_has_a_value(path: str) -> None:
    route = ROUTES[path]
    assert field_descriptions(route.kind).keys() <= route.values.keys() | route.body.keys()


@pytest.mark.parametrize("path", ROUTES)
def test_fields_arrive_as_the_page_has_it(behind: Behind, path: str) -> None:
    if (behind.router, path) in EXPECTED:
        assert outcome(behind, path) == EXPECTED[behind.router, path]
    else:
        assert arriving(behind, path, ROUTES[path].body) is None


def test_turns_arrive_without_what_only_we_know(behind: Behind) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assistant = {"role": "assistant", "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "a", "content": "5"}

    def arriving_turns(**more: Any) -> Any:
        messages = [USER, {**assistant, **more}, {**tool, "name": "f"}]
        body = arriving(behind, CHAT, {"model": MODEL, "messages": messages})
        return body and body["messages"][1:]

    assert arriving_turns(content=None, extra_content={"a": 1}) == [assistant, tool]
    name = "reasoning" if behind.router == "vllm_router" else "reasoning_content"
    thinking = {**assistant, name: "t"}
    assert arriving_turns(reasoning_content="t") == [thinking, tool]
    newer_name_is_lost = behind.router == "sglang_router"
    expected = assistant if newer_name_is_lost else thinking
    assert arriving_turns(reasoning="t") == [expected, tool]
    both = arriving_turns(reasoning="t", reasoning_content="t")
    assert both == (None if behind.router == "smg" else [thinking, tool])


def test_prompts_of_token_ids_pass_vllms_alone(behind: Behind) -> None:
    body = arriving(behind, "/v1/completions", {"model": MODEL, "prompt": [1, 2]})
    if behind.router == "vllm_router":
        assert body is not None and body["prompt"] == [1, 2]
    else:
        assert body is None


def test_a_chat_names_its_model(behind: Behind) -> None:
    body = arriving(behind, CHAT, {"messages": [USER]})
    if behind.router == "smg":
        assert body is None
    else:
        assert body is not None
        assert body.get("model") == {"sglang_router": "unknown", "vllm_router": None}[behind.router]


def test_our_errors_pass_as_they_are(behind: Behind) -> None:
    behind.server.refuses = True
    for path in (CHAT, "/v1/completions", "/v1/responses"):
        status, answer = refusal(behind.url + path, ROUTES[path].body)
        assert (status, json.loads(answer)) == (400, REFUSAL)
    behind.server.refuses = False


@pytest.mark.parametrize("package", COMMANDS)
def test_bad_requests_take_a_server_out_of_sglangs_router_alone(
    package: str, tmp_path: Path
) -> None:
    body = ROUTES[CHAT].body
    with RecordingServer() as server, router(package, [server.url], tmp_path) as url:
        server.refuses = True
        for _ in range(3):
            refusal(url + CHAT, body)
        server.refuses = False
        if package == "sglang_router":
            assert refusal(url + CHAT, body)[0] == 503
        else:
            assert post(url + CHAT, body)["choices"]
