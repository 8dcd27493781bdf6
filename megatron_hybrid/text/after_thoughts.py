"""Grammars that hold what an answer says, and let its thoughts before that be anything."""

from __future__ import annotations

import json
from dataclasses import replace

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import Grammar
from megatron_hybrid.text import lark
from megatron_hybrid.text.grammar import check
from megatron_hybrid.text.reasoning import Opening, ReasoningFormat
from megatron_hybrid.text.tokenizer import Tokenizer

# Models write at most two lines' ends there; small ones would never end free white space.
_SPACE = r"after_mark: /\s{0,4}/"


def after_thoughts(
    grammar: Grammar, form: ReasoningFormat, begins: Opening, tokenizer: Tokenizer
) -> Grammar | None:
    """The grammar behind thoughts that the prompt has opened, or that the answer may open.

    None where this can't be said: then it holds from the first token on.
    """
    held = _held(grammar)
    if held is None:
        return None
    begin = " | ".join(_mark(mark, tokenizer) for mark in form.begin)
    start = "thoughts after_mark held"
    if begins is not Opening.THOUGHTS:
        start = f"(({begin}) thoughts after_mark)? held"
    text = "\n".join([f"start: {start}", _thoughts(form, tokenizer), _SPACE, held]) + "\n"
    wrapped = replace(grammar, kind="lark", text=text)
    try:
        check(wrapped)
    except InvalidRequestError:
        return None
    return wrapped


def _held(grammar: Grammar) -> str | None:
    """The grammar as a rule of this name in Lark."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict):
            return None
        return f"held: {lark.json_value(schema)}"
    if grammar.kind == "regex" and grammar.text:
        return f"held: {lark.regex(grammar.text)}"
    if grammar.kind == "lark":
        return f"held: {lark.nested(grammar.text)}"
    return None


def _thoughts(form: ReasoningFormat, tokenizer: Tokenizer) -> str:
    """The rule of thoughts up to the first mark that ends them."""
    ends = [_mark(mark, tokenizer) for mark in form.end]
    # A token of its own is in no text; of marks in text, a lazy rule ends with the first.
    if not any(map(lark.is_token, ends)):
        return f"thoughts[lazy]: /(.|\\n)*/ ({' | '.join(ends)})"
    return f"thoughts: anything ({' | '.join(ends)})\nanything: /(.|\\n)*/"


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """An added token by its id, anything else as text."""
    token_id = tokenizer.token_id(mark)
    if token_id is not None and tokenizer.is_added(token_id):
        return lark.token(token_id)
    return lark.quoted(mark)
