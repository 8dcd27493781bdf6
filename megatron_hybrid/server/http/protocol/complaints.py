"""What is wrong with a field, in a sentence with its name, its value and its rule.

msgspec says at which path it stopped; the rule is read from the type that stands there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from megatron_hybrid.errors import InvalidRequestError

Step = str | int  # a field's name, or the place of a list's entry
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_A_KEY = "key` in `"


class FieldError(InvalidRequestError):
    """A field that is wrong; `code` is OpenAI's word for the way in which it is."""

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(field, message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, str(self), self.code)


def show(value: Any) -> str:
    """A value as the client wrote it, cut short."""
    text = ""
    for piece in json.JSONEncoder().iterencode(value):
        text += piece
        if len(text) > 60:
            return f"{text[:57]}..."
    return text


def shown_pattern(pattern: str) -> str:
    """As JSON Schema has it, whose `$` is the very end; Python's is before a last newline too."""
    return pattern.replace(r"\Z", "$")


def types_of(kind: Any) -> tuple[inspect.Type, ...]:
    """The plain types that an annotation is made of."""
    return _plain(_type_info(kind))


def types_inside(types: Sequence[inspect.Type], value: Any, step: Step) -> tuple[inspect.Type, ...]:
    """The types of a part of `value`, which has one of these types."""
    for kind in types:
        if isinstance(kind, inspect.ListType) and isinstance(step, int):
            return _plain(kind.item_type)
        if isinstance(kind, inspect.DictType) and isinstance(step, str):
            return _plain(kind.value_type)
    structs = [kind for kind in types if isinstance(kind, inspect.StructType)]
    if tags := [kind.tag for kind in structs if kind.tag_field == step]:
        return (inspect.LiteralType(tuple(tags)),)
    for kind in structs:
        if kind.tag is None or value.get(kind.tag_field) == kind.tag:
            return next((_plain(one.type) for one in kind.fields if one.encode_name == step), ())
    return ()


def known_fields(types: Sequence[inspect.Type], value: Any) -> Any:
    """A value of one of these types without the fields that they have no place for."""
    if isinstance(value, list):
        inner = types_inside(types, value, 0)
        has_fields = any(isinstance(one, (inspect.StructType, inspect.ListType)) for one in inner)
        return [known_fields(inner, one) for one in value] if has_fields else value
    structs = [kind for kind in types if isinstance(kind, inspect.StructType)]
    if not isinstance(value, dict) or not structs:
        return value
    names = {kind.tag_field for kind in structs}
    names |= {one.encode_name for kind in structs for one in kind.fields}
    known = {name: types_inside(types, value, name) for name in value if name in names}
    return {name: known_fields(inner, value[name]) for name, inner in known.items() if inner}


def explain(error: msgspec.ValidationError, kind: type, values: dict[str, Any]) -> FieldError:
    """The first mistake in `values`, which were to become a `kind`."""
    complaint, at, path = str(error).rpartition(" - at `")
    outermost = _UNKNOWN.fullmatch(str(error))
    if not at or (outermost and outermost[1] in values):  # whatever that name looks like
        complaint, path = str(error), ""
    is_key = path.startswith(_A_KEY)
    steps: list[Step] = [name or int(place) for name, place in _STEP.findall(path)]
    if path.endswith("[...]`"):
        steps.append(_wrong_entry(kind, str(steps[0]), values, str(error)))
    name, value, types = "", values, types_of(kind)
    for step in steps:
        name = _joined(name, step)
        types = types_inside(types, value, step)
        value = value[step]  # type: ignore[index]
    if found := _UNKNOWN.fullmatch(complaint):
        name = _joined(name, found[1])
        return FieldError(name, f"Unknown field: {name}.", "unknown_parameter")
    if found := _MISSING.fullmatch(complaint):
        name = _joined(name, found[1])
    if found or (value is None and not path.endswith("]`")):
        return FieldError(name, f"{name} is required.", "missing_required_parameter")
    # Plain values of a list have no names of their own.
    is_plain = not any(isinstance(one, inspect.StructType) for one in types)
    field = re.sub(r"(\[\d+\])+$", "", name) if is_plain else name
    if isinstance(error.__cause__, ValueError):
        rule, code = (*error.__cause__.args, "invalid_value")[:2]
        return FieldError(field, f"{name} {rule}", code)
    subject = "it"
    if is_key:
        of_dicts = (one for one in types if isinstance(one, inspect.DictType))
        subject, types = "each of its keys", _plain(next(of_dicts).key_type)
    code = "invalid_type" if ", got `" in complaint and not is_key else "invalid_value"
    rule = _either(list(dict.fromkeys(filter(None, map(_rule, types)))))
    return FieldError(field, f"{name} is {show(value)}; {subject} must be {rule}.", code)


_type_info = cache(inspect.type_info)


def _plain(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return _plain(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(one for part in kind.types for one in _plain(part))
    return (kind,)


def _joined(path: str, step: Step) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _wrong_entry(kind: Any, field: str, values: dict[str, Any], complaint: str) -> str:
    """Which entry of a body's object by names msgspec means, as it does not say."""
    for key, value in values[field].items():
        try:
            msgspec.convert({field: {key: value}}, kind, str_keys=True)
        except msgspec.ValidationError as error:
            if str(error) == complaint:
                return str(key)
    raise AssertionError(complaint)


def _rule(kind: inspect.Type) -> str:
    """What a type accepts, in words; null goes without saying."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_range(kind.ge, None, kind.le)}"
        case inspect.FloatType():
            return f"a number{_range(kind.ge, kind.gt, kind.le)}"
        case inspect.StrType(pattern=str(pattern)):
            return f"a string that matches {shown_pattern(pattern)}"
        case inspect.StrType():
            return f"a string{_length(kind.min_length, kind.max_length, 'characters')}"
        case inspect.ListType():
            return f"a list{_length(kind.min_length, kind.max_length, 'entries')}"
        case inspect.DictType():
            return f"an object{_length(kind.min_length, kind.max_length, 'entries')}"
        case inspect.StructType():
            return "an object"
        case inspect.LiteralType():
            return _either(list(map(str, kind.values)))
        case inspect.EnumType():
            return _either([one.value for one in kind.cls])
    return ""


def _either(words: list[str]) -> str:
    *most, last = words or ["left out"]
    return f"{', '.join(most)} or {last}" if most else last


def _range(low: float | None, above: float | None, high: float | None) -> str:
    if high is None:
        return ""
    if above is not None:
        return f" above {above:g} and at most {high:g}"
    return f" from {low} to {high}" if isinstance(high, int) else f" from {low:g} to {high:g}"


def _length(low: int | None, high: int | None, what: str) -> str:
    if high is None:
        return f" of at least {low} {what}" if low else ""
    return f" of {low} to {high} {what}" if low else f" of at most {high} {what}"
