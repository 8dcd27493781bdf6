"""Random bodies: every answer is 200 or a 400 that names a field; never a failure of the server."""

from __future__ import annotations

import json
from typing import Any

from flask.testing import FlaskClient
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_hybrid.server.http.protocol.anthropic import MessagesRequest
from megatron_hybrid.server.http.protocol.requests import ChatRequest, CompletionRequest

MESSAGES = "/v1/messages"
FIELDS = [
    "model messages prompt max_tokens max_completion_tokens temperature top_p top_k min_p n seed",
    "stop stop_token_ids stream stream_options logprobs top_logprobs ignore_eos cache_salt user",
    "priority cache_checkpoints chat_template_kwargs tools tool_choice response_format other",
]
names = st.sampled_from(" ".join(FIELDS).split()) | st.sampled_from(
    sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})
)
anthropics_names = st.sampled_from([*MessagesRequest.__struct_fields__, "other"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([2**31, 2**64, -(2**63), 10**400])
    | st.floats()
    | st.text(alphabet="ab\u65e5\U0001f600\ud800 <>", max_size=6)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
fuzz = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(http: FlaskClient, path: str, data: bytes) -> None:
    assume(b"~" not in data)  # the one text on which the fake engine fails on purpose
    answer = http.post(path, data=data, content_type="application/json")
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), (data, answer.data)
        error = answer.get_json()["error"]
        assert error["message"] if path == MESSAGES else error["param"]
    elif answer.mimetype == "text/event-stream":
        last = b"event: message_stop" if path == MESSAGES else b"data: [DONE]"
        assert answer.data.split(b"\n\n")[-2].startswith(last)
        assert b'"error"' not in answer.data


def with_time(extra: dict[str, Any]) -> dict[str, Any]:
    """No time limit runs out: a busy machine would answer 504, as it should."""
    limit = extra.get("timeout")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < 60:
        return extra | {"timeout": limit + 60}
    return extra


@fuzz
@given(chat=st.booleans(), extra=st.dictionaries(names, values, max_size=3))
def test_random_fields_never_break_the_server(
    http: FlaskClient, chat: bool, extra: dict[str, Any]
) -> None:
    body = {"max_tokens": 2, **with_time(extra)}
    if chat:
        body.setdefault("messages", [{"role": "user", "content": "Hello"}])
    else:
        body.setdefault("prompt", "Hello")
    path = "/v1/chat/completions" if chat else "/v1/completions"
    check(http, path, json.dumps(body).encode())


@fuzz
@given(extra=st.dictionaries(anthropics_names, values, max_size=3))
def test_random_fields_of_anthropics_never_break_the_server(
    http: FlaskClient, extra: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"max_tokens": 2, "messages": messages, **with_time(extra)}
    check(http, MESSAGES, json.dumps(body).encode())


@fuzz
@given(
    messages=st.lists(values, max_size=3),
    role=st.sampled_from(["user", "system", "x"]),
    path=st.sampled_from(["/v1/chat/completions", MESSAGES]),
)
def test_random_messages_never_break_the_server(
    http: FlaskClient, messages: list[Any], role: str, path: str
) -> None:
    messages = [
        {"role": role, **message} if isinstance(message, dict) else message for message in messages
    ]
    body = {"messages": messages, "max_tokens": 2}
    check(http, path, json.dumps(body).encode())


@fuzz
@given(data=st.binary(max_size=40), around=st.booleans())
def test_random_bytes_never_break_the_server(http: FlaskClient, data: bytes, around: bool) -> None:
    body = b'{"prompt": "' + data + b'", "max_tokens": 1}' if around else data
    check(http, "/v1/completions", body)
