"""What bodies of /v1/messages become: the prompt, marks of the cache, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.http.preparation import Preparation
from megatron_hybrid.server.http.protocol.anthropic_chat import parse_messages
from megatron_hybrid.server.http.protocol.generation_request import Chat
from megatron_hybrid.server.http.protocol.parsing import BY_DEFAULT
from megatron_hybrid.server.options import ParseOptions
from megatron_hybrid.text.block_ends import BlockEnd
from megatron_hybrid.text.tokenizer import Ending, Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.http import test_reasoning
from tests.server.http.messages_api import COUNT, MESSAGES, ask, assistant, text, user
from tests.text import thinking_templates as templates

serve = test_reasoning.serve
HELLO = user("Hello")
NUMBER = {"type": "integer"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}
CALLED = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def parse(*messages: Any, **more: Any) -> Chat:
    options = more.pop("options", BY_DEFAULT)
    return parse_messages({"messages": [*messages], "max_tokens": 8, **more}, options)


def said(*messages: Any, **more: Any) -> list[dict[str, Any]]:
    """The chat, as the template gets it."""
    return parse(*messages, **more).messages


def test_system_and_blocks_become_messages() -> None:
    told = [text("Be brief."), text("Be kind.")]
    assert said(user([text("Hello"), text("you")]), system=told) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        user("Hello\nyou"),
    ]
    assert said(HELLO, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    for nothing in ("", [], [text("")]):
        assert said(HELLO, system=nothing) == [HELLO]


def test_messages_of_the_same_role_are_one() -> None:
    answers = [assistant("A "), assistant([text("fox"), text(".")])]
    assert said(HELLO, user("you"), *answers, user("And?")) == [
        user("Hello\nyou"),
        assistant("A fox."),
        user("And?"),
    ]


def test_system_messages_may_stand_between_others() -> None:
    later = {"role": "system", "content": "From now on in French."}
    assert said(HELLO, assistant("A."), later, user("And?"))[2] == later


REFUSES_LATER_SYSTEM = templates.QWEN3.replace(
    "{{- '<|im_start|>' + message.role",
    "{%- if message.role == 'system' and not loop.first -%}{{- raise_exception('Too late.') -}}"
    "{%- endif -%}{{- '<|im_start|>' + message.role",
)


@pytest.mark.parametrize("template", [templates.QWEN3, REFUSES_LATER_SYSTEM])
def test_later_system_messages_are_the_users_where_the_template_takes_none(
    serve: Any, template: str
) -> None:
    server = serve(template, "Fox.")
    later = {"role": "system", "content": "It is Monday."}
    first = {"role": "system", "content": "Be kind."}
    chat: dict[str, Any] = {"messages": [first, HELLO, later], "system": "Be brief."}
    ask(server.http, *chat["messages"], system="Be brief.")
    between = "\n" if template is REFUSES_LATER_SYSTEM else "<|im_end|>\n<|im_start|>system\n"
    assert server.tokenizer.decode(server.prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n"
        f"<|im_start|>user\nHello{between}It is Monday.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert server.http.post(COUNT, json=chat).get_json() == {"input_tokens": len(server.prompt)}


def test_calls_and_their_results_are_those_of_chats() -> None:
    chat = said(HELLO, assistant([text("So: "), USE]), user([RESULT, text("And?")]))
    assert chat == [
        HELLO,
        {**assistant("So: "), "tool_calls": [CALLED]},
        {"role": "tool", "content": "3", "tool_call_id": "toolu_1", "name": "add"},
        user("And?"),
    ]
    for content, told in (
        ([text("3"), text("4")], "3\n4"),
        (None, ""),
        ("", ""),
    ):
        result = {**RESULT, "content": content}
        assert said(HELLO, assistant([USE]), user([result]))[2]["content"] == told
    wrong = {**RESULT, "is_error": True}
    assert said(HELLO, assistant([USE]), user([wrong]))[2]["content"] == "Error: 3"


def test_thoughts_that_come_back_are_the_templates() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "of anybody's"}
    redacted = {"type": "redacted_thinking", "data": "???"}
    back = assistant([thinking, redacted, text("A fox.")])
    told = said(HELLO, back, user("And?"))[1]
    assert told == {**assistant("A fox."), "reasoning_content": "Hm."}


def test_a_last_answer_is_gone_on_with(http: FlaskClient, engine: FakeEngine) -> None:
    assert parse(HELLO).ending is Ending.ANSWER
    assert parse(HELLO, assistant("A f")).ending is Ending.CONTINUED
    for nothing in ("", [], [text("")]):
        empty = parse(HELLO, assistant(nothing))
        assert (empty.messages, empty.ending) == ([HELLO], Ending.ANSWER)
    ask(http, HELLO, assistant("A f"))
    chat = {"messages": [HELLO, assistant("A f")], "max_tokens": 8, "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert engine.added[0].prompt == engine.added[1].prompt


def test_tools_and_choices_are_those_of_chats() -> None:
    def tools(choice: dict[str, Any] | None, **more: Any) -> Any:
        return parse(HELLO, tools=[{**ADD, **more}], tool_choice=choice).tools

    plain = tools(None)
    assert plain.descriptions == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        }
    ]
    assert (plain.choice, plain.several, plain.forced) == ("auto", True, False)
    assert tools({"type": "any"}).forced
    assert tools({"type": "tool", "name": "add"}).choice == "add"
    assert not tools({"type": "none"}).read
    for kind in ("auto", "any"):
        assert not tools({"type": kind, "disable_parallel_tool_use": True}).several
    assert tools(None, strict=True).strict == {"add"}
    named = "mcp__a-server__" + "x" * 100  # as Claude Code names functions of others
    assert tools(None, type="custom", name=named, eager_input_streaming=True).schemas.keys() == {
        named
    }


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_an_answers_form_is_held_to(place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": NUMBER}}}
    asked = {"format": form, "effort": "low"} if place == "output_config" else form
    chat = parse(HELLO, **{place: asked})
    grammar = chat.generation.params.grammar
    assert grammar is not None and '"integer"' in grammar.text
    if place == "output_config":
        assert chat.template_arguments == {"reasoning_effort": "low"}


def test_a_budget_is_the_templates_variable_too() -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    arguments = parse(HELLO, thinking=enabled).template_arguments
    assert arguments == {"enable_thinking": True, "thinking_budget": 1024}
    kwargs = {"enable_thinking": False}
    arguments = parse(HELLO, thinking=enabled, chat_template_kwargs=kwargs).template_arguments
    assert arguments["enable_thinking"] is False


def test_what_changes_nothing_is_taken() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    chat = parse(
        user([{**text("Hello"), "citations": None}]),
        assistant([{**USE, "caller": {"type": "direct"}}]),
        user([RESULT]),
        metadata={"user_id": "somebody"},
        service_tier="auto",
        speed="fast",
        context_management={"edits": edits},
        diagnostics={"previous_message_id": "msg_1"},
        mcp_servers=[],
    )
    assert chat.messages == said(HELLO, assistant([USE]), user([RESULT]))


SCHEMA = {"type": "json_schema", "schema": {"not": {}}}
THOUGHT = {"type": "thinking", "thinking": "H"}
CLEAR = {"edits": [{"type": "clear_tool_uses_20250919"}]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x.example/a.png"}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": -1}),
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": ""}]}),
    ("messages[1].content[0].type", {"messages": [HELLO, assistant([RESULT])]}),
    ("messages[0].content[1].type", {"messages": [user([text("a"), IMAGE])]}),
    ("messages[0].content[0].type", {"messages": [user([{"type": "document"}])]}),
    ("messages[0].content[0].type", {"messages": [user([{"type": "audio", "source": {}}])]}),
    ("messages[0].content[0].type", {"messages": [user([{"type": "search_result"}])]}),
    ("content[0].content[0].type", {"messages": [user([{**RESULT, "content": [IMAGE]}])]}),
    ("messages[0].content[0].input", {"messages": [assistant([{**USE, "input": "x"}])]}),
    ("messages[0].content[0].text", {"messages": [user([{"type": "text"}])]}),
    ("messages[1].content", {"messages": [HELLO, assistant([USE])]}),
    ("messages[1].content", {"messages": [HELLO, assistant([THOUGHT])]}),
    ("system[0].type", {"system": [IMAGE]}),
    ("temperature", {"temperature": -0.5}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("tools[0].type", {"tools": [{"name": "web", "max_uses": 5, "type": "web_search_20250305"}]}),
    ("tools[1].type", {"tools": [ADD, {"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].type", {"tools": [{"type": 7}]}),
    ("tools[0].input_schema", {"tools": [{"name": "add"}]}),
    ("tools[0].name", {"tools": [{**ADD, "name": "a b"}]}),
    ("tools[1].name", {"tools": [ADD, ADD]}),
    ("tools[0].defer_loading", {"tools": [{**ADD, "defer_loading": True}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tools": [ADD], "tool_choice": {"type": "required"}}),
    ("tool_choice.name", {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}),
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ("output_config.format.schema", {"output_config": {"format": SCHEMA}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "regex"}}}),
    ("container", {"container": "c"}),
    ("mcp_servers", {"mcp_servers": [{"type": "url"}]}),
    ("context_management.edits[0].type", {"context_management": CLEAR}),
    ("cache_control.type", {"cache_control": {"type": "for ever"}}),
    ("cache_control", {"system": [{**text("a"), **MARK}] * 4, **MARK}),
    ("thread", {"thread": {"type": "create"}}),
    ("n", {"n": 2}),
]  # fmt: skip


def test_a_schema_that_cannot_be_held_to_is_named(serve: Any) -> None:
    tool = {**ADD, "strict": True, "input_schema": {"not": {}}}
    body = {"messages": [HELLO], "max_tokens": 8, "tools": [ADD | {"name": "sub"}, tool]}
    answer = serve(templates.QWEN3, "Fox.").http.post(MESSAGES, json=body)
    assert answer.status_code == 400
    assert "tools[1].input_schema" in answer.get_json()["error"]["message"]


def test_a_form_and_a_forced_call_do_not_go_together() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    asked: dict[str, Any] = {"tools": [ADD], "output_config": form}
    assert parse(HELLO, **asked).generation.params.grammar is not None
    with pytest.raises(InvalidRequestError, match="output_config.format.schema does not go with"):
        parse(HELLO, tool_choice={"type": "any"}, **asked)


@pytest.mark.parametrize(("field", "fields"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_served_is_named(
    http: FlaskClient, field: str, fields: dict[str, Any]
) -> None:
    answer = http.post(MESSAGES, json={"messages": [HELLO], "max_tokens": 8, **fields})
    error = answer.get_json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert field in error["message"]


def test_unknown_fields_can_be_dropped() -> None:
    lenient = ParseOptions(ignore_unknown_fields=True)
    marked = {**text("Hello"), "surprise": 1}
    chat = parse(user([marked]), tools=[{**ADD, "new": 1}], betas=["x"], options=lenient)
    assert chat.messages == [HELLO]


# Marks of the cache.


def marks(*messages: Any, **more: Any) -> list[BlockEnd]:
    return sorted(parse(*messages, **more).marks)


def test_marks_stand_where_their_blocks_end() -> None:
    marked = {**text("Be brief."), **MARK}
    assert marks(HELLO, system=[marked, text("And kind.")]) == [BlockEnd(0, len("Be brief."))]
    assert marks(user([text("Hello"), {**text("you"), **MARK}])) == [BlockEnd(0, 9)]
    result = {**RESULT, **MARK}
    assert marks(HELLO, assistant([USE]), user([result])) == [BlockEnd(2, 1)]
    within = {**RESULT, "content": [text("3"), {**text("4"), **MARK}]}
    assert marks(HELLO, assistant([USE]), user([within, text("And?")])) == [BlockEnd(2, 3)]
    # An answer's end is where the next message begins, and needs none at the prompt's end.
    for block in (text("A fox."), USE):
        answer = assistant([{**block, **MARK}])
        assert marks(HELLO, answer, user([RESULT])) == [BlockEnd(2, 0)]
    assert marks(HELLO, assistant([{**text("A f"), **MARK}])) == []
    # Tools stand somewhere before the first question.
    tools = [ADD, {**ADD, "name": "sub", **MARK}]
    assert marks(HELLO, tools=tools) == [BlockEnd(0, 0)]
    assert marks(HELLO, tools=tools, system="Be brief.") == [BlockEnd(1, 0)]
    assert marks(HELLO, assistant("A."), user("Why?"), **MARK) == [BlockEnd(2, len("Why?"))]
    assert marks(user([marked]), **MARK) == [BlockEnd(0, len("Be brief."))] * 2


def before(engine: FakeEngine, tokenizer: Tokenizer) -> list[str]:
    """The prompt's text up to each of the positions that the engine was asked to keep."""
    added = engine.added[-1]
    return [
        tokenizer.decode(added.prompt[:position], skip_special_tokens=False)
        for position in added.cache_checkpoints
    ]


@pytest.mark.parametrize("template", [templates.QWEN3, templates.NEMOTRON_3])
def test_marks_are_positions_in_the_prompt(serve: Any, template: str) -> None:
    server = serve(template, "Fox.")
    system = [{**text("Be brief. "), **MARK}, text("It is Monday.")]
    question = user([{**text("Who are you? 😀"), **MARK}, text("Quick!")])
    answer = ask(server.http, question, assistant("A fox."), user("And?"), system=system)
    first, second = before(server.engine, server.tokenizer)
    assert first == "<|im_start|>system\nBe brief."
    assert second.endswith("<|im_start|>user\nWho are you? 😀")
    added = server.engine.added[-1]
    usage = answer["usage"]
    assert usage["cache_creation_input_tokens"] == added.cache_checkpoints[-1]
    assert usage["input_tokens"] == len(added.prompt) - added.cache_checkpoints[-1]
    again = ask(server.http, question, assistant("A fox."), user("And?"), system=system)["usage"]
    cached = again["cache_read_input_tokens"]
    assert cached > added.cache_checkpoints[-1] and again["cache_creation_input_tokens"] == 0
    assert again["input_tokens"] == len(added.prompt) - cached


def test_a_mark_on_a_tool_is_behind_all_tools(serve: Any) -> None:
    server = serve(templates.QWEN3, "Fox.")
    for system in (None, "Be brief."):
        ask(server.http, HELLO, system=system, tools=[{**ADD, **MARK}])
        (told,) = before(server.engine, server.tokenizer)
        assert '"Adds."' in told and told.endswith("<|im_end|>\n<|im_start|>user\n")
        assert "Hello" not in told


def test_a_template_that_hides_marks_has_none(serve: Any) -> None:
    upper = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    server = serve(upper, "Fox.")
    ask(server.http, user([{**text("Hello"), **MARK}]))
    assert server.engine.added[-1].cache_checkpoints == ()


# Counting.


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": [ADD], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "disabled"}},
        {"messages": [HELLO, assistant("A f")]},
        {"messages": [HELLO, assistant([USE]), user([RESULT])], "tools": [ADD]},
    ],
)
def test_tokens_are_counted_as_they_will_be_computed(serve: Any, fields: dict[str, Any]) -> None:
    server = serve(templates.QWEN3, "Fox.")
    body = {"messages": [HELLO], "max_tokens": 8, **fields}
    counted = server.http.post(COUNT, json=body)
    assert counted.status_code == 200, counted.data
    assert server.http.post(MESSAGES, json=body).status_code == 200
    assert counted.get_json() == {"input_tokens": len(server.prompt)}
    del body["max_tokens"]
    assert server.http.post(COUNT, json=body).get_json() == counted.get_json()


def test_a_chat_that_is_too_long_is_counted_too(http: FlaskClient, engine: FakeEngine) -> None:
    counted = http.post(COUNT, json={"messages": [user("a b " * 500)]}).get_json()
    assert counted["input_tokens"] > engine.max_seq_length


def test_what_is_prepared_can_come_from_another_process(
    tokenizer: Tokenizer, options: Any, running: Any
) -> None:
    import pickle

    body = json.dumps({"messages": [user([{**text("Hello"), **MARK}])], "max_tokens": 8}).encode()
    engine = running.client.check()
    prepared = Preparation(tokenizer, options).messages(body, engine)
    assert pickle.loads(pickle.dumps(prepared)).generation == prepared.generation
