"""What the server answers, as JSON Schema: one entry a shape, named as in OpenAI's API."""

from __future__ import annotations

from megatron_hybrid.server.http.field_types import JsonSchema

INTEGER: JsonSchema = {"type": "integer", "minimum": 0}
STRING: JsonSchema = {"type": "string"}
TOKEN_IDS: JsonSchema = {
    "type": "array",
    "items": INTEGER,
    "description": "Only if return_token_ids was true.",
}
FINISH_REASONS = ("stop", "length", "tool_calls", "abort")


def fixed_object(properties: dict[str, JsonSchema], *optional: str) -> JsonSchema:
    """An object with exactly these fields; the optional ones may be missing."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def array(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def reference(name: str) -> JsonSchema:
    """The shape of that name in the description's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [schema, {"type": "null"}]}


def answer_schemas() -> dict[str, JsonSchema]:
    """By name, to stand under components/schemas."""
    return {
        "Error": _ERROR,
        "Usage": _USAGE,
        "Model": _MODEL,
        "ModelList": fixed_object({"object": {"const": "list"}, "data": array(reference("Model"))}),
        "ToolCall": _TOOL_CALL,
        "ChatLogprobs": _CHAT_LOGPROBS,
        "ChatCompletion": _chat_answer(_answer("chat.completion", _CHAT_CHOICE)),
        "ChatCompletionChunk": _chat_answer(_chunk("chat.completion.chunk", _CHAT_CHUNK_CHOICE)),
        "CompletionLogprobs": _COMPLETION_LOGPROBS,
        "Completion": _answer("text_completion", _completion_choice({"enum": FINISH_REASONS})),
        "CompletionChunk": _chunk(
            "text_completion", _completion_choice({"enum": [*FINISH_REASONS, None]})
        ),
    }


def _answer(kind: str, choice: JsonSchema) -> JsonSchema:
    return fixed_object(
        {
            "id": STRING,
            "object": {"const": kind},
            "created": INTEGER,
            "model": STRING,
            "choices": array(choice),
            "usage": reference("Usage"),
        }
    )


def _chunk(kind: str, choice: JsonSchema) -> JsonSchema:
    schema = _answer(kind, choice)
    schema["properties"] = {**schema["properties"], "usage": nullable(reference("Usage"))}
    schema["required"] = [name for name in schema["required"] if name != "usage"]
    return schema


def _chat_answer(schema: JsonSchema) -> JsonSchema:
    """A chat's prompt is said once; in a stream, with the first chunk."""
    properties = {**schema["properties"], "prompt_token_ids": TOKEN_IDS}
    return {**schema, "properties": properties}


def _completion_choice(finish_reason: JsonSchema) -> JsonSchema:
    return fixed_object(
        {
            "index": INTEGER,
            "text": STRING,
            "logprobs": nullable(reference("CompletionLogprobs")),
            "finish_reason": finish_reason,
            "token_ids": TOKEN_IDS,
            "prompt_token_ids": TOKEN_IDS,
        },
        "token_ids",
        "prompt_token_ids",
    )


_ERROR = fixed_object(
    {
        "error": fixed_object(
            {
                "message": STRING,
                "type": STRING,
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            }
        )
    }
)
_USAGE = fixed_object(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": fixed_object(
            {"cached_tokens": {**INTEGER, "description": "Prompt tokens that were not computed."}}
        ),
    },
    "prompt_tokens_details",  # with --no-report-cached-tokens
)
_MODEL = fixed_object(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": INTEGER,
        "owned_by": STRING,
        "max_model_len": {"type": ["integer", "null"]},
    }
)
_TOOL_CALL = fixed_object(
    {
        "index": INTEGER,
        "id": STRING,
        "type": {"const": "function"},
        "function": fixed_object({"name": STRING, "arguments": STRING}, "name", "arguments"),
    },
    "index",
    "id",
    "type",
)
_TOKEN: dict[str, JsonSchema] = {
    "token": STRING,
    "bytes": array({"type": "integer", "minimum": 0, "maximum": 255}),
    "logprob": {"type": "number"},
}
_CHAT_LOGPROBS = fixed_object(
    {
        "content": array(fixed_object({**_TOKEN, "top_logprobs": array(fixed_object(_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_CHAT_CHOICE = fixed_object(
    {
        "index": INTEGER,
        "message": fixed_object(
            {
                "role": {"const": "assistant"},
                "content": {"type": ["string", "null"]},
                "refusal": {"type": "null"},
                "tool_calls": array(reference("ToolCall")),
            },
            "tool_calls",
        ),
        "logprobs": nullable(reference("ChatLogprobs")),
        "finish_reason": {"enum": FINISH_REASONS},
        "token_ids": TOKEN_IDS,
    },
    "token_ids",
)
_CHAT_CHUNK_CHOICE = fixed_object(
    {
        "index": INTEGER,
        "delta": fixed_object(
            {
                "role": {"const": "assistant"},
                "content": {"type": ["string", "null"]},
                "tool_calls": array(reference("ToolCall")),
            },
            "role",
            "content",
            "tool_calls",
        ),
        "logprobs": nullable(reference("ChatLogprobs")),
        "finish_reason": {"enum": [*FINISH_REASONS, None]},
        "token_ids": TOKEN_IDS,
    },
    "token_ids",
)
_COMPLETION_LOGPROBS = fixed_object(
    {
        "tokens": array(STRING),
        "token_logprobs": array({"type": ["number", "null"]}),
        "top_logprobs": array(
            {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
        ),
        "text_offset": array(INTEGER),
    }
)
