"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

# JSON comes without free white space, as text/grammar.py has it: small models would never end it.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def quoted(text: str) -> str:
    """This text: JSON without DEL, which Lark wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """What the regular expression matches: between slashes, on one line."""
    special = {"/": r"\/", "\n": r"\n"}
    inner = re.sub(r"\\.|[/\n]", lambda found: special.get(found[0], found[0]), pattern, flags=re.S)
    return f"/{inner}/"


def token(token_id: int) -> str:
    """A token by its id."""
    return f"<[{token_id}]>"


def is_token(piece: str) -> bool:
    """Whether it begins with one, which no text before it can hold."""
    return piece.startswith("<[")


def json_value(schema: dict[str, Any]) -> str:
    """JSON of this schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}"


def nested(grammar: str) -> str:
    """A grammar with names of its own."""
    return f"%lark {{\n{grammar}\n}}"
