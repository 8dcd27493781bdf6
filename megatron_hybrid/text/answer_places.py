"""Where the answers of a chat stand in its rendered text, so that each can be put into the prompt
as the very tokens that were generated instead of as tokens of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class GeneratedAnswer(NamedTuple):
    """The ids of an answer, without one that ended it, and the text that they stand for."""

    token_ids: Sequence[int]
    text: str


class Place(NamedTuple):
    """The answer's text is `text[start:end]` of the rendered chat."""

    start: int
    end: int
    answer: GeneratedAnswer


class Slot(NamedTuple):
    """A message whose place is looked for. `content`: its text, if the template gives that as it
    is; `same`: whether a piece of the rendered chat says what the message says."""

    content: str
    answer: GeneratedAnswer
    same: Callable[[str], bool] | None = None


def cut_at(rendered: str, marks: Sequence[str]) -> list[str]:
    """What a chat that was rendered with marks has around them; nothing if one is missing."""
    literals = []
    rest = rendered
    for mark in marks:
        literal, found, rest = rest.partition(mark)
        if not found:
            return []
        literals.append(literal)
    return [*literals, rest]


def find_places(text: str, literals: Sequence[str], slots: Sequence[Slot]) -> list[Place]:
    """The places of those slots whose answer the text holds unchanged.

    literals: what the template puts around the slots, one more than there are slots. White space
    at an answer's ends may be missing. What was changed or dropped has no place.
    """
    if not literals or not text.startswith(literals[0]):
        return []
    places: list[Place] = []
    cursor = len(literals[0])
    for slot, after in zip(slots, literals[1:], strict=True):
        end = _end_of_body(text, cursor, slot, after)
        if end is None:
            return places  # the template renders the rest otherwise
        length = _length_of_answer(text[cursor:end], slot)
        if length is not None:
            places.append(Place(cursor, cursor + length, slot.answer))
        cursor = end + len(after)
    return places


def _end_of_body(text: str, start: int, slot: Slot, after: str) -> int | None:
    content = slot.content
    for body in (content, content.rstrip(), content.lstrip(), content.strip()):
        if body and text.startswith(body + after, start):
            return start + len(body)
    if not after:  # the chat's end
        return len(text)
    end = text.find(after, start)
    return None if end < 0 else end


def _length_of_answer(body: str, slot: Slot) -> int | None:
    """Of the answer in the body, in characters; None where it does not begin so."""
    answer = slot.answer.text
    if body == answer or body.strip() == answer.strip() != "":
        return len(body)
    if slot.same is not None:
        return len(body) if slot.same(body) else None
    # A stop string may have ended the text inside a token: those before it begin the content.
    if answer and body == slot.content and body.startswith(answer):
        return len(answer)
    return None


def encode_around(backend: Any, text: str, places: Sequence[Place]) -> tuple[list[int], list[int]]:
    """Token ids of the text with the answers' own at their places, and where each one's text ends,
    in characters."""
    token_ids: list[int] = []
    ends: list[int] = []
    cursor = 0
    for start, end, answer in [*places, Place(len(text), len(text), _NOTHING)]:
        encoding = backend.encode(text[cursor:start], add_special_tokens=False)
        token_ids += encoding.ids
        ends += [cursor + last for _, last in encoding.offsets]
        token_ids += answer.token_ids
        ends += [end] * len(answer.token_ids)
        cursor = end
    return token_ids, ends


_NOTHING = GeneratedAnswer((), "")
