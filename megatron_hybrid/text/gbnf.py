"""llama.cpp's grammars (GBNF, which vLLM calls EBNF) in llguidance's dialect of Lark.

The two differ in how names, characters and ends of rules are written; what is between them
(alternatives, groups, repetitions) is the same, so it is carried over as it stands. A rule that
leads to nothing but characters becomes a terminal: llguidance reads one as a whole, the longest
that fits, and needs a fraction of the time for it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megatron_hybrid.text.lark import quoted

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<head>[A-Za-z0-9_][A-Za-z0-9_-]*)(?=\s*::=)
    |(?P<name>[A-Za-z0-9_][A-Za-z0-9_-]*)
    |(?P<is>::=)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<characters>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<any>\.)
    |(?P<mark>[()|])
    |(?P<times>[*+?]|\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<wrong>.)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_ITSELF = '"\\[]-^/'
_FIRST = re.compile(r"^[ \t]*[A-Za-z0-9_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)


class _Piece(NamedTuple):
    """Of a rule's right side. kind: a group of _TOKEN."""

    kind: str
    text: str


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF and not in Lark."""
    return _FIRST.search(text) is not None


def lark_of(text: str) -> str:
    """The grammar in Lark. Raises ValueError with what is wrong and where."""
    rules = _rules(text)
    if "root" not in rules:
        raise ValueError("it has no rule named root")
    terminals = _terminals(rules)
    names = {}
    for number, name in enumerate(rules):
        plain = f"r_{re.sub('[^a-z0-9]', '_', name.lower())}_{number}"
        names[name] = plain.upper() if name in terminals else plain
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_right_side(pieces, names)}" for name, pieces in rules.items()]
    return "\n".join(lines) + "\n"


def _rules(text: str) -> dict[str, list[_Piece]]:
    """By name, in their order, what each rule is made of."""
    rules: dict[str, list[_Piece]] = {}
    current: list[_Piece] | None = None
    defined = False
    for found in _TOKEN.finditer(text):
        piece = _Piece(str(found.lastgroup), found[0])
        if piece.kind == "space":
            continue
        if piece.kind == "head" and piece.text not in rules:
            current, defined = rules.setdefault(piece.text, []), False
        elif piece.kind == "head":
            raise ValueError(f"the rule {piece.text} stands twice in it")
        elif piece.kind == "is" and current is not None and not defined:
            defined = True
        elif piece.kind in ("is", "wrong") or current is None:
            line = text.count("\n", 0, found.start()) + 1
            raise ValueError(f"line {line} has {json.dumps(piece.text)} where it can't stand")
        else:
            current.append(piece)
    return rules


def _terminals(rules: dict[str, list[_Piece]]) -> set[str]:
    """The rules that lead to characters alone, through no rule that leads to itself."""
    users: dict[str, list[str]] = defaultdict(list)
    missing: dict[str, int] = {}
    for name, pieces in rules.items():
        used = {piece.text for piece in pieces if piece.kind == "name"}
        for other in used:
            if other not in rules:
                raise ValueError(f"the rule {name} names {other}, which is not in it")
            users[other].append(name)
        missing[name] = len(used)
    ready = [name for name, count in missing.items() if not count]
    found = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return found


def _right_side(pieces: Sequence[_Piece], names: dict[str, str]) -> str:
    """The same in Lark."""
    written: list[str] = []
    for kind, text in pieces:
        match kind:
            case "name":
                written.append(names[text])
            case "literal":
                written.append(quoted("".join(one for one, _ in _characters(text[1:-1]))))
            case "characters":
                written.append(_class(text[1:-1]))
            case "any":
                written.append("/(?s:.)/")
            case "times":
                written.append(re.sub(r"\s", "", text))
            case _:
                written.append(text)
    return " ".join(written)


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters that a text stands for, and whether each was written with a backslash."""
    found = []
    for x, u, long, escaped, plain in _CHARACTER.findall(text):
        if code := x or u or long:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                raise ValueError(f"no character has the number {code}")
            found.append((chr(number), True))
        elif escaped and escaped not in _ITSELF and escaped not in _ESCAPED:
            raise ValueError(f"\\{escaped} stands for nothing")
        elif escaped:
            found.append((_ESCAPED.get(escaped, escaped), True))
        else:
            found.append((plain, False))
    return found


def regex_of(text: str) -> str:
    """The regular expression of this text alone: all but letters and digits by number."""
    return "".join(map(_in_regex, text))


def _in_regex(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\x{{{ord(character):x}}}"


def _class(text: str) -> str:
    """A class of characters as a regular expression."""
    negated = text.startswith("^")
    inner = []
    for character, escaped in _characters(text[negated:]):
        inner.append("-" if character == "-" and not escaped else _in_regex(character))
    return f"/[{'^' if negated else ''}{''.join(inner)}]/"
