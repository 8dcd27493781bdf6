"""Models that think: thoughts apart from content over HTTP, and their tokens in the next turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.request import ThinkingBudget, TokenLogprob
from megatron_hybrid.server.http import streaming
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.choice import Delta
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.options import REASONING_FORMATS, ServerOptions
from megatron_hybrid.text.answer_places import GeneratedAnswer, Place, Slot, find_places
from megatron_hybrid.text.reasoning import NAMES
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop, reference_server
from tests.server.scripted_engine import ScriptedEngine
from tests.text import thinking_templates as templates
from tests.text.chat_templates import SPECIAL_TOKENS, with_template
from tests.text.make_tokenizers import byte_level
from tests.text.test_after_thoughts import allows
from tests.thorough import usually

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "Again"}
DETAILS = "completion_tokens_details"
THOUGHT, FOX = "Hm, é😀.\n\nSo a < b?", "A quick\n fox."
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n{FOX}"
TO_OPENED = f"{THOUGHT}\n</think>\n\n{FOX}"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_the_flag_knows_every_format() -> None:
    assert REASONING_FORMATS == NAMES


class Server(NamedTuple):
    http: FlaskClient
    engine: ScriptedEngine
    tokenizer: Tokenizer

    def ask(self, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The only choice, its message and the usage, streamed the same as whole."""
        body = {"messages": [*messages], "temperature": 0, **more}
        given = self.http.post(CHAT, json=body)
        assert given.status_code == 200, given.data
        answer = given.get_json()
        (choice,) = answer["choices"]
        usage = {"stream_options": {"include_usage": True}}
        streamed = self.http.post(CHAT, json={**body, "stream": True, **usage})
        chunks = [
            json.loads(line[6:])
            for line in streamed.get_data(as_text=True).split("\n\n")
            if line.startswith("data: {")
        ]
        deltas = [one["choices"][0] for one in chunks if one["choices"]]
        for name in ("content", "reasoning_content", "reasoning"):
            text = "".join(one["delta"].get(name) or "" for one in deltas)
            assert text == (choice["message"].get(name) or ""), name
        assert deltas[-1]["finish_reason"] == choice["finish_reason"]
        assert chunks[-1]["usage"].get(DETAILS) == answer["usage"].get(DETAILS)
        return {**choice, "usage": answer["usage"], "deltas": deltas}

    def allows(self, text: str) -> bool:
        """Whether the last request's grammar lets an answer be this text."""
        grammar = self.engine.added[-1].params.grammar
        assert grammar is not None
        return allows(self.tokenizer, grammar, text)

    @property
    def prompt(self) -> list[int]:
        """That the engine was given last."""
        return self.engine.added[-1].prompt


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Any:
    running: list[RunningLoop] = []

    def start(template: str | Tokenizer, text: str, parser: str = "auto") -> Server:
        tokenizer = with_template(template) if isinstance(template, str) else template
        marks = [one for one in ("<think>", "</think>") if tokenizer.token_id(one) is not None]
        engine = ScriptedEngine(tokenizer, text, marks=tuple(marks))
        running.append(RunningLoop(engine, tmp_path_factory.mktemp("s")))
        options = ServerOptions(
            tokenizer_folder=str(tokenizer_folder), model_name="fake", reasoning_parser=parser
        )
        serving = Serving(running[-1].engines, tokenizer, options, running[-1].answers)
        return Server(create_app(serving).test_client(), engine, tokenizer)

    yield start
    for one in running:
        one.close()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (templates.QWEN3, WRITTEN),
        (templates.QWEN3_5, TO_OPENED),
        (templates.NEMOTRON_3, TO_OPENED),
        (templates.LFM2_5, WRITTEN),
        (templates.OLD_QWEN3, WRITTEN),
        (
            templates.GRANITE,
            f"Here is my thought process:\n{THOUGHT}\nHere is my response:\n\n{FOX}",
        ),
    ],
)
@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_thoughts_and_content_are_apart(serve: Any, template: str, text: str, burst: int) -> None:
    server = serve(template, text)
    server.engine.burst = burst
    choice = server.ask(HELLO)
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert (message["content"], choice["finish_reason"]) == (FOX, "stop")
    ids = server.engine.ids
    thoughts = choice["usage"][DETAILS]["reasoning_tokens"]
    marks = ("</think>", "response:")
    assert server.tokenizer.decode(ids[:thoughts]).endswith(marks)
    assert not server.tokenizer.decode(ids[: thoughts - 1]).endswith(marks)
    assert choice["usage"]["completion_tokens"] == len(ids) + 1


@pytest.mark.parametrize("special", [False, True])
def test_marks_may_be_tokens_of_their_own(serve: Any, special: bool) -> None:
    hf = byte_level()
    hf.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    hf.add_tokens(["</think>"], special_tokens=special)
    hf.chat_template = templates.QWEN3_5
    server = serve(Tokenizer(hf), TO_OPENED)
    choice = server.ask(HELLO)
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == FOX
    mark = server.engine.ids.index(server.tokenizer.token_id("</think>"))
    assert choice["usage"][DETAILS] == {"reasoning_tokens": mark + 1}


def test_an_answer_may_end_in_its_thoughts(serve: Any) -> None:
    server = serve(templates.QWEN3_5, TO_OPENED)
    choice = server.ask(HELLO, max_tokens=5)
    assert choice["message"]["reasoning_content"] == THOUGHT[:5]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["usage"][DETAILS] == {"reasoning_tokens": 5}


def test_an_answer_may_end_in_the_mark(serve: Any) -> None:
    choice = serve(templates.QWEN3_5, "Hm.\n</think>\n\nA").ask(HELLO, max_tokens=7)
    assert choice["message"]["reasoning_content"] == "Hm.\n</t"


def test_thoughts_are_shown_as_they_come() -> None:
    thought = Delta(0, "", [TokenLogprob(1, -1.0)], reasoning="Hm")
    assert streaming._by_choice([thought], {}) == [thought]


def test_usage_in_every_chunk_counts_thoughts(serve: Any) -> None:
    server = serve(templates.QWEN3_5, TO_OPENED)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [HELLO], "temperature": 0, "stream": True, "stream_options": options}
    lines = server.http.post(CHAT, json=body).get_data(as_text=True).split("\n\n")
    usages = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    counts = [(one["completion_tokens"], one[DETAILS]["reasoning_tokens"]) for one in usages]
    assert counts[0] == (0, 0)
    assert counts == sorted(counts) and all(thoughts <= tokens for tokens, thoughts in counts)
    assert counts[-1][0] - counts[-1][1] == len("\n\n") + len(FOX) + 1


def test_an_answer_without_thoughts_is_its_text(serve: Any) -> None:
    server = serve(templates.QWEN3, f" \n{FOX} <think>\n")
    choice = server.ask(HELLO)
    assert choice["message"]["content"] == f" \n{FOX} <think>\n"
    assert "reasoning" not in choice["message"]
    assert choice["usage"][DETAILS] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("template", [templates.QWEN3, templates.QWEN3_5, templates.NEMOTRON_3])
@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ],
)
def test_thoughts_can_be_turned_off(serve: Any, template: str, off: dict[str, Any]) -> None:
    server = serve(template, FOX)
    choice = server.ask(HELLO, **off)
    assert choice["message"] == {"role": "assistant", "content": FOX, "refusal": None}
    assert server.tokenizer.decode(server.prompt).rstrip().endswith("</think>")
    assert choice["usage"][DETAILS] == {"reasoning_tokens": 0}
    with_thoughts = {"chat_template_kwargs": {"enable_thinking": True}}
    server.ask(HELLO, **off | with_thoughts)
    assert not server.tokenizer.decode(server.prompt).rstrip().endswith("</think>")


def test_thoughts_stay_text_without_a_parser(serve: Any) -> None:
    choice = serve(templates.QWEN3, WRITTEN, "none").ask(HELLO)
    assert choice["message"]["content"] == WRITTEN
    assert DETAILS not in choice["usage"]


def test_a_parser_may_say_that_answers_begin_with_thoughts(serve: Any) -> None:
    choice = serve(templates.LFM2_5, TO_OPENED, "deepseek_r1").ask(HELLO)
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] == FOX


def test_fields_that_ask_for_what_is_done_are_taken(serve: Any) -> None:
    server = serve(templates.QWEN3, WRITTEN)
    for name in ("include_reasoning", "separate_reasoning", "stream_reasoning"):
        assert server.ask(HELLO, **{name: True})["message"]["reasoning"] == THOUGHT
        refused = server.http.post(CHAT, json={"messages": [HELLO], name: False})
        assert (refused.status_code, refused.get_json()["error"]["param"]) == (400, name)


def test_a_model_that_does_not_think_is_as_it_was(http: FlaskClient) -> None:
    body = {"messages": [HELLO], "temperature": 0, "max_tokens": 4}
    answer = http.post(CHAT, json=body).get_json()
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert DETAILS not in answer["usage"]


@pytest.mark.parametrize("field", ["response_format", "tool_choice"])
def test_a_grammar_begins_after_the_thoughts(serve: Any, field: str) -> None:
    said = {"response_format": '{"a": 1}', "tool_choice": CALL}[field]
    asked: dict[str, Any] = {"response_format": {"type": "json_object"}}
    if field == "tool_choice":
        asked = {"tools": TOOLS, "tool_choice": "required"}
    for template, text in (
        (templates.QWEN3, f"<think>\n{THOUGHT}\n</think>\n\n{said}"),
        (templates.QWEN3_5, f"{THOUGHT}\n</think>\n\n{said}"),
        (templates.QWEN3, said),
    ):
        server = serve(template, text)
        message = server.ask(HELLO, **asked)["message"]
        assert (message.get("reasoning") or THOUGHT) == THOUGHT
        assert ("reasoning" in message) == (text != said)
        if field == "response_format":
            assert message["content"] == said
        else:
            assert len(message["tool_calls"]) == 1 and not message["content"]
        assert server.allows(text)
        assert not server.allows(text.replace(said, "Well."))
    # Without thoughts it holds from the first token on.
    server = serve(templates.QWEN3_5, said)
    message = server.ask(HELLO, **asked, enable_thinking=False)["message"]
    assert "reasoning" not in message
    assert server.allows(said) and not server.allows(f"{THOUGHT}</think>{said}")


@pytest.mark.parametrize("asked", [{"grammar": 'start: "abc"'}, {"choice": ["abc", "abcd"]}])
def test_a_grammar_of_the_clients_own_begins_there_too(serve: Any, asked: dict[str, Any]) -> None:
    server = serve(templates.QWEN3_5, f"{THOUGHT}\n</think>\n\nabc")
    message = server.ask(HELLO, structured_outputs=asked)["message"]
    assert (message["content"], message["reasoning"]) == ("abc", THOUGHT)
    assert server.allows("Hm.</think>abc")
    assert not server.allows("abc") and not server.allows("Hm.</think>ab")


def test_strict_calls_leave_thoughts_free(serve: Any) -> None:
    server = serve(templates.QWEN3_5, TO_OPENED)
    function = {**TOOLS[0]["function"], "strict": True}
    choice = server.ask(HELLO, tools=[{"type": "function", "function": function}])
    assert choice["message"]["reasoning"] == THOUGHT
    # No call that is thought of is held to anything.
    assert server.allows(f"<tool_call>{TO_OPENED}") and server.allows(f"</think>{CALL}")
    assert not server.allows(f"</think>{CALL.replace('add', 'sub')}")


@pytest.mark.parametrize("parts", [False, True])
def test_an_answer_that_is_gone_on_with_may_be_in_its_thoughts(serve: Any, parts: bool) -> None:
    for said, thoughts in ((f"<think>\n{THOUGHT[:4]}", THOUGHT[4:]), ("<think></think>A", None)):
        rest = FOX if thoughts is None else f"{thoughts}\n</think>\n\n{FOX}"
        content = [{"type": "text", "text": said}] if parts else said
        last = {"role": "assistant", "content": content}
        how = {"continue_final_message": True, "add_generation_prompt": False}
        message = serve(templates.LFM2_5, rest).ask(HELLO, last, **how, **INSIDE)["message"]
        assert (message.get("reasoning"), message["content"]) == (thoughts, FOX)


def test_calls_are_read_after_the_thoughts_only(serve: Any) -> None:
    thought = f"Maybe {CALL}?"
    server = serve(templates.QWEN3_5, f"{thought}\n</think>\n\nLook.\n{CALL}")
    choice = server.ask(HELLO, tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (thought, "Look.")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("burst", [1, 1000])
def test_log_probabilities_are_those_of_all_tokens(serve: Any, burst: int) -> None:
    server = serve(templates.QWEN3_5, TO_OPENED)
    server.engine.burst = burst
    choice = server.ask(HELLO, logprobs=True)
    whole = choice["logprobs"]["content"]
    assert bytes(byte for one in whole for byte in one["bytes"]).decode() == TO_OPENED
    streamed = [
        one for delta in choice["deltas"] for one in (delta["logprobs"] or {}).get("content", ())
    ]
    assert streamed == whole


def turn_two(server: Server, *after: dict[str, Any], **more: Any) -> tuple[list[int], list[int]]:
    """The first turn's prompt and answer; the prompt of the next one."""
    answer = server.ask(HELLO, **more)["message"]
    first = server.prompt + server.engine.ids
    server.ask(HELLO, answer, *after, **more)
    return first, server.prompt


RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}
KEPT = {"chat_template_kwargs": {"truncate_history_thinking": False}}
INSIDE = {"chat_template_kwargs": {"keep_past_thinking": True}}


@pytest.mark.parametrize(
    ("template", "text", "more"),
    [
        (templates.NEMOTRON_3, f"{THOUGHT}\n</think>\n{FOX}", KEPT),
        # Less or more white space than the template has, where the prompt ended and at the end.
        (templates.NEMOTRON_3, f"\n{THOUGHT}\n</think>\n{FOX}\n", KEPT),
        # Here the prompt does not end with a line.
        (
            templates.NEMOTRON_3.replace(r"else '<think>\n' -}}", "else '<think>' -}}"),
            f"\n{THOUGHT}\n</think>\n{FOX}",
            KEPT,
        ),
        (templates.LFM2_5, WRITTEN, INSIDE),
    ],
)
def test_kept_thoughts_are_the_tokens_that_they_were(
    serve: Any, template: str, text: str, more: dict[str, Any]
) -> None:
    server = serve(template, text)
    first, second = turn_two(server, AGAIN, **more)
    assert second[: len(first)] == first


@pytest.mark.parametrize("template", [templates.QWEN3, templates.QWEN3_5])
def test_thoughts_before_a_call_are_the_tokens_that_they_were(serve: Any, template: str) -> None:
    opened = "" if template is templates.QWEN3_5 else "<think>\n"
    # Other white space than the template writes it with.
    call = '<tool_call>{"name":"add", "arguments":{"a":1}}</tool_call>'
    server = serve(template, f"{opened}{THOUGHT}\n</think>\n\nLook.\n{call}")
    first, second = turn_two(server, RESULT, tools=TOOLS)
    assert second[: len(first)] == first
    # After the next question the template leaves them out: then nothing of them may be there.
    _, third = turn_two(server, RESULT, AGAIN, tools=TOOLS)
    text = server.tokenizer.decode(third)
    assert THOUGHT not in text and text.count("<think>") == (not opened)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (templates.QWEN3, WRITTEN),
        (templates.QWEN3_5, TO_OPENED),
        (templates.NEMOTRON_3, TO_OPENED),
        (templates.LFM2_5, WRITTEN),
    ],
)
def test_thoughts_that_a_template_drops_are_not_there(serve: Any, template: str, text: str) -> None:
    server = serve(template, text)
    first, second = turn_two(server, AGAIN)
    said = {"role": "assistant", "content": FOX}
    assert second == server.tokenizer.encode_chat([HELLO, said, AGAIN])
    # The prefix cache holds up to the question, where a message has ended.
    (*_, end) = server.engine.added[0].message_ends
    assert second[:end] == first[:end]
    assert "Hello" in server.tokenizer.decode(first[:end])


def test_thoughts_are_not_looked_for_in_an_earlier_answer() -> None:
    first = GeneratedAnswer([1], "Hm.</think>")
    second = GeneratedAnswer([2], "Hm.</think>A fox.", thoughts=11)
    slots = [Slot(first.text, first), Slot("A fox.", second)]
    text = "Hm.</think>A fox.<eos>"
    assert find_places(text, ["", "", "<eos>"], slots) == [Place(0, 11, first)]
    assert find_places(text, ["Hm.</think>", "<eos>"], slots[1:]) == [Place(0, 17, second)]


def test_a_client_that_drops_or_changes_thoughts_gets_what_it_said(serve: Any) -> None:
    server = serve(templates.NEMOTRON_3, f"{THOUGHT}\n</think>\n{FOX}")
    said = {"role": "assistant", "content": FOX}
    server.ask(HELLO, **KEPT)
    for thoughts in ({}, {"reasoning_content": "Other."}, {"reasoning": THOUGHT[1:]}):
        server.ask(HELLO, {**said, **thoughts}, AGAIN, **KEPT)
        given = {"reasoning_content": next(iter(thoughts.values()), "")}
        expected = server.tokenizer.encode_chat(
            [HELLO, {**said, **given}, AGAIN], KEPT["chat_template_kwargs"]
        )
        assert server.prompt == expected
    server.ask(HELLO, {**said, "reasoning": THOUGHT}, AGAIN, **KEPT)
    assert server.prompt != server.tokenizer.encode_chat(
        [HELLO, {**said, "reasoning_content": THOUGHT}, AGAIN], KEPT["chat_template_kwargs"]
    )


def budget_of(server: Server, **more: Any) -> ThinkingBudget | int | None:
    """What the engine is told of a chat with these fields."""
    server.ask(HELLO, **more)
    return server.engine.added[-1].params.thinking_token_budget


KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_budget": 0}, 0),
        ({"custom_params": {"thinking_budget": 7}}, 7),
        ({"thinking_token_budget": 7, "thinking_budget": 7, KWARGS: {"thinking_budget": 9}}, 7),
        ({KWARGS: {"thinking_budget": 7}}, 7),
        ({KWARGS: {"thinking_token_budget": 7, "enable_thinking": True}}, 7),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": None, "custom_params": {}}, None),
        # What only the template understands.
        ({KWARGS: {"thinking_budget": "low"}}, None),
        ({KWARGS: {"thinking_budget": -1}}, None),
        ({KWARGS: {"thinking_budget": True}}, None),
        # There are to be no thoughts.
        ({"thinking_token_budget": 7, "enable_thinking": False}, None),
    ],
)
def test_a_budget_has_the_names_that_clients_have_for_it(
    serve: Any, fields: dict[str, Any], tokens: int | None
) -> None:
    server = serve(templates.QWEN3_5, TO_OPENED)
    found = budget_of(server, **fields)
    close = tuple(server.tokenizer.encode("\n</think>"))
    wanted = tokens is not None
    assert found == (
        ThinkingBudget(tokens or 0, ("<think>",), ("</think>",), close, True) if wanted else None
    )


def test_a_budget_knows_how_the_answer_begins(serve: Any) -> None:
    asked = {"thinking_token_budget": 7}
    for template, opened in ((templates.QWEN3, False), (templates.NEMOTRON_3, True)):
        found = budget_of(serve(template, FOX), **asked)
        assert isinstance(found, ThinkingBudget) and found.opened == opened
    server = serve(templates.GRANITE, FOX)
    found = budget_of(server, **asked)
    assert isinstance(found, ThinkingBudget) and not found.opened
    assert server.tokenizer.decode(found.close) == "\nHere is my response:"
    assert set(found.begin) >= {"Here is my thought process:"}
    # In thoughts that are gone on with.
    server = serve(templates.LFM2_5, "m.</think>A")
    last = {"role": "assistant", "content": "<think>\nH"}
    server.ask(HELLO, last, continue_final_message=True, **asked, **INSIDE)
    found = server.engine.added[-1].params.thinking_token_budget
    assert isinstance(found, ThinkingBudget) and found.opened


@pytest.mark.parametrize(
    ("field", "fields", "reason"),
    [
        ("thinking_token_budget", {"thinking_token_budget": -2}, "from -1 to"),
        ("thinking_token_budget", {"thinking_token_budget": 1.5}, "whole number"),
        ("custom_params.other", {"custom_params": {"other": 1}}, "Unknown"),
        (
            "thinking_budget",
            {"thinking_token_budget": 1, "thinking_budget": 2},
            "thinking_token_budget is 1 and thinking_budget is 2",
        ),
    ],
)
def test_a_wrong_budget_is_refused_by_name(
    serve: Any, field: str, fields: dict[str, Any], reason: str
) -> None:
    answer = serve(templates.QWEN3, FOX).http.post(CHAT, json={"messages": [HELLO], **fields})
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and reason in error["message"]


def test_a_budget_needs_a_model_whose_thoughts_are_known(serve: Any, http: FlaskClient) -> None:
    body = {"messages": [HELLO], "max_tokens": 4}
    for one in (http, serve(templates.QWEN3, WRITTEN, "none").http):
        answer = one.post(CHAT, json={**body, "thinking_budget": 7})
        assert answer.status_code == 400 and "marks" in answer.get_json()["error"]["message"]
        # Unless it is the template's alone, which may know what to do with it.
        for harmless in ({"thinking_token_budget": -1}, {KWARGS: {"thinking_budget": 7}}):
            assert one.post(CHAT, json={**body, **harmless}).status_code == 200
    prompt = {"prompt": "Hello", "max_tokens": 4, "thinking_token_budget": 7}
    assert http.post("/v1/completions", json=prompt).status_code == 400


@pytest.mark.parametrize("drafts", usually([4], [0, 4]))
def test_a_models_thoughts_end_at_their_budget(tmp_path: Path, drafts: int) -> None:
    """The reference model goes on thinking until it is stopped."""
    (tmp_path / "template.jinja").write_text(
        "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}<|end|>"
        "{% endfor %}<|assistant|><think>\n{# </think> #}"
    )
    asked = {"messages": [HELLO], "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    with reference_server(tmp_path, tmp_path / "template.jinja", num_speculative_tokens=drafts) as (
        http,
        running,
    ):
        running.engine.runner.asynchronous = True
        url = {"prompt": "\n</think>", "add_special_tokens": False}
        close = http.post("/tokenize", json=url).get_json()["tokens"]
        plain = http.post(CHAT, json=asked).get_json()["choices"][0]["token_ids"]
        for budget in (0, 1, 9):
            answer = http.post(CHAT, json={**asked, "thinking_budget": budget, "n": 2}).get_json()
            for choice in answer["choices"]:
                ids = choice["token_ids"]
                assert ids[: budget + len(close)] == plain[:budget] + close
                thoughts = running.engine.incoming.grammars.reader()(plain[:budget])
                assert (choice["message"].get("reasoning") or "") == thoughts.strip()
            thinking = answer["usage"][DETAILS]["reasoning_tokens"]
            assert thinking == 2 * (budget + len(close))
        asked["response_format"] = {"type": "json_object"}
        answer = http.post(CHAT, json={**asked, "thinking_budget": 5}).get_json()
        (choice,) = answer["choices"]
        assert choice["message"]["content"].startswith("{")
        assert answer["usage"][DETAILS]["reasoning_tokens"] == 5 + len(close)
