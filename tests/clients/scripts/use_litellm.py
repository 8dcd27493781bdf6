"""litellm: chats and completions through its OpenAI provider, streamed, with tools and a schema;
responses, and chats by its bridge to them."""

import json
import sys

import litellm

url, model = sys.argv[1:3]
litellm.suppress_debug_info = True
COMMON = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0}
MESSAGES = [{"role": "user", "content": "My name is Anna. What is my name?"}]

answer = litellm.completion(messages=MESSAGES, max_tokens=16, **COMMON)
assert answer.choices[0].message.content
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

chunks = list(
    litellm.completion(
        messages=MESSAGES,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        **COMMON,
    )
)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == answer.choices[0].message.content, text
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
assert built.choices[0].message.content == text
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
called = litellm.completion(
    messages=MESSAGES,
    tools=[{"type": "function", "function": FUNCTION}],
    tool_choice={"type": "function", "function": {"name": "look_up"}},
    max_tokens=200,
    **COMMON,
)
(call,) = called.choices[0].message.tool_calls
arguments = json.loads(call.function.arguments)
assert set(arguments) == {"city", "days"}, arguments
result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
after = litellm.completion(
    messages=[*MESSAGES, called.choices[0].message, result],
    tools=[{"type": "function", "function": FUNCTION}],
    max_tokens=16,
    **COMMON,
)
assert after.usage.prompt_tokens > called.usage.prompt_tokens

formatted = litellm.completion(
    messages=MESSAGES,
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
    },
    max_tokens=200,
    **COMMON,
)
assert set(json.loads(formatted.choices[0].message.content)) == {"city", "days"}

completed = litellm.text_completion(
    model=f"text-completion-openai/{model}",
    prompt=["The code of the gate is", "The cat"],
    api_base=url,
    api_key="none",
    temperature=0,
    max_tokens=8,
    logprobs=1,
)
assert len(completed.choices) == 2 and completed.usage.completion_tokens > 0, completed

# /v1/responses, and what litellm makes of a chat for it.
RESPOND = {**COMMON, "max_output_tokens": 16}
said = "My name is Anna. What is my name?"
response = litellm.responses(input=said, **RESPOND)
assert response.output[-1].content[0].text == text, response
again = litellm.responses(input="Who?", previous_response_id=response.id, **RESPOND)
assert again.usage.input_tokens_details.cached_tokens > response.usage.input_tokens, again
kinds = [event.type for event in litellm.responses(input=said, stream=True, **RESPOND)]
assert kinds[0] == "response.created" and kinds[-1].startswith("response."), kinds
assert kinds.count("response.output_text.delta") > 3, kinds

BRIDGE = {**COMMON, "model": f"openai/responses/{model}"}
bridged = litellm.completion(messages=MESSAGES, max_tokens=16, **BRIDGE)
assert bridged.choices[0].message.content == text, bridged
chunks = list(litellm.completion(messages=MESSAGES, max_tokens=16, stream=True, **BRIDGE))
assert text == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks
called = litellm.completion(
    messages=MESSAGES,
    tools=[{"type": "function", "function": FUNCTION}],
    tool_choice={"type": "function", "function": {"name": "look_up"}},
    max_tokens=200,
    **BRIDGE,
)
(call,) = called.choices[0].message.tool_calls
assert set(json.loads(call.function.arguments)) == {"city", "days"}, call
result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
after = litellm.completion(
    messages=[*MESSAGES, called.choices[0].message, result],
    tools=[{"type": "function", "function": FUNCTION}],
    max_tokens=16,
    **BRIDGE,
)
assert after.choices[0].message.content is not None, after
