"""pydantic-ai, whose `openai:` models speak /v1/responses, and with its model for chats: typed
answers by tool and by the server's schema; a tool; streaming; a conversation that goes on."""

import asyncio
import os
import sys
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:3]
os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY="none")


Name = Annotated[str, Field(max_length=20)]


class City(BaseModel):
    name: Name
    people: int = Field(ge=0, le=10**9)


class FirstCallsTheTool(AbstractCapability[Any]):
    def get_model_settings(self) -> Any:
        return lambda run: {"tool_choice": ["count_people"] if run.run_step == 1 else "none"}


async def use(model: str | Model) -> None:
    settings: Any = {"temperature": 0.0, "max_tokens": 400, "parallel_tool_calls": False}
    for output in (ToolOutput(City), NativeOutput(City)):
        agent = Agent(model, output_type=output, model_settings=settings, retries=0)
        result = await agent.run("Which city is large?")
        assert isinstance(result.output, City), result.output
        assert result.usage.output_tokens > 0, result.usage
        print(result.output)

    called = []
    helped = Agent(model, model_settings=settings, capabilities=[FirstCallsTheTool()], retries=0)

    @helped.tool_plain
    def count_people(city: Name) -> int:
        """How many people live there."""
        called.append(city)
        return 2_000_000

    result = await helped.run("How many live in Paris?")
    assert len(called) == 1 and isinstance(result.output, str) and result.output, result
    parts = [part for message in result.all_messages() for part in message.parts]
    (returned,) = (part for part in parts if part.part_kind == "tool-return")
    assert returned.content == 2_000_000, returned
    assert result.usage.requests == 2, result.usage
    print(called, result.output)

    plain = Agent(model, model_settings={"temperature": 0.0, "max_tokens": 16})
    async with plain.run_stream("My name is Anna. What is my name?") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1 and stream.usage.output_tokens > 0, (pieces, stream.usage)
    print("".join(pieces))

    # The second run, whose history comes back, finds all of the first one in the cache.
    first = await plain.run("The cat is called Pixel.")
    second = await plain.run("What is the cat called?", message_history=first.all_messages())
    total = first.usage.input_tokens + first.usage.output_tokens
    assert "Pixel" in second.output and second.usage.cache_read_tokens >= total - 2, second
    print(second.output)


async def remember() -> None:
    """The history stays with the server."""
    model = OpenAIResponsesModel(name)
    settings: Any = {"temperature": 0.0, "openai_previous_response_id": "auto"}
    agent = Agent(model, model_settings=settings)
    first = await agent.run("The cat is called Pixel.")
    second = await agent.run("What is the cat called?", message_history=first.all_messages())
    assert "Pixel" in second.output, second
    print(second.output)


async def main() -> None:
    await use(f"openai:{name}")
    await use(OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none")))
    await remember()


asyncio.run(main())
