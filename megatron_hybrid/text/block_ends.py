"""Where parts of a chat's messages end in its rendered text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megatron_hybrid.text.answer_places import cut_at


class BlockEnd(NamedTuple):
    """Behind so many characters of a message's content; white space at its end is not part of the
    block, since templates may strip it. 0: where the content begins."""

    message: int
    offset: int


def find_block_ends(
    text: str,
    conversation: Sequence[dict[str, Any]],
    ends: Iterable[BlockEnd],
    render: Callable[[list[dict[str, Any]]], str],
) -> list[int]:
    """Where these stand in the rendered chat, in characters, from one more rendering with marks at
    the ends; up to the first one that the template does not let us find.

    render: makes the text of messages, or raises.
    """
    stripped = {
        BlockEnd(number, len(conversation[number]["content"][:offset].rstrip()))
        for number, offset in ends
    }
    marked = list(conversation)
    marks: list[str] = []
    for number, offset in sorted(stripped, reverse=True):  # so that the offsets before it hold
        content = marked[number]["content"]
        marks.insert(0, f"end{secrets.token_hex(16)}")
        content = content[:offset] + marks[0] + content[offset:]
        marked[number] = {**marked[number], "content": content}
    try:
        rendered = render(marked)
    except Exception:  # templates are the model's code and may raise anything
        return []
    found, cursor = [], 0
    for literal in cut_at(rendered, marks)[:-1]:
        if not text.startswith(literal, cursor):
            break
        cursor += len(literal)
        found.append(cursor)
    return found
