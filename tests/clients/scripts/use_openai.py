"""openai's own client with /v1/responses: whole, streamed and parsed answers, a tools loop,
conversations by id, by items and by stored items; reading, listing and dropping what is stored."""

import json
import sys
from typing import Annotated, Any

from openai import NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

url, name = sys.argv[1:3]
client = OpenAI(base_url=url, api_key="none", max_retries=0)
COMMON: dict[str, Any] = {"model": name, "temperature": 0, "max_output_tokens": 200}
QUESTION = "The code of the gate is 7315. What is the code of the gate?"
NEXT = "And the cat is called Pixel. What is the cat called?"

answer = client.responses.create(input=QUESTION, instructions="Be brief.", **COMMON)
assert "7315" in answer.output_text and answer.status == "completed", answer
assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens

# Events, and what the client puts together from them.
kinds = [event.type for event in client.responses.create(input=QUESTION, stream=True, **COMMON)]
assert kinds[:2] == ["response.created", "response.in_progress"], kinds
assert kinds[-1] == "response.completed" and kinds.count("response.output_text.delta") > 3, kinds
with client.responses.stream(input=QUESTION, **COMMON) as stream:
    text = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
    final = stream.get_final_response()
assert text == final.output_text != "", final
print(text)

# The next turn, in all ways in which it can be asked for: all but its new tokens are cached.
turns = {
    "by id": {"input": NEXT, "previous_response_id": final.id},
    "by items": {
        "input": [
            {"role": "user", "content": QUESTION},
            *final.output,
            {"role": "user", "content": NEXT},
        ]
    },
    "by references": {
        "input": [
            {"role": "user", "content": QUESTION},
            *({"type": "item_reference", "id": item.id} for item in final.output),
            {"role": "user", "content": NEXT},
        ]
    },
}
answers = {way: client.responses.create(**turn, **COMMON) for way, turn in turns.items()}
assert len({one.output_text for one in answers.values()}) == 1, answers
assert len({one.usage.input_tokens for one in answers.values()}) == 1, answers
computed = final.usage.total_tokens - 2
for way, one in answers.items():
    assert one.usage.input_tokens_details.cached_tokens >= computed, (way, one.usage)

# What is stored.
second = answers["by id"]
stored = client.responses.retrieve(second.id)
assert stored.output_text == second.output_text and stored.previous_response_id == final.id, stored
items = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # two pages
assert [item.type for item in items] == ["message"] * 3, items
assert items[1].content[0].text == final.output_text, items
client.responses.delete(second.id)
try:
    client.responses.retrieve(second.id)
except NotFoundError as error:
    assert error.code == "not_found", error
else:
    raise AssertionError("it was deleted")


class City(BaseModel):
    # Bounds, since the reference model does not know when a word or a number is long enough.
    name: Annotated[str, Field(max_length=20)]
    people: Annotated[int, Field(ge=0, le=10**9)]


parsed = client.responses.parse(input="Which city is large?", text_format=City, **COMMON)
assert isinstance(parsed.output_parsed, City), parsed
with client.responses.stream(input="Which city?", text_format=City, **COMMON) as stream:
    stream.until_done()
    assert isinstance(stream.get_final_response().output_parsed, City)
print(parsed.output_parsed)


class look_up(BaseModel):
    """The weather of a city in so many days."""

    city: Annotated[str, Field(max_length=20)]
    days: Annotated[int, Field(ge=0, le=100)]


typed: Any = pydantic_function_tool(look_up)
tools: Any = [{"type": "function", **typed["function"]}]
context: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
called = client.responses.parse(
    input=context, tools=[typed], tool_choice="required", parallel_tool_calls=False, **COMMON
)
calls = [item for item in called.output if item.type == "function_call"]
assert calls and all(isinstance(call.parsed_arguments, look_up) for call in calls), called
assert set(json.loads(calls[0].arguments)) == {"city", "days"}, calls
context += called.output
context += [
    {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    for call in calls
]
after = client.responses.create(input=context, tools=tools, tool_choice="none", **COMMON)
assert after.output_text, after
assert after.usage.input_tokens_details.cached_tokens >= called.usage.total_tokens - 2, after.usage
print(calls[0].arguments, after.output_text)

some = client.responses.create(
    input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, **COMMON
)
logprobs = some.output[0].content[0].logprobs
assert "".join(one.token for one in logprobs) == some.output_text, logprobs
assert all(len(one.top_logprobs) == 2 for one in logprobs), logprobs
