"""The official `openai` client over a socket, with a scripted model that thinks and calls; and
requests as Codex has them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from werkzeug.serving import make_server

from tests.server.http.responses.responding import ADD, OPENED, THOUGHT, Serve, Server
from tests.text import thinking_templates as templates

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

Connect = Callable[[Server], Any]
ASK: dict[str, Any] = {"model": "fake", "temperature": 0}


def call(**arguments: int) -> str:
    body = json.dumps({"name": "add", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a client of a server."""
    ends: list[Callable[[], Any]] = []

    def start(server: Server) -> Any:
        listening = make_server("127.0.0.1", 0, server.http.application, threaded=True)
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.port}/v1"
        client = openai.OpenAI(api_key="none", base_url=url, max_retries=0)
        ends.extend((client.close, listening.shutdown))
        return client

    yield start
    for end in ends:
        end()


@pytest.mark.parametrize("by_id", [True, False])
def test_a_loop_calls_until_the_model_answers(serve: Serve, connect: Connect, by_id: bool) -> None:
    says = [
        f"{OPENED}Both.\n{call(a=1, b=2)}\n{call(a=3, b=4)}",
        f"{OPENED}{call(a=3, b=7)}",
        f"{OPENED}It is 10.",
    ]
    server = serve(templates.QWEN3_5, *says)
    client = connect(server)
    context: list[Any] = [{"role": "user", "content": "1 + 2 + 3 + 4?"}]
    given, previous, results = context, None, []
    while True:
        known = [*server.prompt, *server.engine.ids] if server.engine.added else []
        response = client.responses.create(
            input=given, tools=[ADD], previous_response_id=previous, **ASK
        )
        assert server.prompt[: len(known)] == known
        assert response.output[0].content[0].text == THOUGHT
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        outputs = []
        for one in calls:
            results.append(sum(json.loads(one.arguments).values()))
            outputs.append(
                {
                    "type": "function_call_output",
                    "call_id": one.call_id,
                    "output": str(results[-1]),
                }
            )
        context += [*response.output, *outputs]
        given, previous = (outputs, response.id) if by_id else (context, None)
    assert response.output_text == "It is 10."
    assert results == [3, 7, 10]
    assert len(server.engine.added) == 3


def test_a_stream_is_put_together_by_the_client(serve: Serve, connect: Connect) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}Look.\n{call(a=1)}")
    client = connect(server)
    seen: dict[str, str] = {}
    with client.responses.stream(input="Hello", tools=[ADD], **ASK) as stream:
        for event in stream:
            if event.type.endswith(".delta"):
                seen[event.type] = seen.get(event.type, "") + event.delta
        response = stream.get_final_response()
    assert seen == {
        "response.reasoning_text.delta": THOUGHT,
        "response.output_text.delta": "Look.",
        "response.function_call_arguments.delta": '{"a": 1}',
    }
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    stored = client.responses.retrieve(response.id)
    assert [item.id for item in stored.output] == [item.id for item in response.output]
    assert (stored.output_text, stored.usage) == ("Look.", response.usage)


def test_answers_are_parsed(serve: Serve, connect: Connect) -> None:
    kind = pydantic.create_model("Sum", total=(int, ...))
    client = connect(serve(templates.QWEN3_5, f'{OPENED}{{"total": 10}}'))
    parsed = client.responses.parse(input="Sum?", text_format=kind, **ASK)
    assert parsed.output_parsed == kind(total=10)
    # What was parsed comes back as it is.
    again = [{"role": "user", "content": "Sum?"}, *parsed.output, {"role": "user", "content": "?"}]
    assert client.responses.parse(input=again, text_format=kind, **ASK).output_parsed.total == 10


def test_errors_have_the_clients_classes(serve: Serve, connect: Connect) -> None:
    client = connect(serve(templates.QWEN3, "Hello"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="a", tools=[{"type": "web_search"}], **ASK)
    assert refused.value.param == "tools[0].type" and "function" in refused.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(input="a", previous_response_id="resp_1", **ASK)
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(input="a", **ASK).id)


def test_a_session_as_codex_has_it(serve: Serve) -> None:
    """It stores nothing: every turn has all items, also thoughts, by their encrypted content."""
    command = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
    server = serve(templates.QWEN3_5, f"{OPENED}{command}", f"{OPENED}Two files.")
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    }
    shell = {"type": "function", "name": "shell", "description": "Runs it.", "strict": False}

    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    items = [message("developer", "Sandbox: none."), message("user", "How many files?")]
    body: dict[str, Any] = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "tools": [{**shell, "parameters": parameters}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
    }
    done = [
        event["item"]
        for event in server.stream(items, **body)
        if event["type"] == "response.output_item.done"
    ]
    thoughts, ran = done
    known = server.prompt + server.engine.ids
    back = [
        {name: thoughts[name] for name in ("type", "summary", "encrypted_content")},
        {name: ran[name] for name in ("type", "name", "arguments", "call_id")},
        {"type": "function_call_output", "call_id": ran["call_id"], "output": '{"output":"a b"}'},
    ]
    *_, last = server.stream([*items, *back], **body)
    assert server.prompt[: len(known)] == known
    assert last["response"]["output"][-1]["content"][0]["text"] == "Two files."
