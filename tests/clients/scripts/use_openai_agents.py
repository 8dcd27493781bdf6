"""openai-agents with its default model class, which speaks /v1/responses, and with the one for
chats: a tool's result goes back; typed output; streams; conversations by the server's memory."""

import asyncio
import sys
from typing import Annotated

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

url, name = sys.argv[1:3]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
set_default_openai_client(client)
called = []


# Bounds, since the reference model does not know when a word or a number is long enough.
Name = Annotated[str, Field(max_length=20)]
Days = Annotated[int, Field(ge=0, le=100)]


@function_tool
def look_up(city: Name, days: Days) -> str:
    """The weather of a city in so many days."""
    called.append((city, days))
    return "It rains."


class City(BaseModel):
    name: Name
    people: Annotated[int, Field(ge=0, le=10**9)]


async def use(model: str | Model) -> None:
    called.clear()
    settings = ModelSettings(
        temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False
    )
    agent = Agent(
        name="weather",
        instructions="Be brief.",
        model=model,
        tools=[look_up],
        model_settings=settings,
    )
    # The first answer has to be a call; after it, the agent leaves the choice to the model.
    result = await Runner.run(agent, "What is the weather in Paris?", max_turns=5)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
    assert len(called) == 1 and result.final_output, result
    usage = result.context_wrapper.usage
    assert usage.requests == 2 and usage.output_tokens > 0, usage
    print(called, result.final_output)

    typed = Agent(
        name="cities",
        model=model,
        output_type=City,
        model_settings=ModelSettings(temperature=0, max_tokens=200),
    )
    result = await Runner.run(typed, "Which city is large?")
    assert isinstance(result.final_output, City), result
    print(result.final_output)

    called.clear()
    streamed = Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=5)
    events = [event.type async for event in streamed.stream_events()]
    assert called and streamed.final_output, events
    assert events.count("raw_response_event") > 5, events


async def remember() -> None:
    """A second run that goes on from the first one's last response."""
    settings = ModelSettings(temperature=0, max_tokens=40)
    agent = Agent(name="memory", model=name, model_settings=settings)
    first = await Runner.run(agent, "The cat is called Pixel.")
    assert first.last_response_id is not None
    second = await Runner.run(
        agent, "What is the cat called?", previous_response_id=first.last_response_id
    )
    assert "Pixel" in second.final_output, second
    usage = second.context_wrapper.usage
    before = first.context_wrapper.usage
    assert usage.input_tokens_details.cached_tokens >= before.total_tokens - 2, usage
    print(second.final_output)


async def main() -> None:
    await use(name)
    await use(OpenAIChatCompletionsModel(model=name, openai_client=client))
    await remember()


asyncio.run(main())
