"""Grammars over a small vocabulary, without a model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_hybrid import reference_model
from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import MAX_GRAMMAR_LENGTH, Grammar
from megatron_hybrid.text.grammar import AnswerMatcher, GrammarCompiler, Grammars, check
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level, save

EOS = (0, 4)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array"}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def compiler(folder: Path, tokenizer: Tokenizer) -> Grammars:
    """The model's vocabulary is padded."""
    return Grammars(folder, tokenizer.vocab_size + 13, EOS)


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def allowed(matcher: AnswerMatcher, avoid: list[int] | None = None) -> set[int]:
    ids = None if avoid is None else np.asarray(avoid)
    return set(np.unpackbits(matcher.allowed(ids), bitorder="little").nonzero()[0].tolist())


def takes(matcher: AnswerMatcher, tokens: list[int]) -> bool:
    """Whether every token is allowed where it comes, and the end after them."""
    for token in tokens:
        if matcher.is_complete or token not in allowed(matcher):
            return False
        matcher.advance(token)
    return matcher.is_complete or bool(allowed(matcher) & set(EOS))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", "[a-c]{2}x?"), ["ab", "cax"], ["a", "abcx", "xx", "ab "]),
        (Grammar("lark", 'start: "yes" | "no"'), ["yes", "no"], ["maybe", "y", "yesno"]),
        (
            schema(PERSON),
            ['{"name": "Ann", "ages": [3, 4]}', '{"name":"é","ages":[]}'],
            ['{"name": "Ann"}', '{ "name": "Ann", "ages": []}', '{"name":  "Ann", "ages": []}'],
        ),
    ],
)
def test_texts_match_or_do_not(compiler, tokenizer, grammar, good, bad):
    for text in good:
        assert takes(compiler.compile(grammar), tokenizer.encode(text)), text
    for text in bad:
        assert not takes(compiler.compile(grammar), tokenizer.encode(text)), text


def test_the_end_is_allowed_where_the_grammar_can_end_and_only_there(compiler, tokenizer):
    (a,) = tokenizer.encode("a")
    matcher = compiler.compile(Grammar("regex", "a+"))
    assert allowed(matcher) == {a}
    matcher.advance(a)
    assert allowed(matcher) == {a, *EOS} and not matcher.is_complete
    never = compiler.compile(Grammar("regex", "a+"), ignore_eos=True)
    never.advance(a)
    assert allowed(never) == {a}


def test_a_model_without_an_end_never_sees_one(folder, tokenizer):
    (a,) = tokenizer.encode("a")
    matcher = Grammars(folder, tokenizer.vocab_size, ()).compile(Grammar("regex", "a+"))
    matcher.advance(a)
    assert allowed(matcher) == {a}


def test_what_is_to_be_avoided_is_allowed_only_where_nothing_else_is(compiler, tokenizer):
    (a,) = tokenizer.encode("a")
    matcher = compiler.compile(Grammar("regex", "a+"))
    assert allowed(matcher, [a]) == {a}
    matcher.advance(a)
    assert allowed(matcher, [*EOS]) == {a}
    assert allowed(matcher, [a]) == set(EOS)
    assert allowed(matcher) == {a, *EOS}, "asking changes nothing"


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed(compiler, tokenizer):
    matcher = compiler.compile(Grammar("regex", "(.|\\n)*"))
    found = allowed(matcher)
    assert len(found) > 100 and max(found) < tokenizer.vocab_size
    assert len(matcher.allowed()) * 8 >= tokenizer.vocab_size + 13


def test_answers_to_one_grammar_go_their_own_ways(compiler, tokenizer):
    grammar = Grammar("regex", "ab|cd")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    first.advance(tokenizer.encode("a")[0])
    assert allowed(first) == set(tokenizer.encode("b"))
    assert takes(second, tokenizer.encode("cd")) and second.is_complete


def test_a_token_that_does_not_match_is_an_error(compiler, tokenizer):
    matcher = compiler.compile(Grammar("regex", "ab"))
    assert matcher.error is None
    matcher.advance(tokenizer.encode("z")[0])
    assert not matcher.is_complete and "grammar" in (matcher.error or "")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("yaml", ""), "'yaml'"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_LENGTH + 1)), str(MAX_GRAMMAR_LENGTH)),
        (Grammar("json_schema", "{"), "JSON schema"),
        (Grammar("json_schema", "[1]"), "JSON schema"),
        (schema({"type": "colour"}), "colour"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum"),
        (schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (Grammar("regex", "(a"), "unclosed"),
        (Grammar("regex", "(?=a)b"), "look-a"),
        (Grammar("lark", "start: other"), "other"),
        (Grammar("lark", ""), "mpty"),
    ],
)
def test_what_can_not_be_served_is_refused_with_the_reason(compiler, grammar, reason):
    for refuses in (check, lambda grammar: compiler.compile(grammar)):
        if grammar.kind == "yaml" or len(grammar.text) > MAX_GRAMMAR_LENGTH:
            refuses = check  # the engine validates the parameters first
        with pytest.raises(InvalidRequestError, match="response_format") as caught:
            refuses(grammar)
        assert caught.value.field == "response_format" and reason in str(caught.value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_grammar_of_nothing_but_the_end_is_refused(compiler):
    with pytest.raises(InvalidRequestError, match="no token"):
        compiler.compile(Grammar("regex", ""))


def test_a_folder_without_tokenizer_refuses_grammars(tmp_path):
    with pytest.raises(InvalidRequestError, match="no tokenizer") as caught:
        Grammars(tmp_path, 100, ()).compile(Grammar("regex", "a"))
    assert caught.value.field == "response_format"


def test_the_shipped_tokenizer_writes_json_in_few_tokens():
    text = (Path(reference_model.path()) / "tokenizer.json").read_text()
    compiler = GrammarCompiler(text, 2048, (1,))
    tokenizer = Tokenizer.load(reference_model.path())
    tokens = tokenizer.encode('{"name": "Ann", "ages": [31, 4]}')
    assert takes(compiler.answer(compiler.matcher(schema(PERSON))), tokens)


def test_checking_needs_no_torch():
    code = (
        "import sys; from megatron_hybrid.text.grammar import check; "
        "from megatron_hybrid.request import Grammar; check(Grammar('regex', 'a')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_grammar_is_compiled_in_another_thread(
    compiler: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`begin` never waits, `compile` does; what is there already is not compiled again."""
    may_go_on = threading.Event()
    threads: list[str] = []
    matcher = GrammarCompiler.matcher

    def slowly(self: GrammarCompiler, grammar: Grammar) -> object:
        threads.append(threading.current_thread().name)
        may_go_on.wait(10)
        return matcher(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "matcher", slowly)
    assert not compiler.begin(schema(PERSON))
    assert not compiler.begin(schema(PERSON))
    may_go_on.set()
    first = compiler.compile(schema(PERSON))
    assert compiler.begin(schema(PERSON))
    assert allowed(compiler.compile(schema(PERSON))) == allowed(first)
    assert len(threads) == 1 and threads[0].startswith("grammar")


def test_a_grammar_that_cannot_be_served_is_refused_where_it_is_needed(
    compiler: Grammars,
) -> None:
    for _ in range(2):
        compiler.begin(Grammar("regex", "("))
        with pytest.raises(InvalidRequestError, match="can't be served"):
            compiler.compile(Grammar("regex", "("))


def test_a_text_that_could_be_in_too_many_ways_ends_with_an_error() -> None:
    compiler = GrammarCompiler(byte_level().backend_tokenizer.to_str(), 0)
    (letter,) = compiler.token_ids("a")
    source = 'start: e\ne: e "a" e | "a" | e e e | ""\n'
    answer = compiler.answer(compiler.matcher(Grammar("lark", source)))
    count = 0
    while answer.error is None and count < 300:
        answer.allowed()
        answer.advance(letter)
        count += 1
    assert 100 < count < 200 and answer.is_to_blame
    assert answer.error is not None and answer.error.endswith("in too many ways")


def test_schemas_may_have_many_properties_that_can_be_left_out() -> None:
    compiler = GrammarCompiler(byte_level().backend_tokenizer.to_str(), 0)
    properties = {f"p{number}": {"type": "integer"} for number in range(400)}
    schema = json.dumps({"properties": properties, "additionalProperties": False})
    for grammar in (Grammar("json_schema", schema), Grammar("lark", f"start: %json {schema}")):
        compiler.matcher(grammar)
