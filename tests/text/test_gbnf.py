"""Grammars in GBNF become Lark that holds answers to the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hybrid import reference_model
from megatron_hybrid.request import Grammar
from megatron_hybrid.text.gbnf import is_gbnf, lark_of, regex_of
from megatron_hybrid.text.grammar import GrammarCompiler
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.test_grammar import allowed

EOS = 1
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
# a comment with "quotes" and a rule ::= in it
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    text = (Path(reference_model.path()) / "tokenizer.json").read_text()
    return GrammarCompiler(text, 2048, (EOS,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(reference_model.path())


def matches(compiler: GrammarCompiler, tokenizer: Tokenizer, lark: str, text: str) -> bool:
    matcher = compiler.answer(compiler.matcher(Grammar("lark", lark)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for token in tokens:
        if token not in allowed(matcher):
            return False
        matcher.advance(token)
    return matcher.is_complete or EOS in allowed(matcher)


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        (JSON, ['{"a": [1, 2.5, "x\\n"], "b": null}', "{}", '{"a":\n\t1}'], ['{"a":}', "[1]"]),
        (r'root ::= "\u0041" | "\x42\U00000043"', ["A", "BC"], ["B", "C"]),
        (r"root ::= [\u0061-\u0063/\]\-^]", list("abc/]-^"), ["d", "\\"]),
        ("root ::= [^a-y]", ["z", "A", "-"], ["a", "y"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ('root ::= "a"\n  | "b"\n  | "é\\[\\n"', ["a", "b", "é[\n"], ["c", "ab"]),
        ('root ::= a-b .\na-b ::= "x"? (|"y")', ["xyz", "z", "x\n"], ["", "xyzz"]),
        ('root ::= n{2}\nn ::= "(" n ")" | "z"', ["zz", "(z)((z))"], ["z", "(z", "zzz"]),
        ('root ::= a "c"\na ::= | "b"', ["c", "bc"], ["b"]),
        ('root ::= a "c"\na ::= ("b" | )', ["c", "bc"], ["b"]),
        ('root ::= a "c" b\na ::=\nb ::= a root b |', ["c", "cc"], ["", "b"]),
        ('A ::= "1"\na ::= "2"\nroot ::= A a', ["12"], ["11", "22"]),
    ],
)
def test_the_same_texts_match(compiler, tokenizer, gbnf, good, bad):
    assert is_gbnf(gbnf)
    lark = lark_of(gbnf)
    for text in good:
        assert matches(compiler, tokenizer, lark, text), text
    for text in bad:
        assert not matches(compiler, tokenizer, lark, text), text


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("root ::= other", "the rule root names other"),
        ('a ::= "b"', "no rule named root"),
        ('root ::= "a\nb"', "line 1"),
        ('root ::= "a"\nb ::= ::= "c"', "line 2"),
        ('"a" root ::= "b"', "line 1"),
        ('root ::= "a"\nroot ::= "b"', "stands twice"),
        (r'root ::= "\q"', r"\\q stands for nothing"),
        (r'root ::= "\ud800"', "no character has the number d800"),
        (r'root ::= "\U00110000"', "no character has the number 00110000"),
    ],
)
def test_what_is_wrong_is_said(gbnf, reason):
    with pytest.raises(ValueError, match=reason):
        lark_of(gbnf)


def test_lark_is_not_taken_for_gbnf():
    assert not is_gbnf('start: "a" b // b ::= c\nb: /x::=/')


def test_any_text_can_stand_in_a_grammar(compiler, tokenizer):
    text = 'a "b" \\ /\n\x00\x1f\x7fé\U0001f600.*[a]'
    assert matches(compiler, tokenizer, f"start: /{regex_of(text)}/", text)
    assert not matches(compiler, tokenizer, f"start: /{regex_of('a.')}/", "ab")
    written = "".join(f"\\U{ord(one):08x}" for one in text)
    assert matches(compiler, tokenizer, lark_of(f'root ::= "{written}"'), text)


def test_a_choice_that_begins_another_one_can_end(compiler, tokenizer):
    lark = f"start: /{regex_of('north')}|{regex_of('north gate')}/"
    for text in ("north", "north gate"):
        assert matches(compiler, tokenizer, lark, text)
    assert not matches(compiler, tokenizer, lark, "north g")


def test_many_rules_are_read_in_time_that_grows_with_them():
    """Rules in the worst order: each leads to one that comes later."""
    count = 20_000
    rules = [f"a{number} ::= a{number + 1}" for number in range(count)]
    lark = lark_of("\n".join(["root ::= a0", *rules, f'a{count} ::= "x"']))
    assert lark.count("\n") == count + 3 and "r_" not in lark
