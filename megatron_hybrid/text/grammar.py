"""Answers that match a JSON schema, a regular expression, a Lark grammar or a structural tag, by
llguidance.

Imports no torch: front ends check grammars with it before they send them to the engine. llguidance
itself is imported by the first grammar: every engine imports this module.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.request import Grammar, SamplingParams
from megatron_hybrid.text.structural_tags import as_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIELD = "response_format"  # of requests that bring a grammar, mostly
KEPT_GRAMMARS = 64  # compiled ones, the last used
COMPILING_THREADS = 2
NICENESS = 10
MAX_ROW_ITEMS = 1000  # of a client's own grammar: what may stand at one place of the text
MAX_MESSAGE = 300  # characters of llguidance's reasons: they quote the grammar
# What llguidance says, and what it means to who wrote the schema.
_CLEARER = [
    (re.compile(pattern, re.DOTALL), sentence)
    for pattern, sentence in (
        (r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\n\s*\d+ \| .*)?", r"\1"),
        (r"(.*) while processing json-schema:///(.*)", r"\1 (in \2)"),
        (r"Unsatisfiable schema: anyOf is empty", "an enum, a type or an anyOf in it is empty"),
        (r"Unsatisfiable schema: (.*)", r"nothing can match it: \1"),
        (r"NoExtensionBias", "its references ($ref) lead to nothing but each other"),
        (
            r"circular references with sibling keys are not supported.*",
            "a $ref to what it stands in itself has other keywords beside it",
        ),
        (r"Pointer '(.*)' does not exist", r"$ref names '#\1', which is not in it"),
        (
            r"Resource '(?:json-schema:///)?(.*)' is not present in a registry.*",
            r"$ref or $schema names '\1', and nothing outside the schema is looked up",
        ),
        (r"Unimplemented keys: \[(.*)\]", r"it uses \1, which is not supported"),
        (
            r"oneOf constraints are not supported.*",
            "one value could match several branches of a oneOf; use anyOf, or give each branch a "
            "required property with a const of its own",
        ),
        (r"Unknown format: (.*)", r"the format '\1' is not known"),
        (r"Schema intersection stack level exceeded", "too many $ref in it are combined"),
        (r"recursion limit exceeded.*", "too much in it stands inside each other"),
        (
            r"Failed to generate regex for integer range.*",
            "the range of an integer in it lies beyond 64 bits",
        ),
        (
            r"(?:parser error: )?(?:Parser Error: )?(?:Current row has|Too many items).*",
            "a text could be in it in too many ways",
        ),
        (r"invalid multiple of", "multipleOf must be more than 0"),
        (r"Expecting object schema to apply options", "it must be an object"),
    )
]

# JSON has no whitespace but a space after a comma or a colon: small models would never end it.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}


def check(grammar: Grammar, field: str | None = None) -> None:
    """Raise InvalidRequestError, which names `field` or else the grammar's own, for a grammar that
    no engine can serve."""
    from llguidance import LLMatcher

    if field is not None:
        grammar = replace(grammar, field=field)
    grammar.validate()
    error = LLMatcher.validate_grammar(_source(grammar), None, limits=_limits(grammar))
    _refuse_if(grammar, error)


class AnswerMatcher:
    """How far one answer has come in its grammar. Whatever the library raises becomes the answer's
    `error`: the step that asks goes on for the others."""

    def __init__(self, matcher: LLMatcher, never: npt.NDArray[np.int64], size: int) -> None:
        """never: token ids that are not allowed even where the grammar can end. size: of the
        vocabulary."""
        self._matcher = matcher
        self._never = never
        self._size = size
        self._failure: str | None = None

    def allowed(self, avoid: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.uint8]:
        """Which tokens may come next: a bit each, the lowest first; at least as many bits as the
        vocabulary has ids. Without those to `avoid`, unless nothing else is left. End-of-sequence
        ids are allowed where the grammar can end. Where that can't be told, all are: the answer
        ends with an error."""
        mask = self._ask(lambda matcher: matcher.compute_bitmask(), None)
        if mask is None:
            return np.full(-(-self._size // 8), 0xFF, dtype=np.uint8)
        bits = np.frombuffer(mask, dtype=np.uint8).copy()
        _clear(bits, self._never)
        if avoid is not None and len(avoid):
            rest = bits.copy()
            _clear(rest, avoid)
            if rest.any():
                return rest
        return bits

    def advance(self, token: int) -> None:
        """The answer goes on with this token."""
        self._ask(lambda matcher: matcher.consume_token(token), False)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._ask(lambda matcher: matcher.is_stopped() and not matcher.is_error(), False)

    @property
    def error(self) -> str | None:
        """Why the answer can't go on, though its grammar is not complete."""
        reason = self.reason
        if reason is None:
            return None
        return f"The answer can't go on in its grammar: {_reason(reason)}"

    @property
    def is_to_blame(self) -> bool:
        """Whether the grammar is what is wrong, too large in use for instance, and no library."""
        return self.reason is not None and self._failure is None

    @property
    def reason(self) -> str | None:
        """The same, in the library's words."""
        found = self._ask(lambda matcher: matcher.get_error() if matcher.is_error() else None, None)
        return found if self._failure is None else self._failure

    def _ask(self, question: Callable[[LLMatcher], T], otherwise: T) -> T:
        """The matcher's answer, unless it fails now or has failed before."""
        if self._failure is None:
            try:
                return question(self._matcher)
            except Exception as error:
                logger.exception("A grammar fails while an answer is made from it.")
                self._failure = f"{type(error).__name__}: {error}"
        return otherwise


class GrammarCompiler:
    """Grammars over one model's vocabulary; all of it may be called from any thread."""

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """tokenizer_json: what a tokenizer.json holds. vocab_size: the model's; ids that the
        tokenizer does not know are never allowed."""
        from llguidance import LLTokenizer

        known = LLTokenizer(tokenizer_json).vocab_size
        size = self._size = max(vocab_size, known)
        eos = [token for token in eos_token_ids if token < size]
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos or None)
        # without ids of ours, the library takes one of the tokenizer for the end
        self._eos = np.asarray(self._tokenizer.eos_tokens, dtype=np.int64)
        self._has_eos = bool(eos)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """For `answer`. Takes seconds for a large schema, in which other threads go on. Raises
        InvalidRequestError."""
        from llguidance import LLMatcher

        source, limits = _source(grammar), _limits(grammar)
        _refuse_if(grammar, LLMatcher.validate_grammar(source, self._tokenizer, limits=limits))
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        trial = AnswerMatcher(matcher, self._eos, self._size)
        first = trial.allowed()  # finds what shows only in use
        _refuse_if(grammar, trial.reason)
        if not first.any():
            raise _refusal(grammar, "no token of this model can begin an answer that matches it")
        return matcher

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What they say, special tokens too; halves of characters are replaced."""
        return self._tokenizer.decode_bytes(list(token_ids)).decode("utf-8", "replace")

    def token_ids(self, text: str) -> list[int]:
        """Tokens that say it, the longest first."""
        found: list[int] = self._tokenizer.greedy_tokenize(text)
        return found

    def answer(self, matcher: LLMatcher, *, ignore_eos: bool = False) -> AnswerMatcher:
        """A matcher at the start of an answer; `ignore_eos`: end-of-sequence ids are never
        allowed."""
        never = self._eos[:0] if self._has_eos and not ignore_eos else self._eos
        return AnswerMatcher(matcher.deep_copy(), never, self._size)


class Grammars:
    """Grammars over a model folder's tokenizer, where an engine gets the matchers of its answers.
    Their compiler is made when the first one comes: a large vocabulary takes a second."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder, self._vocab_size, self._eos = folder, vocab_size, eos_token_ids
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(COMPILING_THREADS, "grammar", _be_nice)
        # None: nothing but the compiler
        self._begun: dict[Grammar | None, Future[Any]] = {}
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def begin(self, grammar: Grammar | None) -> bool:
        """Compile it in another thread, unless that was begun; whether `compile` need not wait.
        None: the same for `reader`."""
        if grammar in self._compiled:
            return True
        if grammar not in self._begun:
            try:
                self._begun[grammar] = (
                    self._threads.submit(self._ready)
                    if grammar is None
                    else self._threads.submit(self._matcher, grammar)
                )
            except RuntimeError:  # there can be no more threads: `compile` does without
                return True
        return self._begun[grammar].done()

    def compile(self, grammar: Grammar, *, ignore_eos: bool = False) -> AnswerMatcher:
        """A matcher at the start of an answer. `ignore_eos`: end-of-sequence ids are never allowed.
        Raises InvalidRequestError for a grammar that can't be served, and where the folder has no
        tokenizer."""
        if grammar not in self._compiled:
            begun = self._begun.pop(grammar, None)
            self._compiled[grammar] = self._matcher(grammar) if begun is None else begun.result()
            if len(self._compiled) > KEPT_GRAMMARS:  # the one that was not used for longest goes
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._ready().answer(self._compiled[grammar], ignore_eos=ignore_eos)

    def reader(self) -> Callable[[Sequence[int]], str]:
        """What tells the text of tokens. Raises InvalidRequestError where the folder has no
        tokenizer."""
        return self._ready().text_of

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        return self._ready().matcher(grammar)

    def _ready(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                text = self._tokenizer_json()
                self._compiler = GrammarCompiler(text, self._vocab_size, self._eos)
            return self._compiler

    def _tokenizer_json(self) -> str:
        if (plain := _plain_tokenizer(self._folder)) is not None:
            return plain
        # Its import takes a second, in which steps beside it take several times as long.
        from megatron_hybrid.text.tokenizer import Tokenizer

        try:
            text: str = Tokenizer.load(self._folder).backend.to_str()
        except ConfigurationError as error:
            raise no_tokenizer() from error
        return text


def _plain_tokenizer(folder: Path) -> str | None:
    """tokenizer.json, if it is all there is to the tokenizer: tokenizer_config.json may name tokens
    besides."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        config = folder / "tokenizer_config.json"
        named = json.loads(config.read_bytes()) if config.is_file() else {}
        known = {str(token["id"]) for token in json.loads(text)["added_tokens"]}
        return text if set(named.get("added_tokens_decoder", {})) <= known else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _be_nice() -> None:
    """Let the steps have the cores first; Linux has a priority for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def matcher_of(params: SamplingParams, grammars: Grammars | None) -> AnswerMatcher | None:
    """Of an answer with these params; None: it may be anything. grammars: the model's, None where
    it has no tokenizer. Raises InvalidRequestError if one is needed, or for the grammar."""
    if params.grammar is None:
        return None
    if grammars is None:
        raise no_tokenizer()
    return grammars.compile(params.grammar, ignore_eos=params.ignore_eos)


def no_tokenizer(field: str = FIELD) -> InvalidRequestError:
    """What is said to who asks for something by this field where there is no tokenizer."""
    return InvalidRequestError(
        field,
        f"{field} asks for an answer that the engine has to read; this model has no "
        "tokenizer.json, so it can't tell what tokens say.",
    )


def _source(grammar: Grammar) -> str:
    """In llguidance's own language."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind in ("lark", "structural_tag"):
        grammar = as_lark(grammar)
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise _refusal(grammar, _reason(str(error))) from error


def _limits(grammar: Grammar) -> LLParserLimits:
    """The library's own, with errors that do not list the parser's state; and where no JSON schema
    makes the parser's rows wide, with rows of half as many items: what a step takes grows with
    their square or cube where a text could be in many ways."""
    from llguidance import LLParserLimits

    if grammar.kind in ("json_schema", "structural_tag") or "%json" in grammar.text:
        return LLParserLimits(verbose_errors=False)
    return LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ROW_ITEMS)


def _refuse_if(grammar: Grammar, error: str | None) -> None:
    if error:
        raise _refusal(grammar, _reason(error))


def _refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    names = {"json_schema": "JSON schema", "regex": "regular expression"}
    kind = names.get(grammar.kind, "grammar")
    return InvalidRequestError(
        grammar.field, f"{grammar.field} holds a {kind} that can't be served: {reason}."
    )


def _reason(error: str) -> str:
    """What llguidance says, in one line."""
    text = error.replace("<non-verbose/>", "").strip()
    for pattern, sentence in _CLEARER:
        if match := pattern.fullmatch(text):
            text = match.expand(sentence)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _clear(bits: npt.NDArray[np.uint8], ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_and.at(bits, ids >> 3, ~(1 << (ids & 7)).astype(np.uint8))
