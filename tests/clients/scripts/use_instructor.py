"""instructor: an answer as a pydantic model, whole and streamed, in its modes for OpenAI's API."""

import sys

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    tags: list[str] = Field(default_factory=list, max_length=2)


url, model = sys.argv[1:3]
MESSAGES = [{"role": "user", "content": "Anna is 30 years old. Who is that?"}]
WANTED = {
    "model": model,
    "messages": MESSAGES,
    "response_model": Person,
    "max_tokens": 400,
    "temperature": 0,
}


def made_for(mode):
    openai_client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    return instructor.from_openai(openai_client, mode=instructor.Mode[mode]).chat.completions


for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    chat = made_for(mode)
    person, answer = chat.create_with_completion(**WANTED, max_retries=1)
    assert isinstance(person, Person), person
    assert answer.choices[0].finish_reason in ("stop", "tool_calls"), answer
    assert 0 < answer.usage.completion_tokens < 400, answer.usage
    print(mode, person, answer.usage.completion_tokens)

    parts = list(chat.create_partial(**WANTED))
    assert len(parts) > 1 or "TOOLS" in mode, "not streamed"  # a call comes in one piece
    assert isinstance(parts[-1].name, str) and 0 <= parts[-1].age <= 150, parts

# Of this mode the server is told only "any JSON object": whether and how it ends is the model's
# affair, and the reference model opens strings that it does not close.
try:
    made_for("JSON").create(**{**WANTED, "max_tokens": 64}, max_retries=1)
except IncompleteOutputException as cut:
    text = cut.last_completion.choices[0].message.content
    assert text.startswith('{"'), text
    print("JSON", text)

# In its mode for /v1/responses it asks for a form and for a call at once.
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
responding = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS).responses
person = responding.create(
    model=model,
    input=MESSAGES[-1]["content"],
    response_model=Person,
    max_output_tokens=400,
    temperature=0,
    max_retries=1,
)
assert isinstance(person, Person), person
print("RESPONSES_TOOLS", person)
