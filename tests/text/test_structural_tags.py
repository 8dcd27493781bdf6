"""What answers structural tags allow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar
from megatron_hybrid.text.grammar import check
from megatron_hybrid.text.structural_tags import MAX_DEPTH, as_lark
from tests.text.test_after_thoughts import allows, tokenizer_with

Format = dict[str, Any]
TEXT: Format = {"type": "any_text"}
NUMBER: Format = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def several(kind: str, content: Format, **more: int) -> Format:
    return {"type": kind, "content": content, **more}


def triggered(**more: Any) -> Format:
    tags = [
        tag("<f=a>", NUMBER, "</f>"),
        tag("<f=b>", {"type": "regex", "pattern": "[xy/]+"}, ["</f>", "</g>"]),
        tag("<think>", const("!"), ""),
    ]
    return {"type": "triggered_tags", "triggers": ["<f=", "<think>"], "tags": tags, **more}


def separated(**more: Any) -> Format:
    tags = [tag("<", NUMBER, ">"), tag("[", TEXT, "]")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **more}


THINK: Format = {"type": "token", "token": "<think>"}
TAGGED = "Hi <f=a>12</f>\n<f=b>x/y</g>,<think>! bye"
# format, what it allows, what it does not
CASES: list[tuple[Format, list[str], list[str]]] = [
    (const('a"\\é\x7f'), ['a"\\é\x7f'], ["", "a"]),
    (TEXT, ["", "a\nb é"], []),
    ({**TEXT, "excludes": ["fox", "a.b"]}, ["", "fo x", "a-b"], ["a fox", "a.b"]),
    ({**TEXT, "max_chars": 3}, ["", "é日x"], ["abcd"]),
    (NUMBER, ["7"], ["x", '"7"', "7 8"]),
    ({"type": "regex", "pattern": "a/b|[0-9]+"}, ["a/b", "12"], ["a", "a/b1"]),
    ({"type": "grammar", "grammar": 'start: "a" x\nx: "b"'}, ["ab"], ["a"]),
    (sequence(const("a"), NUMBER, TEXT), ["a1", "a1 b"], ["a", "1"]),
    ({"type": "or", "elements": [const("no"), sequence(const("y"), TEXT)]}, ["no", "yes"], ["n"]),
    (several("optional", const("ab")), ["", "ab"], ["a", "abab"]),
    (several("plus", const("ab")), ["ab", "abab"], [""]),
    (several("star", const("ab")), ["", "ababab"], ["aba"]),
    (several("repeat", const("a"), min=1, max=2), ["a", "aa"], ["", "aaa"]),
    (several("repeat", const("a"), min=2, max=-1), ["aa", "aaaaa"], ["a"]),
    # Free text in a tag goes to the first of its ends.
    (tag("<r>", TEXT, "</r>"), ["<r></r>", "<r>a < b</r>"], ["<r>a", "<r></r>a", "a"]),
    (tag("<r>", TEXT, ["</r>", "."]), ["<r>a.", "<r>a</r>"], ["<r>a.b"]),
    (tag("", {**TEXT, "excludes": ["b"]}, "c"), ["ac", "c"], ["abc"]),
    (tag("<", {**TEXT, "max_chars": 2}, ">"), ["<>", "<ab>"], ["<abc>"]),
    (tag("<", sequence(NUMBER, TEXT), ">"), ["<1>", "<1a>"], ["<a>"]),
    (tag("<", {"type": "or", "elements": [NUMBER, TEXT]}, ">"), ["<1>", "<a>"], ["<a>>"]),
    (tag(THINK, TEXT, "."), ["<think>a."], ["<think>a", "."]),
    (tag("a", TEXT, THINK), ["ab<think>"], ["ab", "a<think>a"]),
    (tag("a", TEXT, ["<think>", "c"]), ["ab<think>", "abc"], ["abcd"]),
    # Text between tags is free, until a trigger.
    (triggered(), ["", "Hi <f", TAGGED], ["<f=a>1", "Hi <f=c>", "<f=a>1</g>", "<think>"]),
    (triggered(excludes=["bye"]), ["<f=a>1</f> b"], [TAGGED]),
    (triggered(at_least_one=True), ["<f=a>1</f>", "<think>! a<f=b>x</g>"], ["", TAGGED]),
    (triggered(stop_after_first=True), ["", "Hi", "a<f=a>1</f>"], ["<f=a>1</f>a"]),
    (
        triggered(at_least_one=True, stop_after_first=True),
        ["<f=a>1</f>", "<f=b>/</g>"],
        ["", "a<f=a>1</f>", "<f=a>1</f><f=a>1</f>"],
    ),
    (tag("<r>", triggered(), "</r>"), ["<r></r>", f"<r>{TAGGED}</r>"], ["<r>", "<r></r>a"]),
    (
        tag("<r>", triggered(stop_after_first=True), "</r>"),
        ["<r>a<f=a>1</f></r>", "<r>a</r>"],
        ["<r>a<f=a>1</f>a</r>"],
    ),
    (separated(), ["", "<1>", "<1>, [a], <2>"], ["<1>, ", "<1><2>", "a"]),
    (separated(at_least_one=True), ["[], <1>"], [""]),
    (separated(stop_after_first=True), ["", "[b]"], ["[b], <1>"]),
    (sequence(separated(), const("."), separated()), [".", "<1>.[], [a]"], ["<1>"]),
    # Added tokens are themselves wherever they stand.
    (const("a<think>b"), ["a<think>b"], ["ab"]),
    (tag("<think>\n", NUMBER, "\n</think>\n"), ["<think>\n1\n</think>\n"], ["1"]),
    (sequence(THINK, NUMBER), ["<think>1"], ["1"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_a_format_allows_what_it_says(form: Format, good: list[str], bad: list[str]) -> None:
    grammar = Grammar("structural_tag", json.dumps(form))
    check(grammar)  # where tokens are not known
    for special in (False, True):
        tokenizer = tokenizer_with(special)
        lark = as_lark(grammar, tokenizer.added_tokens)
        for text in good:
            assert allows(tokenizer, lark, text), text
        for text in bad:
            assert not allows(tokenizer, lark, text), text


def test_a_token_may_be_an_id() -> None:
    tokenizer = tokenizer_with(True)
    form = {"type": "token", "token": tokenizer.token_id("<think>")}
    grammar = as_lark(Grammar("structural_tag", json.dumps(form)), tokenizer.added_tokens)
    assert allows(tokenizer, grammar, "<think>") and not allows(tokenizer, grammar, "a")


def deep(count: int) -> Format:
    return several("optional", deep(count - 1)) if count else const("a")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (sequence(TEXT, const("a")), "endless format any_text"),
        (several("star", triggered()), "endless format triggered_tags"),
        (several("optional", sequence(const("a"), TEXT)), "endless format sequence"),
        (tag("<", TEXT, ""), "without an end around any_text"),
        ({**triggered(), "triggers": ["<f="]}, 'a tag with 0 triggers that "<think>"'),
        ({**triggered(), "triggers": ["<f=", "<think>", "<f"]}, "with 2 triggers"),
        ({**triggered(), "triggers": ["<f=", "<think>", "x"]}, 'trigger "x", with which no tag'),
        (several("repeat", const("a"), min=2, max=1), "2 to 1 times"),
        (several("repeat", const("a"), min=0, max=0), "0 to 0 times"),
        ({"type": "token", "token": "fox"}, 'token "fox", which is no added one'),
        (deep(MAX_DEPTH), "more than 64 formats"),
        ({"type": "dispatch"}, "no structural tag's format"),
        ({"type": "tag", "begin": "a"}, "no structural tag's format"),
        ([], "no structural tag's format"),
    ],
)
def test_what_can_not_be_followed_is_said(form: Any, reason: str) -> None:
    grammar = Grammar("structural_tag", json.dumps(form), "response_format.format")
    with pytest.raises(InvalidRequestError) as caught:
        as_lark(grammar, {})
    assert str(caught.value).startswith("response_format.format ") and reason in str(caught.value)
    assert caught.value.field == "response_format.format"
