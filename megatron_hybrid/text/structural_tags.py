"""Structural tags in llguidance's dialect of Lark: texts in which marks hold what stands between
them, as xgrammar describes them (https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html).

A format is a JSON object with a `type`; what else each has, server/http/protocol/structural_tags.py
says. A mark is a text, or a format of the type `token`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_hybrid.request import Grammar
from megatron_hybrid.text import gbnf, lark
from megatron_hybrid.values import wrong

Format = Mapping[str, Any]
MAX_DEPTH = 64  # of formats inside each other
_ANY_TEXT = "/(?s:.*)/"


class _Unfollowed(Exception):
    """Holds what is to follow the field's name."""


def as_lark(grammar: Grammar, added: Mapping[str, int] | None = None) -> Grammar:
    """A structural tag as a grammar in Lark; other grammars as they are. added: ids of the
    tokenizer's added tokens by their spellings, which stand for them, since no text has them; None:
    they are not known. Raises InvalidRequestError for what can't be followed."""
    if grammar.kind != "structural_tag":
        return grammar
    try:
        text = _Writer(added).write(json.loads(grammar.text))
    except _Unfollowed as error:
        raise wrong(grammar.field, str(error)) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise wrong(grammar.field, "holds no structural tag's format as JSON") from error
    return replace(grammar, kind="lark", text=text)


def is_endless(form: Format) -> bool:
    """Whether it goes on until the end of the tag that it stands in, or of the answer."""
    match form["type"]:
        case "any_text":
            return True
        case "triggered_tags":
            return not (form.get("at_least_one") and form.get("stop_after_first"))
        case "sequence":
            return is_endless(form["elements"][-1])
        case "or":
            return any(map(is_endless, form["elements"]))
    return False


class _Writer:
    def __init__(self, added: Mapping[str, int] | None) -> None:
        self._added = added
        spellings = sorted(filter(None, added or ()), key=len, reverse=True)
        # With a group, so that what is split at them has them, too.
        self._added_ones = re.compile(f"({'|'.join(map(re.escape, spellings)) or '(?!)'})")
        self._rules: list[str] = []
        self._depth = 0

    def write(self, form: Format) -> str:
        start = self._until(form, ())
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _until(self, form: Format, ends: Sequence[Any]) -> str:
        """The format and, behind it, one of the marks `ends`, if there are any. What is endless has
        to look for them by itself."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unfollowed(f"has more than {MAX_DEPTH} formats inside each other")
        match form["type"]:
            case "any_text":
                written = self._text_until(self._text(form), ends)
            case "triggered_tags":
                written = self._triggered(form, ends)
            case "sequence":
                *first, last = form["elements"]
                written = _joined(*map(self._inside, first), self._until(last, ends))
            case "or":
                written = _either(self._until(one, ends) for one in form["elements"])
            case kind:
                written = _joined(_WRITTEN[kind](self, form), self._one_of(ends))
        self._depth -= 1
        return written

    def _inside(self, form: Format) -> str:
        """The format, where something may follow that is not the end of a tag."""
        if is_endless(form):
            raise _Unfollowed(
                f"has the endless format {form['type']} where other things than a tag's end follow"
            )
        return self._until(form, ())

    def _named(self, body: str, options: str = "", name: str = "r") -> str:
        """A new rule, or a terminal if the name is in capitals."""
        name = f"{name}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    # ------------------------------------------------------------------- texts and marks

    def _text(self, form: Format) -> str:
        """Free text, as an expression that can be part of a terminal."""
        most = form.get("max_chars")
        text = _ANY_TEXT if most is None else f"/(?s:.){{0,{most}}}/"
        excluded = [gbnf.regex_of(one) for one in form.get("excludes") or ()]
        if not excluded:
            return text
        return self._named(f"{text} & ~/(?s:.*)({'|'.join(excluded)})(?s:.*)/", name="T")

    def _text_until(self, text: str, ends: Sequence[Any]) -> str:
        marks = [self._mark(one) for one in ends if one != ""]
        ways = [_joined(text, one) for one in marks if lark.is_token(one)]
        if texts := [one for one in marks if not lark.is_token(one)]:
            # Lazy: it ends with the first of them, so the text never holds one.
            ways.append(self._named(_joined(text, _either(texts)), "[lazy]"))
        return _either(ways) if ways else text

    def _mark(self, mark: str | Format) -> str:
        """Pieces of text, and tokens by their ids."""
        if not isinstance(mark, str):
            return self._token(mark)
        pieces = filter(None, self._added_ones.split(mark))
        return _joined(*map(self._piece, pieces)) or '""'

    def _piece(self, text: str) -> str:
        token_id = (self._added or {}).get(text)
        return lark.quoted(text) if token_id is None else lark.token(token_id)

    def _token(self, form: Format) -> str:
        token = form["token"]
        if isinstance(token, int):
            return lark.token(token)
        token_id = 0 if self._added is None else self._added.get(token)
        if token_id is None:
            raise _Unfollowed(f"names the token {json.dumps(token)}, which is no added one")
        return lark.token(token_id)

    def _one_of(self, marks: Sequence[Any]) -> str:
        return _either(map(self._mark, marks)) if marks else ""

    # ------------------------------------------------------------------- tags

    def _tag(self, form: Format, begun: int = 0) -> str:
        """begun: so many characters of its begin have come."""
        begin, ends = form["begin"], _ends_of(form)
        if is_endless(form["content"]) and not any(ends):
            raise _Unfollowed(f"has a tag without an end around {form['content']['type']}")
        rest = self._mark(begin if isinstance(begin, Mapping) else begin[begun:])
        return _joined(rest, self._until(form["content"], ends))

    def _triggered(self, form: Format, ends: Sequence[Any]) -> str:
        text = self._text({"excludes": form.get("excludes")})
        opened = [self._opened(text, trigger, form["tags"]) for trigger in form["triggers"]]
        for tag in form["tags"]:
            count = sum(_begins(tag, trigger) for trigger in form["triggers"])
            if count != 1:
                begin = json.dumps(tag["begin"])
                raise _Unfollowed(
                    f"has a tag with {count} triggers that {begin} begins with, not 1"
                )
        first = _either(map(self._tag, form["tags"])) if form.get("at_least_one") else ""
        if form.get("stop_after_first"):
            tag = first or _either(opened)
            only = _joined(tag, self._one_of(ends))
            return only if first else _either([only, self._text_until(text, ends)])
        return _joined(first, f"({' | '.join(opened)})*", self._text_until(text, ends))

    def _opened(self, text: str, trigger: str, tags: Iterable[Format]) -> str:
        """Text up to the trigger, and the rest of one of its tags."""
        rests = [self._tag(tag, len(trigger)) for tag in tags if _begins(tag, trigger)]
        if not rests:
            raise _Unfollowed(f"has the trigger {json.dumps(trigger)}, with which no tag begins")
        return _joined(self._text_until(text, [trigger]), _either(rests))

    def _separated(self, form: Format) -> str:
        tag = self._named(_either(self._tag(one) for one in form["tags"]))
        several = tag
        if not form.get("stop_after_first"):
            several = _joined(tag, f"({_joined(self._mark(form['separator']), tag)})*")
        return several if form.get("at_least_one") else f"({several})?"

    # ------------------------------------------------------------------- others

    def _repeated(self, form: Format, times: str) -> str:
        return f"({self._inside(form['content'])}){times}"

    def _times(self, form: Format) -> str:
        least, most = form["min"], form["max"]
        if most != -1 and most < max(least, 1):
            raise _Unfollowed(f"repeats something {least} to {most} times")
        return self._repeated(form, f"{{{least},{'' if most == -1 else most}}}")


_WRITTEN: dict[str, Callable[[_Writer, Format], str]] = {
    "const_string": lambda writer, form: writer._mark(form["value"]),
    "token": lambda writer, form: writer._token(form),
    "json_schema": lambda writer, form: lark.json_value(form["json_schema"]),
    "regex": lambda writer, form: lark.regex(form["pattern"]),
    "grammar": lambda writer, form: lark.nested(form["grammar"]),
    "tag": lambda writer, form: writer._tag(form),
    "tags_with_separator": lambda writer, form: writer._separated(form),
    "optional": lambda writer, form: writer._repeated(form, "?"),
    "plus": lambda writer, form: writer._repeated(form, "+"),
    "star": lambda writer, form: writer._repeated(form, "*"),
    "repeat": lambda writer, form: writer._times(form),
}


def _ends_of(tag: Format) -> list[Any]:
    return tag["end"] if isinstance(tag["end"], list) else [tag["end"]]


def _begins(tag: Format, trigger: str) -> bool:
    return isinstance(tag["begin"], str) and tag["begin"].startswith(trigger)


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _either(parts: Iterable[str]) -> str:
    ways = list(parts)
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"
