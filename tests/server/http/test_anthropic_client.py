"""The official `anthropic` client, over a socket, before an engine that plays the model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel, TypeAdapter
from werkzeug.serving import make_server

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import MAX_QUEUE, RunningLoop
from tests.server.http import claude_code
from tests.server.http.messages_api import user
from tests.server.scripted_engine import ScriptedEngine
from tests.text import thinking_templates as templates
from tests.text.chat_templates import with_template
from tests.thorough import thorough

anthropic: Any = pytest.importorskip("anthropic")
pytestmark = thorough

MODEL: dict[str, Any] = {"model": "fake", "max_tokens": 999}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FIRST = f"Hm.\n</think>\n\nLet me see.\n{CALL}"
LAST = "Good.\n</think>\n\nIt is sunny."
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "What the weather is like.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


class City(BaseModel):
    name: str
    people: int


class Stage(NamedTuple):
    client: Any
    engine: ScriptedEngine
    tokenizer: Tokenizer
    url: str


@pytest.fixture
def play(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Iterator[Any]:
    """A server whose engine says these texts, one after the other."""
    ends: list[Callable[[], object]] = []

    def start(*texts: str, **changes: Any) -> Stage:
        tokenizer = with_template(templates.QWEN3_5)
        engine = ScriptedEngine(tokenizer, *texts)
        engine.max_seq_length = 2**16
        running = RunningLoop(engine, tmp_path_factory.mktemp("s"))
        options = ServerOptions(
            tokenizer_folder=str(tokenizer_folder),
            model_name="fake",
            sampling_defaults=(("temperature", 0.0),),  # of which this client's newest has no field
        )
        app = create_app(running.serve(tokenizer, replace(options, **changes)))
        server = make_server("127.0.0.1", 0, app, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.port}"
        client = anthropic.Anthropic(api_key="secret", base_url=url, max_retries=0)
        ends.extend([client.close, server.shutdown, running.close])
        return Stage(client, engine, tokenizer, url)

    yield start
    for end in ends:
        end()


def test_a_message_is_the_clients_own(play: Any) -> None:
    stage = play(FIRST)
    raw = stage.client.messages.with_raw_response.create(
        messages=[user("Hello")], tools=[WEATHER], system="Be brief.", **MODEL
    )
    message = anthropic.types.Message.model_validate_json(raw.http_response.text, strict=True)
    thinking, said, call = message.content
    assert (thinking.thinking, said.text, call.input) == ("Hm.", "Let me see.", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == len("Hm.\n</think>")
    assert raw.parse()._request_id == raw.headers["request-id"]
    counted = stage.client.messages.count_tokens(
        model="fake", messages=[user("Hello")], tools=[WEATHER], system="Be brief."
    )
    assert counted.input_tokens == message.usage.input_tokens


def test_every_event_is_the_clients_own(play: Any) -> None:
    stage = play(FIRST, FIRST)
    event: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    asked = {**MODEL, "messages": [user("Hello")], "tools": [WEATHER]}
    with stage.client.messages.with_streaming_response.create(**asked, stream=True) as raw:
        kinds = []
        for piece in "".join(raw.iter_text()).split("\n\n")[:-1]:
            name, data = piece.split("\n")
            if name == "event: ping":
                continue
            kinds.append(event.validate_json(data.removeprefix("data: "), strict=True).type)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    with stage.client.messages.stream(**asked) as stream:
        seen = [one.type for one in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(seen)
    whole = stage.client.messages.create(**asked)
    for one, other in zip(final.content, whole.content, strict=True):
        left_out = {"id", "parsed_output"}
        assert one.model_dump(exclude=left_out) == other.model_dump(exclude=left_out)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_tool_runner_goes_on_to_the_end(play: Any) -> None:
    for streamed in (False, True):
        stage = play(FIRST, LAST)
        asked: list[str] = []

        @anthropic.beta_tool
        def weather(city: str) -> str:
            """What the weather is like.

            Args:
                city: Which one.
            """
            asked.append(city)  # noqa: B023
            return "sunny"

        runner = stage.client.beta.messages.tool_runner(
            **MODEL, messages=[user("Is it sunny?")], tools=[weather], stream=streamed
        )
        turns = [turn.get_final_message() if streamed else turn for turn in runner]
        assert asked == ["Paris"]
        assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
        assert turns[-1].content[-1].text == "It is sunny."
        first, second = (added.prompt for added in stage.engine.added)
        said = [token for letter in FIRST for token in stage.tokenizer.encode(letter)]
        assert second[: len(first) + len(said)] == first + said
        assert "sunny" in stage.tokenizer.decode(second[len(first) + len(said) :])


def test_answers_are_parsed_into_models(play: Any) -> None:
    stage = play('Hm.\n</think>\n\n{"name":"Paris","people":2}')
    asked = {**MODEL, "messages": [user("Which city?")], "output_format": City}
    parsed = stage.client.messages.parse(**asked)
    assert parsed.parsed_output == City(name="Paris", people=2)
    assert stage.engine.added[-1].params.grammar is not None
    with stage.client.messages.stream(**asked) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def test_errors_have_the_clients_classes(play: Any) -> None:
    stage = play("Hm.", api_keys=(ApiKey("secret", "alice"),))
    create = stage.client.messages.create
    asked = {"messages": [user("Hello")], "max_tokens": 9}
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(model="claude-of-another", **asked)
    assert missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        create(model="fake", extra_body={"top_p": 2}, **asked)
    stranger = anthropic.Anthropic(api_key="guess", base_url=stage.url, max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="fake", **asked)
    by_token = anthropic.Anthropic(auth_token="secret", base_url=stage.url, max_retries=0)
    assert by_token.messages.create(model="fake", **asked).content
    with pytest.raises(anthropic.APIStatusError, match="given up after"):
        stage.engine.step_seconds = 0.2
        list(create(model="fake", stream=True, extra_body={"timeout": 0.5}, **asked))
    stage.engine.step_seconds = 0
    stage.engine.num_waiting = MAX_QUEUE
    with pytest.raises(anthropic.APIStatusError) as full:
        create(model="fake", **asked)
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")


def test_models_are_the_clients_own(play: Any) -> None:
    stage = play("Hm.")
    (model,) = stage.client.models.list()
    anthropic.types.ModelInfo.model_validate(model.model_dump(mode="json"))
    assert (model.id, model.display_name) == ("fake", "fake")
    assert stage.client.models.retrieve("fake").id == "fake"


def test_bodies_of_claude_code_pass_through_the_client(play: Any) -> None:
    stage = play(FIRST.replace("weather", "Bash"))
    body = claude_code.body(user("What is here?"))
    del body["stream"]
    betas = claude_code.BETAS.split(",")
    with stage.client.beta.messages.stream(**body, betas=betas) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.usage.cache_creation_input_tokens == stage.engine.added[-1].cache_checkpoints[-1]


def test_the_async_client_streams(play: Any) -> None:
    stage = play(LAST)

    async def said() -> str:
        client = anthropic.AsyncAnthropic(auth_token="t", base_url=stage.url)
        async with client, client.messages.stream(**MODEL, messages=[user("Hello")]) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(said()) == "It is sunny."


def test_answers_come_back_as_the_clients_objects(play: Any) -> None:
    stage = play(FIRST, LAST)
    asked = {**MODEL, "tools": [WEATHER]}
    messages: list[Any] = [user("Is it sunny?")]
    first = stage.client.messages.create(messages=messages, **asked)
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps("sunny")}
    messages += [{"role": "assistant", "content": first.content}, user([result])]
    assert stage.client.messages.create(messages=messages, **asked).stop_reason == "end_turn"
