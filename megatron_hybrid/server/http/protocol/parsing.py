"""From the bytes of a body to one of the structures of this package."""

from __future__ import annotations

import json
import re
from inspect import cleandoc
from typing import Any, ClassVar, TypeVar

import msgspec

from megatron_hybrid.server.http.protocol.complaints import (
    FieldError,
    explain,
    known_fields,
    show,
    types_of,
)
from megatron_hybrid.server.options import ParseOptions

Bytes = bytes | bytearray
JsonSchema = dict[str, Any]
T = TypeVar("T", bound="Body")

BY_DEFAULT = ParseOptions()


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
        raise FieldError("body", f"The body is {show(value)}; it must be a JSON object.")
    return value


def read(kind: type[T], values: dict[str, Any], options: ParseOptions = BY_DEFAULT) -> T:
    """The values as that structure.

    Raises FieldError naming the first that is wrong, or unknown unless the options drop those.
    """
    if options.ignore_unknown_fields:
        values = known_fields(types_of(kind), values)
    try:
        return msgspec.convert(
            values, kind, dec_hook=lambda own, value: own.read(value), str_keys=True
        )
    except msgspec.ValidationError as error:
        raise explain(error, kind, values) from error


def _parse_slowly(body: Bytes) -> Any:
    """What can't be read as it should be: says why, by the field that holds what is no Unicode. But
    numbers without end, which no field takes, are no mistake of JSON's."""
    # Wrong bytes become lone surrogates, so that they are found in the values.
    text = body.decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise FieldError("body", "The body is nested too deeply.") from error
    except ValueError as error:
        reason = str(error).encode("utf-8", "replace").decode()
        message = f"The body is not valid JSON: {reason}."
        raise FieldError("body", message, "invalid_json") from error
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, str):
            _check_text(path, item)
        elif isinstance(item, list):
            pending.extend((f"{path}[{index}]", entry) for index, entry in enumerate(item))
        elif isinstance(item, dict):
            for key, entry in item.items():
                _check_text(path or "body", key)
                pending.append((f"{path}.{key}" if path else key, entry))
    return value


def _check_text(path: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FieldError(
            path,
            f"{path} is not valid Unicode: character {error.start} is half of a surrogate pair "
            "or a byte that is not UTF-8.",
        ) from error
