"""What the server's routes accept, as JSON Schema: from the tables that the parsers read by."""

from __future__ import annotations

from megatron_hybrid.engine.pause import PAUSE_MODES
from megatron_hybrid.server.http import request_fields
from megatron_hybrid.server.http.chat_messages import (
    EMPTY_ELSEWHERE,
    MAX_NAME_LENGTH,
    OF_ANSWERS,
    ROLES,
    SHARED,
)
from megatron_hybrid.server.http.control_routes import MAX_PATH_LENGTH
from megatron_hybrid.server.http.field_types import JsonSchema, schemas
from megatron_hybrid.server.http.response_format import response_format_schema
from megatron_hybrid.server.http.tool_calls.fields import (
    CACHE_MARKS,
    MAX_ID_LENGTH,
    calls_schema,
    tools_schemas,
)

LARGEST_ID = 2**31 - 1


def request_schemas(vocab_size: int | None) -> dict[str, JsonSchema]:
    """By name, to stand under components/schemas. vocab_size: of the model, once it is known."""
    largest = LARGEST_ID if vocab_size is None else vocab_size - 1
    token_ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": largest}}
    return {
        "Message": _message(),
        "ChatRequest": _body(
            {
                "messages": _MESSAGES,
                **schemas(request_fields.TEMPLATE),
                **schemas(request_fields.CHAT),
                **tools_schemas(),
                **_shared(),
                **schemas(request_fields.UNSUPPORTED_CHAT),
            },
            "messages",
        ),
        "CompletionRequest": _body(
            {
                "prompt": _prompt(token_ids),
                **schemas(request_fields.COMPLETION),
                **_shared(),
                **schemas(request_fields.UNSUPPORTED_COMPLETION),
            },
            "prompt",
        ),
        "TokenizeTextRequest": _body(
            {
                "prompt": {"type": "string"},
                "add_special_tokens": {"type": ["boolean", "null"], "default": True},
            },
            "prompt",
        ),
        "TokenizeChatRequest": _body(
            {
                "messages": _MESSAGES,
                **schemas(request_fields.TEMPLATE),
                **tools_schemas(),
                "cache_salt": request_fields.COMMON["cache_salt"].schema(),
            },
            "messages",
        ),
        "DetokenizeRequest": _body({"tokens": token_ids}, "tokens"),
        "AbortRequest": _body(
            {
                "request_id": {
                    "type": "string",
                    "maxLength": MAX_NAME_LENGTH,
                    "description": "The `id` of an answer.",
                }
            },
            "request_id",
        ),
        "PauseRequest": _body({"mode": _MODE}),
        "ResumeRequest": _body({}),
        "UpdateWeightsRequest": _body(
            {"path": {"type": "string", "maxLength": MAX_PATH_LENGTH}, "mode": _MODE}, "path"
        ),
    }


def _body(properties: dict[str, JsonSchema], *required: str) -> JsonSchema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _shared() -> dict[str, JsonSchema]:
    return {
        **schemas(request_fields.COMMON),
        **schemas(request_fields.SAMPLING),
        "response_format": response_format_schema(),
        "stream_options": {
            "type": ["object", "null"],
            "properties": schemas(request_fields.STREAM_OPTIONS),
            "additionalProperties": False,
            "description": "Needs `stream` to be true.",
        },
    }


def _prompt(token_ids: JsonSchema) -> JsonSchema:
    text = {"type": "string", "minLength": 1}
    some_ids = {**token_ids, "minItems": 1}
    return {
        "anyOf": [
            text,
            {"type": "array", "items": text, "minItems": 1},
            some_ids,
            {"type": "array", "items": some_ids, "minItems": 1},
        ],
        "description": "Text, texts, token ids, or lists of token ids.",
    }


def _message() -> JsonSchema:
    text = {"type": {"const": "text"}, "text": {"type": "string"}, **schemas(CACHE_MARKS)}
    part = _body(text, "type", "text")
    content: JsonSchema = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    nothing: JsonSchema = {"anyOf": [content, {"type": "null"}]}
    others = [role for role in ROLES if role not in ("assistant", "tool")]
    said: dict[str, JsonSchema] = {
        "role": {"enum": others},
        "content": content,
        **schemas(EMPTY_ELSEWHERE),
    }
    answer: dict[str, JsonSchema] = {
        "role": {"const": "assistant"},
        "tool_calls": calls_schema(),
        "content": nothing,
        **schemas(OF_ANSWERS),
    }
    result: dict[str, JsonSchema] = {
        "role": {"const": "tool"},
        "content": nothing,
        "tool_call_id": {"type": "string", "maxLength": MAX_ID_LENGTH},
        **schemas(EMPTY_ELSEWHERE),
    }
    return {
        "anyOf": [
            _body({**schemas(SHARED), **said}, "role", "content"),
            _body({**schemas(SHARED), **answer}, "role"),
            _body({**schemas(SHARED), **result}, "role", "tool_call_id"),
        ]
    }


_MODE: JsonSchema = {
    "enum": [*PAUSE_MODES, None],
    "description": "What becomes of requests that run.",
}
_MESSAGES: JsonSchema = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/Message"},
    "minItems": 1,
}
