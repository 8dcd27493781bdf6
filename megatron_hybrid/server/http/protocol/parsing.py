"""From the bytes of a body to one of the structures of this package.

What is wrong with a field is said in a sentence with its name, its value and its rule: msgspec says
at which path it stopped, and the rule is read from the type that stands there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from inspect import cleandoc
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import inspect

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.options import ParseOptions

Bytes = bytes | bytearray
JsonSchema = dict[str, Any]
T = TypeVar("T", bound="Body")

BY_DEFAULT = ParseOptions()
Step = str | int  # a field's name, or the place of a list's entry
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_A_KEY = "key` in `"
_TOO_DEEP = "The body is nested too deeply."


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object of a client's. null counts as left out, as in OpenAI's API, so what may be left
    out may be None. The docstrings of its kinds describe fields, each on a line, for
    /openapi.json."""


class Own:
    """A type of fields whose values msgspec can't check by itself."""

    @classmethod
    def read(cls, value: Any) -> Any:
        """The value as an instance. Raises ValueError with what is to follow the field's name, and
        the error's code unless that is "invalid_value"."""
        raise NotImplementedError

    @classmethod
    def schema(cls) -> JsonSchema:
        """What is accepted, as JSON Schema."""
        raise NotImplementedError


class Unsupported(Own):
    """A field of OpenAI's API that is refused, but for null and `harmless` values, which change
    nothing."""

    harmless: ClassVar[tuple[Any, ...]] = ()

    @classmethod
    def read(cls, value: Any) -> Any:
        # True == 1 in Python, not in JSON.
        if any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in cls.harmless
        ):
            return cls()
        raise ValueError("is not supported yet; leave it out.", "unsupported_parameter")

    @classmethod
    def schema(cls) -> JsonSchema:
        description = "Not supported: only values that change nothing are accepted."
        return {"enum": [*cls.harmless, None], "description": description}


def only(*harmless: Any) -> Any:
    """Unsupported, but for these values."""
    return type("Only", (Unsupported,), {"harmless": harmless})


def field_descriptions(kind: type) -> dict[str, str]:
    """By name, what the docstrings of a Body say of its fields."""
    kinds = [base for base in reversed(kind.__mro__) if issubclass(base, Body)]
    docs = [cleandoc(base.__doc__ or "") for base in kinds]
    return {
        name: " ".join(text.split())
        for doc in docs
        for name, text in re.findall(r"^(\w+): (.*(?:\n +.*)*)", doc, re.MULTILINE)
    }


def parse_body(body: Bytes) -> dict[str, Any]:
    """The JSON object of a request body, with every string valid Unicode."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _parse_slowly(body)
    if not isinstance(value, dict):
        raise InvalidRequestError("body", f"The body is {show(value)}; it must be a JSON object.")
    return value


def read(
    kind: type[T],
    values: dict[str, Any],
    options: ParseOptions = BY_DEFAULT,
    *,
    strict: bool = True,
) -> T:
    """The values as that structure. Not strict: numbers may be strings, as in a query.

    Raises InvalidRequestError naming the first that is wrong, or unknown unless the options drop
    those.
    """
    try:
        if options.ignore_unknown_fields:
            values = known_fields(types_of(kind), values)
        return msgspec.convert(
            values,
            kind,
            strict=strict,
            dec_hook=lambda own, value: own.read(value),
            str_keys=True,
        )
    except msgspec.ValidationError as error:
        raise explain(error, kind, values) from error
    except RecursionError as error:
        raise InvalidRequestError("body", _TOO_DEEP) from error


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


def explain(
    error: msgspec.ValidationError, kind: type, values: dict[str, Any]
) -> InvalidRequestError:
    """The first mistake in `values`, which were to become a `kind`."""
    complaint, at, path = str(error).rpartition(" - at `")
    outermost = _UNKNOWN.fullmatch(str(error))
    if not at or (outermost and outermost[1] in values):  # whatever that name looks like
        complaint, path = str(error), ""
    is_key = path.startswith(_A_KEY)
    steps: list[Step] = [name or int(place) for name, place in _STEP.findall(path)]
    if path.endswith("[...]`"):
        steps.append(_wrong_entry(kind, steps, values, str(error)))
    name, value, types = "", values, types_of(kind)
    for step in steps:
        name = _joined(name, step)
        types = types_inside(types, value, step)
        value = value[step]  # type: ignore[index]
    found = _UNKNOWN.fullmatch(complaint)
    if found and (kinds := _other_types(types, value)):
        complaint, found = "", None
        name, value, types = _joined(name, "type"), value["type"], kinds
    if found:
        name = _joined(name, found[1])
        return InvalidRequestError(name, f"Unknown field: {name}.", code="unknown_parameter")
    if found := _MISSING.fullmatch(complaint):
        name = _joined(name, found[1])
    if found or (value is None and not path.endswith("]`")):
        return InvalidRequestError(name, f"{name} is required.", code="missing_required_parameter")
    # Plain values of a list have no names of their own.
    is_plain = not any(isinstance(one, inspect.StructType) for one in types)
    field = re.sub(r"(\[\d+\])+$", "", name) if is_plain else name
    if isinstance(error.__cause__, ValueError):
        rule, code = (*error.__cause__.args, "invalid_value")[:2]
        return InvalidRequestError(field, f"{name} {rule}", code=code)
    subject = "it"
    if is_key:
        of_dicts = (one for one in types if isinstance(one, inspect.DictType))
        subject, types = "each of its keys", _plain(next(of_dicts).key_type)
    code = "invalid_type" if ", got `" in complaint and not is_key else "invalid_value"
    rule = _either(list(dict.fromkeys(filter(None, map(_rule, types)))))
    return InvalidRequestError(
        field, f"{name} is {show(value)}; {subject} must be {rule}.", code=code
    )


_type_info = cache(inspect.type_info)


def _plain(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return _plain(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(one for part in kind.types for one in _plain(part))
    return (kind,)


def _other_types(types: Sequence[inspect.Type], value: dict[str, Any]) -> tuple[inspect.Type, ...]:
    """What the `type` of an object may be, if its own is none of these: then other fields of it,
    which may be found first, are unknown for that reason."""
    kinds = types_inside(types, value, "type")
    known = [one for kind in kinds if isinstance(kind, inspect.LiteralType) for one in kind.values]
    return kinds if known and value.get("type") not in (None, *known) else ()


def _joined(path: str, step: Step) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _wrong_entry(kind: Any, steps: Sequence[Step], values: dict[str, Any], complaint: str) -> str:
    """Which entry of the object by names that stands there msgspec means, as it does not say."""
    named: Any = values
    for step in steps:
        named = named[step]
    for key, value in named.items():
        try:
            alone = _with(values, steps, {key: value})
            msgspec.convert(alone, kind, dec_hook=lambda own, one: own.read(one), str_keys=True)
        except msgspec.ValidationError as error:
            if str(error) == complaint:
                return str(key)
    raise AssertionError(complaint)


def _with(value: Any, steps: Sequence[Step], new: Any) -> Any:
    """A copy in which something else stands there."""
    if not steps:
        return new
    copied = value.copy()
    copied[steps[0]] = _with(value[steps[0]], steps[1:], new)
    return copied


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


def _parse_slowly(body: Bytes) -> Any:
    """What can't be read as it should be: says why, by the field that holds what is no Unicode. But
    numbers without end, which no field takes, are no mistake of JSON's."""
    # Wrong bytes become lone surrogates, so that they are found in the values.
    text = body.decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise InvalidRequestError("body", _TOO_DEEP) from error
    except ValueError as error:
        reason = str(error).encode("utf-8", "replace").decode()
        message = f"The body is not valid JSON: {reason}."
        raise InvalidRequestError("body", message, code="invalid_json") from error
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, str):
            _check_text(path, item)
        elif isinstance(item, list):
            pending.extend((_joined(path, index), entry) for index, entry in enumerate(item))
        elif isinstance(item, dict):
            for key, entry in item.items():
                _check_text(path or "body", key)
                pending.append((_joined(path, key), entry))
    return value


def _check_text(path: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            path,
            f"{path} is not valid Unicode: character {error.start} is half of a surrogate pair "
            "or a byte that is not UTF-8.",
        ) from error
