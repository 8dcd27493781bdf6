"""/v1/responses: what a request asks for reaches the engine and the template, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.http.responses.responding import ADD, CALL, FOX, SUB, Serve
from tests.text import thinking_templates as templates
from tests.text.test_after_thoughts import allows


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(serve: Serve, mode: str) -> None:
    server = serve(templates.QWEN3, CALL)
    some = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "sub"}]}
    response = server.ask(tools=[ADD, SUB], tool_choice=some)
    # The scripted model does not care for grammars: what it may not call stays text.
    assert [item["type"] for item in response["output"]] == ["message"]
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None
    assert allows(
        server.tokenizer, grammar, '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
    )
    assert not allows(server.tokenizer, grammar, CALL)
    assert allows(server.tokenizer, grammar, FOX) == (mode == "auto")
    assert '"add"' in server.said and '"sub"' in server.said


def test_forms_hold_the_answer(serve: Serve) -> None:
    server = serve(templates.QWEN3, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form, bad in (
        ({"type": "json_schema", "name": "a", "schema": schema}, '{"a": "b"}'),
        ({"type": "json_object"}, "[]"),
    ):
        server.ask(text={"format": form})
        grammar = server.engine.added[-1].params.grammar
        assert grammar is not None and allows(server.tokenizer, grammar, '{"a": 1}')
        assert not allows(server.tokenizer, grammar, bad)
    server.ask(structured_outputs={"choice": ["b"]})
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None and allows(server.tokenizer, grammar, "b")
    assert "grammar" not in server.ask(text={"format": {"type": "text"}})


def test_a_forced_call_has_no_text_whose_form_could_matter(serve: Serve) -> None:
    """instructor asks for both."""
    server = serve(templates.QWEN3, CALL)
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    response = server.ask(tools=[ADD], tool_choice={"type": "function", "name": "add"}, text=form)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None and allows(server.tokenizer, grammar, CALL)
    assert not allows(server.tokenizer, grammar, "{}")
    # Where it may call, it calls or follows the form.
    server.ask(tools=[ADD], text=form)
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None and allows(server.tokenizer, grammar, CALL)
    assert allows(server.tokenizer, grammar, "{}")
    assert not allows(server.tokenizer, grammar, FOX)


def test_sampling_and_scheduling_are_as_in_chats(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    server.ask(
        max_output_tokens=20,
        top_p=0.5,
        top_k=3,
        min_p=0.125,
        seed=7,
        presence_penalty=0.5,
        stop=["never this"],
        cache_salt="mine",
        priority=-1,
        cache_checkpoints=[4],
        timeout=60,
    )
    added = server.engine.added[-1]
    params = added.params
    assert (params.max_tokens, params.top_p, params.top_k, params.min_p) == (20, 0.5, 3, 0.125)
    assert (params.seed, params.presence_penalty, params.stop) == (7, 0.5, ("never this",))
    assert (added.cache_salt, added.priority, added.cache_checkpoints) == ("mine", -1, (4,))


def test_effort_and_the_templates_variables_reach_the_template(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, FOX)
    server.ask(reasoning={"effort": "none"})
    assert server.said.endswith("</think>\n\n")
    server.ask(reasoning={"effort": "none"}, enable_thinking=True)
    assert server.said.endswith("<think>\n")
    server.ask(chat_template_kwargs={"enable_thinking": False})
    assert server.said.endswith("</think>\n\n")


def test_the_operators_sampling_is_that_of_open_fields(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX, sampling_defaults=(("top_k", 9), ("max_tokens", 3)))
    assert server.ask()["status"] == "incomplete"
    assert server.engine.added[-1].params.top_k == 9
    assert server.ask(max_output_tokens=100, top_k=2)["status"] == "completed"
    assert server.engine.added[-1].params.top_k == 2


IMAGE = {"type": "input_image", "image_url": "http://x"}
SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
FILE = {"type": "input_file", "file_url": "http://x"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"content": "a"}]}, "input[0].type", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0].type", "invalid_value"),
    (
        {"input": ["a", {"role": "user", "content": "a"}]},
        "input[0]",
        "invalid_type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}]},
        "input[0].content[1].type",
        "invalid_value",
    ),
    *(
        (
            {"input": [{"role": "user", "content": [part]}]},
            "input[0].content[0].type",
            "invalid_value",
        )
        for part in (SOUND, FILE)
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
        "input[0].output[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        "input[0].call_id",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
        "input[0].arguments",
        "invalid_value",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [ADD, SUB, ADD]}, "tools[2].name", "invalid_value"),
    (
        {"tools": [{**ADD, "parameters": {"not": {}}, "strict": True}]},
        "tools[0].parameters",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "invalid_value"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
        "tool_choice.name",
        "invalid_value",
    ),
    (
        {
            "tools": [ADD],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "sub"}],
            },
        },
        "tool_choice.tools[0].name",
        "invalid_value",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
        "text.format.schema",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "tools": [ADD], "tool_choice": "required"},
        "structured_outputs.regex",
        "invalid_value",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "text.format",
        "invalid_value",
    ),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": "conv_a"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "pmpt_a"}}, "prompt", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"include": ["everything"]}, "include", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 10_000}, "max_output_tokens", "context_length_exceeded"),
    ({"input": "a" * 5000}, "input", "context_length_exceeded"),
    ({"cache_checkpoints": [5000]}, "cache_checkpoints", "invalid_value"),
    ({"messages": []}, "messages", "unknown_parameter"),
]


@pytest.mark.parametrize(("body", "field", "code"), REFUSED)
def test_what_is_refused_is_named_as_the_client_names_it(
    serve: Serve, body: dict[str, Any], field: str, code: str
) -> None:
    server = serve(templates.QWEN3, FOX)
    given = body.get("input", "Hello")
    rest = {name: value for name, value in body.items() if name != "input"}
    assert server.refused(given, **rest) == (400, field, code)
    assert not server.engine.added


def test_a_model_that_is_not_served_is_not_found(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    assert server.refused(model="other") == (404, "model", "model_not_found")
    assert server.ask(model="fake")["model"] == "fake"


def test_what_the_template_refuses_is_said_of_the_input(serve: Serve) -> None:
    refusing = templates.QWEN3 + "{{- raise_exception('no') -}}"
    assert serve(refusing, FOX).refused() == (400, "input", "invalid_value")
