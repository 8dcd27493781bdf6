"""Where the answers of a chat stand in its rendered text, so that each can be put into the prompt
as the very tokens that were generated instead of as tokens of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple


class GeneratedAnswer(NamedTuple):
    """The ids of an answer, without one that ended it, and the text that they stand for.

    thoughts: how many characters of the text come before what was said: thoughts, their marks, and
    white space.
    """

    token_ids: Sequence[int]
    text: str
    thoughts: int = 0


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
    at the ends of an answer and of its thoughts may be missing. What was changed or dropped has no
    place; so has an answer whose thoughts were.
    """
    if not literals or not text.startswith(literals[0]):
        return []
    places: list[Place] = []
    cursor = len(literals[0])
    free = 0  # where the last place ended
    for slot, after in zip(slots, literals[1:], strict=True):
        end = _end_of_body(text, cursor, slot, after)
        if end is None:
            return places  # the template renders the rest otherwise
        place = _place(text, free, cursor, end, slot)
        if place is not None:
            places.append(place)
            free = place.end
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


def _place(text: str, free: int, start: int, end: int, slot: Slot) -> Place | None:
    """Of an answer whose content is text[start:end]; its thoughts stand in there, or before it but
    not before `free`."""
    answer, body = slot.answer, text[start:end]
    thoughts = answer.text[: answer.thoughts].strip()
    if thoughts and not body.lstrip().startswith(thoughts):
        said = answer._replace(text=answer.text[answer.thoughts :])
        length = _length_of_answer(body, slot._replace(answer=said))
        begin = _start_of_thoughts(text, free, start, thoughts)
        if begin is None:
            return None
    else:
        length, begin = _length_of_answer(body, slot), start
    return None if length is None else Place(begin, start + length, answer)


def _start_of_thoughts(text: str, free: int, end: int, thoughts: str) -> int | None:
    """Where the answer begins whose thoughts the text has last before `end`."""
    before = text[free:end].rstrip()
    if not before.endswith(thoughts):
        return None
    before = before.removesuffix(thoughts)
    opened = before.rstrip()
    # Of the white space there, the prompt had what this one ends with, and the answer the rest.
    given = commonprefix([before[len(opened) :], text[len(text.rstrip()) :]])
    return free + len(opened) + len(given)


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
