"""A session as Claude Code has it: its bodies are served as they are, and each turn goes on from
the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.options import ServerOptions
from tests.server.conftest import RunningLoop
from tests.server.http import claude_code
from tests.server.http.messages_api import put_together, read_event, text, user
from tests.server.scripted_engine import ScriptedEngine
from tests.text import thinking_templates as templates
from tests.text.chat_templates import with_template


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REMINDER = text("<system-reminder>\nToday is Monday.\n</system-reminder>")
CALLS = [call("Bash", command="ls"), call("Read", file_path="/a")]
FIRST = "\n".join(["I look.\n</think>\n\nLet me see.", *CALLS])
SECOND = "There is no a.\n</think>\n\nThere is only b."
THIRD = "Hm.\n</think>\n\nYes."


@pytest.fixture
def session(tmp_path: Path, tokenizer_folder: Path) -> Any:
    tokenizer = with_template(templates.QWEN3_5)
    engine = ScriptedEngine(tokenizer, FIRST, SECOND, THIRD)
    engine.max_seq_length = 2**16
    running = RunningLoop(engine, tmp_path)
    options = ServerOptions(tokenizer_folder=str(tokenizer_folder), model_name="fake")
    yield create_app(running.serve(tokenizer, options)).test_client(), engine, tokenizer
    running.close()


def turn(http: FlaskClient, *messages: dict[str, Any]) -> dict[str, Any]:
    body = claude_code.body(*messages, temperature=0, cache_salt="mine")
    prompt = ("model", "messages", "system", "tools", "thinking", "cache_salt")
    counted = {name: body[name] for name in prompt}
    tokens = http.post("/v1/messages/count_tokens?beta=true", json=counted).get_json()
    answer = http.post(claude_code.PATH, json=body, headers=claude_code.HEADERS)
    assert answer.status_code == 200, answer.data
    *events, _ = answer.get_data(as_text=True).split("\n\n")
    message = put_together(list(map(read_event, events)))
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tokens == {"input_tokens": sum(message["usage"][name] for name in names)}
    return message


def test_a_session_goes_on_from_turn_to_turn(session: Any) -> None:
    http, engine, tokenizer = session
    question = user([REMINDER, {**text("What is in a?"), **claude_code.CACHED}])
    first = turn(http, question, claude_code.AGENTS)
    assert [block["type"] for block in first["content"]] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    assert first["stop_reason"] == "tool_use"
    assert first["content"][2]["input"] == {"command": "ls"}
    # Behind the second and the third block of the system, and behind the question.
    prompt = engine.added[-1].prompt
    marks = [tokenizer.decode(prompt[:end]) for end in engine.added[-1].cache_checkpoints]
    assert marks[0].endswith("command line tool.") and marks[1].endswith("- Be brief.")
    assert marks[2].endswith("What is in a?")
    written = first["usage"]["cache_creation_input_tokens"]
    assert written == engine.added[-1].cache_checkpoints[-1]
    answered = [*prompt, *engine.ids]

    ids = [block["id"] for block in first["content"][2:]]
    results = [
        {"tool_use_id": ids[0], "type": "tool_result", "content": "b", "is_error": False},
        {
            **{"tool_use_id": ids[1], "type": "tool_result", "is_error": True},
            "content": "<tool_use_error>File does not exist.</tool_use_error>",
            **claude_code.CACHED,
        },
    ]
    plain = {name: question[name] for name in ("role", "content")}
    plain["content"] = [REMINDER, text("What is in a?")]  # the mark has moved on
    history = [
        plain,
        claude_code.AGENTS,
        {"role": "assistant", "content": first["content"]},
        user(results),
    ]
    second = turn(http, *history)
    assert engine.added[-1].prompt[: len(answered)] == answered
    assert "Error: <tool_use_error>File does not exist" in tokenizer.decode(engine.added[-1].prompt)
    assert second["usage"]["cache_read_input_tokens"] >= written
    assert (second["content"][1]["text"], second["stop_reason"]) == ("There is only b.", "end_turn")

    said = [{"role": "assistant", "content": second["content"]}, user("Is that so?")]
    third = turn(http, *history, *said)
    assert third["content"][1]["text"] == "Yes."


@pytest.mark.parametrize("choice", ["any", "auto"])
def test_its_tools_can_be_forced_and_held_to(session: Any, choice: str) -> None:
    http, engine, _ = session
    tools = [{**tool, "strict": choice == "auto"} for tool in claude_code.TOOLS]
    body = claude_code.body(user("What is in a?"), tools=tools, tool_choice={"type": choice})
    assert http.post(claude_code.PATH, json={**body, "max_tokens": 1}).status_code == 200
    grammar = engine.added[-1].params.grammar
    assert grammar is not None and all(tool["name"] in grammar.text for tool in tools)


def test_small_requests_beside_the_session_are_served(session: Any) -> None:
    http, engine, _ = session
    titled = {
        "model": "fake",
        "max_tokens": 512,
        "temperature": 1,
        "system": [{"type": "text", "text": "Give the session a title."}],
        "messages": [user("What is in a?"), {"role": "assistant", "content": "{"}],
        "tools": [],
        "metadata": {"user_id": "u"},
    }
    assert http.post(claude_code.PATH, json=titled).status_code == 200
    probe = {"model": "fake", "max_tokens": 1, "messages": [user("quota")]}
    assert http.post(claude_code.PATH, json=probe).status_code == 200
    assert engine.added[-1].params.max_tokens == 1
