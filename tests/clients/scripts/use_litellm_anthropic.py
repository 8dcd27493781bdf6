"""litellm's Anthropic provider: OpenAI's form over /v1/messages, and Anthropic's form as it is and
over chats."""

import asyncio
import json
import sys
from typing import Any

import litellm

url, model = sys.argv[1:3]
litellm.suppress_debug_info = True
COMMON: dict[str, Any] = {
    "model": f"anthropic/{model}",
    "api_base": url.removesuffix("/v1"),
    "api_key": "none",
}
MESSAGES: list[Any] = [{"role": "user", "content": "My name is Anna. What is my name?"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}

answer = litellm.completion(**ASKED, **COMMON)
assert answer.choices[0].message.content
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
chunks = list(litellm.completion(stream=True, **ASKED, **COMMON))
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == answer.choices[0].message.content, text
print(text)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["city", "days"],
}
FUNCTION = {"name": "look_up", "description": "The weather of a city.", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
called = litellm.completion(
    messages=MESSAGES,
    tool_choice={"type": "function", "function": {"name": "look_up"}},
    max_tokens=200,
    **TOOLS,
    **COMMON,
)
(call,) = called.choices[0].message.tool_calls
assert set(json.loads(call.function.arguments)) == {"city", "days"}, call
result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
after = litellm.completion(
    messages=[*MESSAGES, called.choices[0].message, result], max_tokens=16, **TOOLS, **COMMON
)
assert after.usage.prompt_tokens > called.usage.prompt_tokens


async def as_it_is() -> None:
    said = await litellm.anthropic.messages.acreate(**ASKED, **COMMON)
    assert said["content"][0]["text"] == text, said
    # The other way round: Anthropic's form, which litellm turns into a chat's.
    bridge = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    said = await litellm.anthropic.messages.acreate(**ASKED, **bridge)
    assert said["content"][0]["text"] == text, said


asyncio.run(as_it_is())
