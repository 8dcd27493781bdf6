"""Conversations: by previous_response_id or by items that come back, the next prompt holds the very
tokens of the turns before it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.http.responses.responding import ADD, CALL, FOX, OPENED, THOUGHT, Serve, Server
from tests.text import thinking_templates as templates
from tests.thorough import A_THIRD

AGAIN = {"role": "user", "content": "Again"}
KEPT = {"chat_template_kwargs": {"truncate_history_thinking": False}}
INSIDE = {"chat_template_kwargs": {"keep_past_thinking": True}}
# Other white space than the template writes it with.
SPACED = '<tool_call>{"name":"add", "arguments":{"a":1}}</tool_call>'


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def output(response: dict[str, Any], text: str = "3") -> list[dict[str, Any]]:
    """Of each call in a response."""
    return [
        {"type": "function_call_output", "call_id": one["call_id"], "output": text}
        for one in response["output"]
        if one["type"] == "function_call"
    ]


def next_prompt(
    server: Server, first: dict[str, Any], added: list[dict[str, Any]], how: str, **more: Any
) -> list[int]:
    """Of a turn that goes on from the response to "Hello"."""
    if how == "by id":
        server.ask(added, previous_response_id=first["id"], **more)
    elif how == "sealed":  # as clients do that drop the content of thoughts
        kept = [{k: v for k, v in one.items() if k != "content"} for one in first["output"]]
        items = [
            sent if sent["type"] == "reasoning" else one
            for one, sent in zip(first["output"], kept, strict=True)
        ]
        server.ask([message("user", "Hello"), *items, *added], **more)
    elif how == "by items":
        server.ask([message("user", "Hello"), *first["output"], *added], **more)
    else:
        names = [{"type": "item_reference", "id": one["id"]} for one in first["output"]]
        server.ask([message("user", "Hello"), *names, *added], **more)
    return server.prompt


@A_THIRD
@pytest.mark.parametrize("how", ["by id", "by items", "by references", "sealed"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "text", "more"),
    [
        (templates.QWEN3, FOX, {}),
        (templates.QWEN3, SPACED, {"tools": [ADD]}),
        (templates.QWEN3, f"Look.\n{SPACED}\n{SPACED}", {"tools": [ADD]}),
        (templates.NEMOTRON_3, f"{THOUGHT}\n</think>\n{FOX}", KEPT),
        (templates.LFM2_5, f"<think>\n{OPENED}{FOX}", INSIDE),
        # Thoughts before a call stay until the next question.
        (templates.QWEN3_5, f"{OPENED}Look.\n{SPACED}", {"tools": [ADD]}),
        (templates.QWEN3, f"<think>\n{OPENED}{SPACED}", {"tools": [ADD]}),
    ],
)
def test_a_turn_holds_the_tokens_of_the_one_before_it(
    serve: Serve, template: str, text: str, more: dict[str, Any], how: str, stream: bool
) -> None:
    server = serve(template, text)
    if how == "sealed":
        more = {**more, "include": ["reasoning.encrypted_content"]}
    if stream:
        first = server.stream(**more)[-1]["response"]
    else:
        first = server.ask(**more)
    known = server.prompt + server.engine.ids
    added = output(first) or [AGAIN]
    prompt = next_prompt(server, first, added, how, **more)
    assert prompt[: len(known)] == known
    assert prompt == next_prompt(server, first, added, "by items", **more)


@pytest.mark.parametrize("seal", ["gAAAAA", "megatron-hybrid:", "megatron-hybrid:%", "\u00e9"])
def test_thoughts_that_others_have_sealed_are_not_there(serve: Serve, seal: str) -> None:
    server = serve(templates.QWEN3, FOX)
    thought = {"type": "reasoning", "summary": [], "encrypted_content": seal}
    server.ask([message("user", "Hello"), thought, message("assistant", "Hi"), AGAIN])
    assert "<think>" not in server.said and "Hi" in server.said


def test_thoughts_are_sealed_on_request_and_where_nothing_is_stored(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}{FOX}")
    include = {"include": ["reasoning.encrypted_content"]}
    for more, seals in (({}, False), (include, True), ({"store": False}, True)):
        thoughts = server.ask(**more)["output"][0]
        assert ("encrypted_content" in thoughts) == seals


def test_turns_go_on_from_each_other(serve: Serve) -> None:
    server = serve(templates.QWEN3, "one", "two", "three", "four")
    first = server.ask()
    second = server.ask("Again", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    server.ask("And", previous_response_id=second["id"])
    whole = server.prompt
    said = [message("user", "Hello"), message("assistant", "one"), AGAIN]
    server.ask([*said, message("assistant", "two"), message("user", "And")])
    assert server.prompt == whole
    # Another turn from the first one.
    server.ask("Or", previous_response_id=first["id"])
    assert "two" not in server.said and "one" in server.said


def test_thoughts_that_a_template_drops_are_not_there(serve: Serve) -> None:
    server = serve(templates.QWEN3_5, f"{OPENED}{FOX}")
    first = server.ask()
    for how in ("by id", "by items", "by references"):
        next_prompt(server, first, [AGAIN], how)
        assert THOUGHT not in server.said and FOX in server.said


def test_instructions_are_those_of_one_response(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    first = server.ask(instructions="Be brief.")
    assert server.said.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    server.ask("Again", previous_response_id=first["id"])
    assert "Be brief." not in server.said
    server.ask("Again", previous_response_id=first["id"], instructions="Be long.")
    assert server.said.startswith("<|im_start|>system\nBe long.<|im_end|>")


def test_instructions_and_system_messages_at_the_beginning_are_one_message(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    rules = [message("developer", "Rule 1."), message("system", "Rule 2."), AGAIN]
    server.ask(rules, instructions="Be brief.")
    begin = "<|im_start|>system\nBe brief.\n\nRule 1.\n\nRule 2.<|im_end|>\n<|im_start|>user"
    assert server.said.startswith(begin)
    server.ask([AGAIN, message("developer", "Rule 3.")])
    assert server.said.count("<|im_start|>system") == 1


def test_parts_of_a_message_and_a_string_are_the_same(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    server.ask("Hello\nyou")
    plain = server.prompt
    parts = [{"type": "input_text", "text": text} for text in ("Hello", "you")]
    server.ask([{"type": "message", "role": "user", "content": parts}])
    assert server.prompt == plain


def test_calls_of_one_response_are_one_message_with_their_outputs_after_it(serve: Serve) -> None:
    server = serve(templates.QWEN3, "First.\n" + CALL + "\n" + CALL, FOX)
    first = server.ask(tools=[ADD])
    kinds = [one["type"] for one in first["output"]]
    assert kinds == ["message", "function_call", "function_call"]
    server.ask([*output(first)], previous_response_id=first["id"], tools=[ADD])
    asked = "<|im_start|>assistant\nFirst."
    assert server.said.count("<|im_start|>assistant") == 2 and asked in server.said
    assert server.said.count("<|im_start|>tool\n3<|im_end|>") == 2


def test_outputs_may_be_parts(serve: Serve) -> None:
    server = serve(templates.QWEN3, CALL, FOX)
    first = server.ask(tools=[ADD])
    (result,) = output(first)
    result["output"] = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]
    server.ask([result], previous_response_id=first["id"], tools=[ADD])
    assert "<|im_start|>tool\n4\n2<|im_end|>" in server.said


def test_refusals_and_answers_from_elsewhere_are_text(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    refusal = {"type": "refusal", "refusal": "I won't."}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    server.ask(
        [
            message("user", "Hello"),
            {"type": "message", "role": "assistant", "content": [refusal], "phase": "commentary"},
            AGAIN,
            thought,
            {**call, "status": "completed", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ]
    )
    assert "I won't." in server.said and "<|im_start|>tool\nok<|im_end|>" in server.said


def test_too_long_an_input_loses_its_oldest_turns_if_that_is_asked_for(serve: Serve) -> None:
    server = serve(templates.QWEN3, FOX)
    turns = [
        message(role, f"{text * 190} {number}.")
        for number in range(30)
        for role, text in (("user", "a"), ("assistant", "b"))
    ]
    turns = [message("developer", "Be brief."), *turns, message("user", "Now?")]
    assert server.refused(turns) == (400, "input", "context_length_exceeded")
    server.ask(turns, truncation="auto", max_output_tokens=50, instructions="Rule.")
    assert server.said.startswith(
        "<|im_start|>system\nRule.\n\nBe brief.<|im_end|>\n<|im_start|>user"
    )
    assert "Now?" in server.said and " 0." not in server.said
    # As few as possible: with one turn more it would not fit.
    turn = len(server.tokenizer.encode(f"{'a' * 190} 1.{'b' * 190} 1."))
    assert (
        len(server.prompt) + 50
        <= server.engine.max_seq_length
        < len(server.prompt) + 50 + turn + 40
    )
    one = [message("user", "a" * 9000)]
    assert server.refused(one, truncation="auto") == (400, "input", "context_length_exceeded")
    asked = server.refused("Hello", truncation="auto", max_output_tokens=5000)
    assert asked == (400, "max_output_tokens", "context_length_exceeded")
