"""Functions that a model may call: requests, how calls are read, and answers that must be calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid import reference_model
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams
from megatron_hybrid.server.http.protocol.generation_request import parse_chat
from megatron_hybrid.server.http.protocol.tools import Tools
from megatron_hybrid.server.http.tool_calls.calling import Allowed, ToolCalling, calls_grammar
from megatron_hybrid.server.http.tool_calls.formats import (
    FORMATS,
    NAMES,
    Call,
    choose_format,
    marks_that_are_special,
)
from megatron_hybrid.server.http.tool_calls.reader import ToolCallReader, read_answer
from megatron_hybrid.server.options import TOOL_CALL_FORMATS
from megatron_hybrid.text.detokenizer import IncrementalDetokenizer
from megatron_hybrid.text.grammar import GrammarCompiler
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level

FORMAT = {form.name: form for form in FORMATS}
CHAT = "/v1/chat/completions"
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/count"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "when": {"type": ["string", "null"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get-weather": WEATHER_SCHEMA,
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}},
        "additionalProperties": False,
    },
    "now": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = {"role": "user", "content": "What is the weather?"}


def test_the_flag_knows_every_format() -> None:
    assert TOOL_CALL_FORMATS == NAMES


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("hermes", r"{{ '<tool_call>\n{\"name\": \"' + tool_call.name }}"),
        ("xml", r"{{ '<tool_call>\n<function=' + tool_call.name + '>\n' }}"),
        ("nemotron_json", "{{ '<TOOLCALL>[' }}"),
        ("jamba", "{{ '<tool_calls>[' }}"),
        ("pythonic", "{{ '<|tool_call_start|>[' }}"),
        ("llama3_json", '{{ \'{"name": "\' + name + \'", "parameters": \' }}'),
    ],
)
def test_the_format_is_the_one_that_the_template_shows(name: str, sign: str) -> None:
    hf = byte_level()
    hf.chat_template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + sign
    tokenizer = Tokenizer(hf)
    assert tokenizer.takes_tools
    assert choose_format(tokenizer) is FORMAT[name]
    assert choose_format(tokenizer, "hermes") is FORMAT["hermes"]


def test_a_template_without_tools_has_no_format(tokenizer: Tokenizer) -> None:
    assert not tokenizer.takes_tools
    assert choose_format(tokenizer) is None
    with pytest.raises(ConfigurationError, match="--tool-call-parser"):
        ToolCalling(tokenizer, "other")


def read(name: str, text: str) -> tuple[str, list[Call]]:
    """Read at once, and character by character, which must be the same."""
    whole = read_answer(FORMAT[name], SCHEMAS, text)
    reader = ToolCallReader(FORMAT[name], SCHEMAS)
    pieces = [piece for character in text for piece in reader.push(character)] + reader.flush()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    assert (content, [piece for piece in pieces if isinstance(piece, Call)]) == whole
    return whole


ADD = Call("add", {"a": 1, "b": 2.5})
PARIS = Call("get-weather", {"city": 'P "a" </tool_call> é😀', "unit": "C"})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>',
            ("", [ADD]),
        ),
        (
            "hermes",
            'Let me see.\n<tool_call>{"name": "get-weather", "arguments": {"city": '
            '"P \\"a\\" </tool_call> é\\ud83d\\ude00", "unit": "C"}}</tool_call>\n'
            '<tool_call>{"name": "now"}</tool_call>\n',
            ("Let me see.", [PARIS, Call("now", {})]),
        ),
        (
            "nemotron_json",
            '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "b": 2.5}}, {"name": "now"}]'
            "</TOOLCALL>",
            ("", [ADD, Call("now", {})]),
        ),
        (
            "jamba",
            '<tool_calls>[\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n]</tool_calls>',
            ("", [ADD]),
        ),
        (
            "xml",
            "Hm.<tool_call>\n<function=get-weather>\n<parameter=city>\n5\n\nx\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n<parameter=when>\n5\n</parameter>\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            (
                "Hm.",
                [
                    Call("get-weather", {"city": "5\n\nx", "days": 3, "when": "5"}),
                    Call("now", {}),
                ],
            ),
        ),
        (
            "pythonic",
            "<|tool_call_start|>[get-weather(city='x, y', unit=\"C\"), add(a=-1, b=[1, {'q': "
            "true}])]<|tool_call_end|>Done.",
            (
                "Done.",
                [
                    Call("get-weather", {"city": "x, y", "unit": "C"}),
                    Call("add", {"a": -1, "b": [1, {"q": True}]}),
                ],
            ),
        ),
        (
            "llama3_json",
            '{"name": "add", "parameters": {"a": 1, "b": 2.5}}; {"name": "now", "parameters": {}}',
            ("", [ADD, Call("now", {})]),
        ),
        # The answer was cut short after the call, or the model left the mark out.
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', ("", [Call("now", {})])),
    ],
)
def test_calls_are_read(name: str, text: str, expected: tuple[str, list[Call]]) -> None:
    assert read(name, text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Nothing but text, <tool_\n"),
        ("hermes", " \n "),
        ("hermes", "Look:\n <tool_call>\nno JSON\n</tool_call>\n"),
        ("hermes", '<tool_call>{"name": "nobody knows it", "arguments": {}}</tool_call> x'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "unended</tool_call> and more'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("xml", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1"),
        ("pythonic", "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[add(a=open('x'))]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("llama3_json", '{"name": "Bob", "age": 5}'),
        ("llama3_json", 'Well, {"name": "now"}'),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert read_answer(FORMAT[name], SCHEMAS, text) == (text, [])
    if len(text) < 1000:
        assert read(name, text) == (text, [])


def test_a_call_after_a_broken_one_is_read() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": "x}}</tool_call>'
    assert read("hermes", f'{broken}\n<tool_call>{{"name": "now"}}</tool_call>') == (
        broken,
        [Call("now", {})],
    )


def test_text_flows_until_a_mark_may_begin() -> None:
    reader = ToolCallReader(FORMAT["hermes"], SCHEMAS)
    assert reader.push("One two") == ["One two"]
    assert reader.push(" <") == []
    assert reader.push("b> three\n") == [" <b> three"]
    assert reader.push('<tool_call>{"name": "now"}</tool_call>') == [Call("now", {})]
    assert reader.push("\n") == []
    assert reader.flush() == []


def test_marks_that_are_special_tokens_are_shown_to_the_reader() -> None:
    hf = byte_level()
    hf.add_special_tokens(
        {"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>", "<|hidden|>"]}
    )
    tokenizer = Tokenizer(hf)
    visible = marks_that_are_special(FORMAT["pythonic"], tokenizer)
    assert len(visible) == 2
    text = "<|hidden|><|tool_call_start|>[now()]<|tool_call_end|>"
    detokenizer = IncrementalDetokenizer(tokenizer, visible_ids=visible)
    shown = detokenizer.push(tokenizer.encode(text)) + detokenizer.flush()
    assert read_answer(FORMAT["pythonic"], SCHEMAS, shown) == ("", [Call("now", {})])
    assert marks_that_are_special(FORMAT["hermes"], tokenizer) == frozenset()


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    return Tokenizer.load(reference_model.path())


@pytest.fixture(scope="module")
def compiler(reference: Tokenizer) -> GrammarCompiler:
    folder = reference_model.path()
    return GrammarCompiler(
        (folder / "tokenizer.json").read_text(), reference.vocab_size, reference.eos_token_ids
    )


def allows(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    matcher = compiler.answer(compiler.matcher(grammar))

    def may(token: int) -> bool:
        return bool(matcher.allowed()[token >> 3] >> (token & 7) & 1)

    for token in tokenizer.encode(text):
        if not may(token):
            return False
        matcher.advance(token)
    return matcher.is_complete or may(tokenizer.eos_token_ids[0])


def written(name: str, *calls: str) -> str:
    form = FORMAT[name]
    if form.listed:
        return f"{form.begin}[{', '.join(calls)}]{form.end}"
    if not form.end:
        return "; ".join(calls)
    return "\n".join(f"{form.begin}\n{call}\n{form.end}" for call in calls)


def json_call(name: str, call: Call) -> str:
    arguments = json.dumps(call.arguments)
    return f'{{"name": "{call.name}", "{FORMAT[name].arguments_key}": {arguments}}}'


def a_call(name: str, call: Call) -> str:
    """In the format's own spelling."""
    if name == "xml":
        values = [
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in call.arguments.items()
        ]
        return f"<function={call.name}>\n{''.join(values)}</function>"
    if name == "pythonic":
        given = (f"{key}={json.dumps(value)}" for key, value in call.arguments.items())
        return f"{call.name}({', '.join(given)})"
    return json_call(name, call)


GOOD = [
    Call("get-weather", {"city": "x < y </ z", "unit": "F"}),
    Call("get-weather", {"city": "", "days": 3, "unit": "C"}),
    Call("add", {"b": 1.5}),
    Call("add", {"a": 2, "b": 1}),
    Call("now", {}),
]
BAD = [
    Call("get-weather", {"city": "x"}),
    Call("get-weather", {"city": "x", "unit": "K"}),
    Call("get-weather", {"city": "x", "days": 10, "unit": "C"}),
    Call("add", {"a": 1.5}),
    Call("add", {"c": 1}),
    Call("never", {}),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_answer_holds_calls_that_match_and_are_read(
    name: str, reference: Tokenizer, compiler: GrammarCompiler
) -> None:
    form = FORMAT[name]
    several = calls_grammar(form, reference, Allowed(SCHEMAS, several=True))
    single = calls_grammar(form, reference, Allowed(SCHEMAS, several=False))
    for call in GOOD:
        text = written(name, a_call(name, call))
        assert allows(compiler, reference, single, text), text
        assert read_answer(form, SCHEMAS, text) == ("", [call])
    for call in BAD:
        text = written(name, a_call(name, call))
        assert not allows(compiler, reference, single, text), text
    both = written(name, *(a_call(name, call) for call in GOOD[:3]))
    assert allows(compiler, reference, several, both), both
    assert not allows(compiler, reference, single, both)
    assert read_answer(form, SCHEMAS, both) == ("", GOOD[:3])
    assert not allows(compiler, reference, several, "No calls.")


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_with_strict_calls_may_be_text(
    name: str, reference: Tokenizer, compiler: GrammarCompiler
) -> None:
    grammar = calls_grammar(FORMAT[name], reference, Allowed(SCHEMAS, several=True, text=True))
    good, bad = (written(name, a_call(name, calls[0])) for calls in (GOOD, BAD))
    assert allows(compiler, reference, grammar, "No calls.")
    assert allows(compiler, reference, grammar, good)
    assert not allows(compiler, reference, grammar, bad)
    if FORMAT[name].end:
        assert allows(compiler, reference, grammar, f"Look: {good} Well.")
        assert not allows(compiler, reference, grammar, f"Look: {bad}")


@pytest.mark.parametrize("special", [False, True])
def test_a_mark_that_is_an_added_token_is_that_token(special: bool) -> None:
    """Qwen3's are added and not special, LFM2's are special."""
    hf = byte_level()
    hf.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=special)
    tokenizer = Tokenizer(hf)
    grammar = calls_grammar(FORMAT["hermes"], tokenizer, Allowed(SCHEMAS, several=True, text=True))
    compiler = GrammarCompiler(
        tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_ids
    )
    good, bad = (written("hermes", a_call("hermes", calls[0])) for calls in (GOOD, BAD))
    assert tokenizer.encode(good)[0] == tokenizer.token_id("<tool_call>")
    assert tokenizer.is_special(tokenizer.encode(good)[0]) == special
    assert allows(compiler, tokenizer, grammar, f"Look: {good} Well.")
    assert not allows(compiler, tokenizer, grammar, f"Look: {bad}")
    forced = calls_grammar(FORMAT["hermes"], tokenizer, Allowed(SCHEMAS, several=True))
    assert allows(compiler, tokenizer, forced, good)
    assert not allows(compiler, tokenizer, forced, f"Look: {good}")


def parsed(**fields: Any) -> Tools:
    return parse_chat({"messages": [QUESTION], **fields}).tools


def test_without_tools_nothing_is_read_or_forced() -> None:
    for choice in (None, "none", "auto"):
        tools = parsed(tools=None, tool_choice=choice, parallel_tool_calls=None)
        assert not tools.read and not tools.forced
    assert parsed(tools=TOOLS).choice == "auto"
    named = parsed(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    assert named.forced and named.choice == "now"


F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools", {"tools": "f"}),
        ("tools", {"tools": [F] * 129}),
        ("tools[0]", {"tools": ["f"]}),
        ("tools[0].type", {"tools": [{"function": {"name": "f"}}]}),
        ("tools[0].type", {"tools": [{**F, "type": "custom"}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"strict": True}}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools[1].function.name", {"tools": [F, F]}),
        ("tools[0].extra", {"tools": [{**F, "extra": 1}]}),
        ("tools[0].function.extra", {"tools": [{**F, "function": {"name": "f", "extra": 1}}]}),
        (
            "tools[0].function.parameters",
            {"tools": [{**F, "function": {"name": "f", "parameters": []}}]},
        ),
        ("tool_choice", {"tools": [F], "tool_choice": "any"}),
        ("tool_choice", {"tools": [F], "tool_choice": 1}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.type", {"tools": [F], "tool_choice": {"type": "allowed_tools"}}),
        (
            "tool_choice.function.name",
            {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        ),
        ("parallel_tool_calls", {"tools": [F], "parallel_tool_calls": 1}),
    ],
)
def test_what_is_wrong_with_tools_is_named(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parsed(**body)
    assert caught.value.field == field


def test_a_schema_that_cannot_be_held_to_is_refused(reference: Tokenizer) -> None:
    calling = ToolCalling(reference)
    parameters = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    tools = parsed(tools=[{"type": "function", "function": function}])
    with pytest.raises(InvalidRequestError) as caught:
        calling.params(tools, SamplingParams())
    field = "tools[0].function.parameters"
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} ")


def held(form: str, reference: Tokenizer, parameters: Any, **fields: Any) -> Grammar:
    """What an answer has to match that must call a function with these parameters."""
    function = {"name": "f"} | ({} if parameters is None else {"parameters": parameters})
    tools = parsed(
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        **fields,
    )
    assert tools.descriptions[0]["function"] == function, "the template sees what the client sent"
    grammar = ToolCalling(reference, form).params(tools, SamplingParams()).grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_that_the_schema_names(
    name: str, reference: Tokenizer, compiler: GrammarCompiler
) -> None:
    parameters = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for given, good, bad in (
        (parameters, {"a": 1}, {"a": 1, "b": 2}),
        (None, {}, {"a": 1}),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        (
            {"properties": {"o": parameters}},
            {"o": {"a": 1}},
            {"o": {"a": 1, "b": 2}},
        ),
    ):
        grammar = held(name, reference, given)
        for arguments, fits in ((good, True), (bad, False)):
            text = written(name, a_call(name, Call("f", arguments)))
            assert allows(compiler, reference, grammar, text) == fits, text


@pytest.mark.parametrize("name", NAMES)
def test_references_mean_the_whole_of_the_parameters(
    name: str, reference: Tokenizer, compiler: GrammarCompiler
) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "maximum": 9},
            "m": {"$ref": "#/properties/n"},
            "of": {"type": "array", "items": {"$ref": "#"}},
            "d": {"$ref": "#/$defs/odd"},
        },
        "$defs": {"odd": {"enum": [7, 1]}},
    }
    grammar = held(name, reference, parameters)
    for arguments, fits in (
        ({"n": 1, "m": 2, "of": [{"n": 3, "of": []}], "d": 7}, True),
        ({"m": 10}, False),
        ({"of": [{"n": 10}]}, False),
        ({"of": [[]]}, False),
        ({"d": 2}, False),
    ):
        text = written(name, a_call(name, Call("f", arguments)))
        assert allows(compiler, reference, grammar, text) == fits, text


@pytest.mark.parametrize(
    ("parameters", "field", "reason"),
    [
        ({"properties": {"a": {"not": {}}}}, "", 'it uses "not", which is not supported'),
        ({"properties": {"a": {"not": {}}}, "x-guidance": {"lenient": True}}, "", '"not"'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "", "$ref names '#/$defs/b'"),
        ({"type": "string"}, ".type", 'is "string"; arguments are an object'),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_function_whose_parameters_can_not_be_served_is_named(
    name: str, reference: Tokenizer, parameters: Any, field: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        held(name, reference, parameters)
    assert caught.value.field == f"tools[0].function.parameters{field}"
    assert reason in str(caught.value) and "%json" not in str(caught.value)


def test_a_model_whose_template_takes_no_tools_refuses_them(http: FlaskClient) -> None:
    answer = http.post(CHAT, json={"messages": [QUESTION], "tools": TOOLS})
    assert answer.status_code == 400
    assert answer.get_json()["error"]["param"] == "tools"
    answer = http.post("/tokenize", json={"messages": [QUESTION], "tools": TOOLS})
    assert answer.status_code == 400
