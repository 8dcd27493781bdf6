"""anthropic's own client with /v1/messages: whole, streamed and parsed answers, a tools loop, marks
of the cache, tokens counted, and each turn found by the next one."""

import secrets
import sys
from typing import Annotated, Any, Literal

from anthropic import Anthropic, BadRequestError, beta_tool
from pydantic import BaseModel, Field

url, name = sys.argv[1:3]
client = Anthropic(api_key="none", base_url=url.removesuffix("/v1"), max_retries=0)
COMMON: dict[str, Any] = {"model": name, "max_tokens": 200}
# Nothing is cached yet under a salt of this run's own.
GREEDY: Any = {"extra_body": {"temperature": 0, "cache_salt": secrets.token_hex(8)}}
FACTS = "The code of the gate is 7315. The cat is called Pixel. "
QUESTION = "What is the code of the gate?"


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def read(usage: Any) -> int:
    """Tokens of the prompt."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


assert [model.id for model in client.models.list()] == [name]

# Whole and streamed, with what is common to questions marked for the cache.
system: Any = [
    {"type": "text", "text": FACTS * 8, "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Be brief. " * 20},
]
messages = [user(QUESTION)]
counted = client.messages.count_tokens(model=name, messages=messages, system=system)
answer = client.messages.create(messages=messages, system=system, **COMMON, **GREEDY)
assert answer.content[0].text and answer.stop_reason == "end_turn", answer
assert read(answer.usage) == counted.input_tokens, (answer.usage, counted)
written = answer.usage.cache_creation_input_tokens
assert written > 0, answer.usage
with client.messages.stream(messages=messages, system=system, **COMMON, **GREEDY) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == answer.content[0].text and final.usage.output_tokens == answer.usage.output_tokens
assert final.usage.cache_read_input_tokens > written, final.usage
other = [system[0], {"type": "text", "text": "Be kind. " * 20}]
asked = client.messages.create(messages=messages, system=other, **COMMON, **GREEDY)
assert asked.usage.cache_read_input_tokens >= written, asked.usage

# All that was said and answered is found by the next turn.
messages += [{"role": "assistant", "content": final.content}, user("And what is the cat called?")]
follow = client.messages.create(messages=messages, system=system, **COMMON, **GREEDY)
computed = read(final.usage) + final.usage.output_tokens - 2
assert follow.usage.cache_read_input_tokens >= computed, (follow.usage, final.usage)

stopped = client.messages.create(
    messages=[user(FACTS + QUESTION)], stop_sequences=["5"], **COMMON, **GREEDY
)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "5"), stopped
prefilled = client.messages.create(
    messages=[user(FACTS + QUESTION), {"role": "assistant", "content": "The code of the gate is"}],
    **COMMON,
    **GREEDY,
)
assert "7315" in prefilled.content[0].text, prefilled


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    is_called: Literal["Pixel", "Ada"]


parsed = client.messages.parse(messages=[user(FACTS)], output_format=Pet, **COMMON)
assert isinstance(parsed.parsed_output, Pet), parsed

called: list[tuple[str, int]] = []


@beta_tool
def weather(unit: Literal["C", "F"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """What the weather is like.

    Args:
        unit: Of temperatures.
        days: How many.
    """
    called.append((unit, days))
    return "It rains."


# The model is too small to end a loop by itself.
runner = client.beta.messages.tool_runner(
    messages=[user("The weather?")],
    tools=[weather],
    tool_choice={"type": "tool", "name": "weather"},
    max_iterations=2,
    **COMMON,
)
turns = list(runner)
assert [turn.stop_reason for turn in turns] == ["tool_use", "tool_use"] and called, turns
first, second = (turn.usage for turn in turns)
assert second.cache_read_input_tokens >= read(first) + first.output_tokens - 2, (first, second)

try:
    client.messages.create(messages=messages, extra_body={"container": "c"}, **COMMON)
except BadRequestError as error:
    assert "container" in error.message and error.request_id, error
else:
    raise AssertionError("a container was taken")
print(text, prefilled.content[0].text, parsed.parsed_output, called)
