"""Values that a caller gives: what they are as plain Python, and what is said of wrong ones."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from megatron_hybrid.errors import InvalidRequestError


def plain(value: Any) -> Any:
    """A number of numpy's, or of a library like it, as Python's; others as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def as_tuple(values: Any) -> Any:
    """Any sequence as a tuple of plain values, None as an empty one; others as they are."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return values
    return tuple(map(plain, values))


def as_texts(values: Any) -> Any:
    """A text, or a sequence, as a tuple; others as they are."""
    return (values,) if isinstance(values, str) else as_tuple(values)


def as_pairs(biases: Any) -> Any:
    """A mapping, or a sequence of pairs, as a tuple of pairs of plain values."""
    entries = as_tuple(biases.items() if isinstance(biases, Mapping) else biases)
    return tuple(map(as_tuple, entries)) if isinstance(entries, tuple) else entries


def as_words(words: Any) -> Any:
    """A text, or a sequence of texts and sequences of ids, as a tuple of texts and tuples."""
    entries = as_texts(words)
    return tuple(map(as_tuple, entries)) if isinstance(entries, tuple) else entries


def wrong(name: str, words: str, status: int = 400) -> InvalidRequestError:
    """The error of this name, of which the words say what is wrong."""
    return InvalidRequestError(name, f"{name} {words}.", status)


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidRequestError unless it is a number in this range, ends included."""
    # NaN is in no range
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok:
        raise wrong(name, f"is {show(value)}; it must be a number from {low} to {high}")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """The same for whole numbers."""
    whole = isinstance(value, (int, Integral))
    if not whole or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        raise wrong(name, f"is {show(value)}; it must be a whole number from {low} to {high}")


def check_tuple(name: str, value: object, wanted: str, limit: int | None = None) -> None:
    """Raise InvalidRequestError unless it is a tuple, of at most so many entries."""
    if not isinstance(value, tuple):
        raise wrong(name, f"is {show(value)}; it must be {wanted}")
    if limit is not None and len(value) > limit:
        raise wrong(name, f"has {len(value)} entries; the limit is {limit}")


def show(value: object) -> str:
    """What it is, cut short."""
    try:
        return reprlib.repr(value)
    except Exception:  # for instance: an integer of 5,000 digits
        return f"of type {type(value).__name__}"


def validate_text(name: str, value: object, max_length: int | None = None) -> None:
    """Raise InvalidRequestError unless it is text, in valid Unicode and not too long."""
    if not isinstance(value, str):
        raise wrong(name, f"is {show(value)}; it must be text")
    if max_length is not None and len(value) > max_length:
        raise wrong(name, f"has {len(value)} characters; the limit is {max_length}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        words = f"is not valid Unicode: character {error.start} is half of a surrogate pair"
        raise wrong(name, words) from error
