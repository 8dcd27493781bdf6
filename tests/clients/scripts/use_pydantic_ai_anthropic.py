"""pydantic-ai's model for Anthropic's API: typed answers by tool and by the server's schema; a
tool; streaming."""

import asyncio
import sys
from typing import Any, Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

url, name = sys.argv[1:3]
client = AsyncAnthropic(api_key="none", base_url=url.removesuffix("/v1"), max_retries=0)
model = AnthropicModel(
    name,
    provider=AnthropicProvider(anthropic_client=client),
    profile={"supports_json_schema_output": True},  # which it knows of Anthropic's models alone
)

# It sends no lengths and bounds, without which a model as small as this one does not end.
Name = Literal["Paris", "Rome"]


class City(BaseModel):
    name: Name
    is_large: bool


class FirstCallsTheTool(AbstractCapability[Any]):
    def get_model_settings(self) -> Any:
        return lambda run: {"tool_choice": ["count_people"] if run.run_step == 1 else "none"}


async def main() -> None:
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
    assert result.usage.requests == 2 and result.usage.cache_read_tokens > 0, result.usage
    print(called, result.output)

    plain = Agent(model, model_settings={"temperature": 0.0, "max_tokens": 16})
    async with plain.run_stream("My name is Anna. What is my name?") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1 and stream.usage.output_tokens > 0, (pieces, stream.usage)
    print("".join(pieces))


asyncio.run(main())
