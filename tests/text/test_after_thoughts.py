"""Grammars of what comes after thoughts."""

from __future__ import annotations

import json

import pytest

from megatron_hybrid.request import Grammar
from megatron_hybrid.text.after_thoughts import after_thoughts
from megatron_hybrid.text.grammar import GrammarCompiler
from megatron_hybrid.text.reasoning import FORMATS, Opening
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level

FORM = {form.name: form for form in FORMATS}
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer"}},
        }
    ),
)
REGEX = Grammar("regex", r"a/b\/c|[0-9]{3}")
CALLS = Grammar("lark", 'call: "now()"\nbody: call\nstart: "[" body "]"\n')
OWN = Grammar(
    "lark",
    '%llguidance {}\nstart: held thoughts // }\nheld: "}" | thoughts\nthoughts: WORD\n'
    "WORD: /[a-c]+/\n%ignore / /\n",
)
GOOD = {SCHEMA: '{"a": 1}', REGEX: "a/b/c", CALLS: "[now()]", OWN: "} ab"}
BAD = {SCHEMA: '{"a": "x"}', REGEX: "12", CALLS: "[now]", OWN: "} d"}


def tokenizer_with(special: bool) -> Tokenizer:
    hf = byte_level()
    if special:
        hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return Tokenizer(hf)


def allows(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    compiler = GrammarCompiler(
        tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_ids
    )
    matcher = compiler.answer(compiler.matcher(grammar))

    def may(token: int) -> bool:
        return bool(matcher.allowed()[token >> 3] >> (token & 7) & 1)

    for token in tokenizer.encode(text):
        if not may(token):
            return False
        matcher.advance(token)
    return matcher.is_complete or may(tokenizer.eos_token_ids[0])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("grammar", [SCHEMA, REGEX, CALLS, OWN])
def test_thoughts_are_free_and_what_follows_is_held(grammar: Grammar, special: bool) -> None:
    tokenizer, form = tokenizer_with(special), FORM["qwen3"]
    opened, unknown = (
        after_thoughts(grammar, form, begins, tokenizer)
        for begins in (Opening.THOUGHTS, Opening.UNKNOWN)
    )
    assert opened is not None and unknown is not None
    good, bad = GOOD[grammar], BAD[grammar]
    for thoughts in ("Hm. {x}\n</think>\n\n", "é\n\n</think>", f"{bad}</think>"):
        assert allows(tokenizer, opened, thoughts + good)
        assert allows(tokenizer, unknown, f"<think>\n{thoughts}{good}")
        assert not allows(tokenizer, unknown, thoughts + good)
        for wrong in (bad, f"x {good}", ""):
            assert not allows(tokenizer, opened, thoughts + wrong)
            assert not allows(tokenizer, unknown, f"<think>{thoughts}{wrong}")
    assert allows(tokenizer, unknown, good)
    assert not allows(tokenizer, opened, good)
    assert not allows(tokenizer, unknown, bad)
    # The first mark ends the thoughts.
    assert not allows(tokenizer, opened, f"Hm.</think>Hm.</think>{good}")


def test_marks_may_have_several_spellings() -> None:
    tokenizer = tokenizer_with(False)
    grammar = after_thoughts(REGEX, FORM["granite"], Opening.UNKNOWN, tokenizer)
    assert grammar is not None
    for here in ("Here is", "Here's"):
        text = f"{here} my thought process: Hm.\n{here} my response: 123"
        assert allows(tokenizer, grammar, text)
    assert allows(tokenizer, grammar, "123")


def test_what_cannot_be_put_behind_thoughts_is_said() -> None:
    tokenizer, form = tokenizer_with(False), FORM["qwen3"]
    for grammar in (Grammar("lark", "}"), Grammar("json_schema", "true"), Grammar("regex", "")):
        assert after_thoughts(grammar, form, Opening.THOUGHTS, tokenizer) is None
