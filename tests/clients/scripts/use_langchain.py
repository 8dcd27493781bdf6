"""langchain-openai: structured output in each method, tools that are called, streaming, usage; the
same, and turns by the server's memory, through /v1/responses."""

import sys
from typing import Annotated

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:3]
chat = ChatOpenAI(
    base_url=url, api_key="none", model=model, temperature=0, max_tokens=400, max_retries=0
)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    degrees: int = Field(ge=-50, le=60)
    rain: bool


for method in ("function_calling", "json_schema"):
    structured = chat.with_structured_output(Weather, method=method, include_raw=True)
    answer = structured.invoke("It rains in Paris, at 12 degrees.")
    raw = answer["raw"]
    assert isinstance(answer["parsed"], Weather), answer
    assert raw.response_metadata["finish_reason"] in ("stop", "tool_calls"), raw
    print(method, answer["parsed"], raw.usage_metadata["output_tokens"])

# Of this method the server is told only "any JSON object": whether and how it ends is the model's
# affair, and the reference model opens strings that it does not close.
loose = chat.bind(response_format={"type": "json_object"}, max_tokens=64)
try:
    text = loose.invoke("It rains in Paris. Answer as JSON.").text
except openai.LengthFinishReasonError as cut:
    text = cut.completion.choices[0].message.content
assert text.startswith('{"'), text


@tool
def look_up(
    city: Annotated[str, Field(max_length=20)], days: Annotated[int, Field(ge=0, le=100)]
) -> str:
    """The weather of a city in so many days."""
    return f"In {days} days it rains."


question = HumanMessage("What is the weather in Paris?")
forced = chat.bind_tools([look_up], tool_choice="any", parallel_tool_calls=False)
called = forced.invoke([question])
(call,) = called.tool_calls
assert call["name"] == "look_up" and set(call["args"]) == {"city", "days"}, call
result = look_up.invoke(call)
assert isinstance(result, ToolMessage) and result.tool_call_id == call["id"]
after = chat.bind_tools([look_up]).invoke([question, called, result], max_tokens=16)
assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]

pieces = list(forced.stream([question]))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert [c["args"] for c in whole.tool_calls] == [call["args"]], whole

pieces = list(chat.stream("My name is Anna. What is my name?", max_tokens=16, stream_usage=True))
text = "".join(piece.text for piece in pieces)
assert text == chat.invoke("My name is Anna. What is my name?", max_tokens=16).text
assert sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces) > 0, pieces
print(text)

# Through /v1/responses, whose stored responses may be the history.
for stored in (False, True):
    responding = ChatOpenAI(
        base_url=url,
        api_key="none",
        model=model,
        temperature=0,
        max_tokens=100,
        max_retries=0,
        use_responses_api=True,
        use_previous_response_id=stored,
    )
    first = responding.invoke("The cat is called Pixel.")
    said = [HumanMessage("The cat is called Pixel."), first]
    second = responding.invoke([*said, HumanMessage("What is the cat called?")])
    assert "Pixel" in second.text, second
    before = first.usage_metadata["total_tokens"] - 2
    assert second.usage_metadata["input_token_details"]["cache_read"] >= before, second
    pieces = [piece.text for piece in responding.stream("My name is Anna. What is my name?")]
    assert len(pieces) > 3 and "Anna" in "".join(pieces), pieces
structured = responding.with_structured_output(Weather, method="json_schema")
assert isinstance(structured.invoke("It rains in Paris, at 12 degrees."), Weather)
forced = responding.bind_tools([look_up], tool_choice="any", parallel_tool_calls=False)
called = forced.invoke([question])
(call,) = called.tool_calls
after = responding.bind_tools([look_up]).invoke([question, called, look_up.invoke(call)])
assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]
