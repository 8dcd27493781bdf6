"""What a field of a request body may hold: how it is read, and how /openapi.json describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_hybrid.server.http.fields import FieldError, Fields

JsonSchema = dict[str, Any]

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class FieldType(Protocol):
    """`take` takes a field out of a body and returns its checked value, or raises FieldError;
    `schema` is what it accepts, as JSON Schema. null always counts as left out."""

    def take(self, fields: Fields, name: str) -> Any: ...

    def schema(self) -> JsonSchema: ...


@dataclass(frozen=True, slots=True)
class Boolean:
    description: str
    default: bool = False

    def take(self, fields: Fields, name: str) -> bool:
        return fields.boolean(name, self.default)

    def schema(self) -> JsonSchema:
        return _described("boolean", self.description, self.default)


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int
    description: str
    default: int | None = None

    def take(self, fields: Fields, name: str) -> int | None:
        return fields.integer(name, self.low, self.high, self.default)

    def schema(self) -> JsonSchema:
        schema = _described("integer", self.description, self.default)
        return {**schema, "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """From `low` to `high`; `above_low`: `low` itself is out."""

    low: float
    high: float
    description: str
    default: float | None = None
    above_low: bool = False

    def take(self, fields: Fields, name: str) -> float | None:
        return fields.number(name, self.low, self.high, self.default, above_low=self.above_low)

    def schema(self) -> JsonSchema:
        low = "exclusiveMinimum" if self.above_low else "minimum"
        schema = _described("number", self.description, self.default)
        return {**schema, low: self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Text:
    max_length: int
    description: str

    def take(self, fields: Fields, name: str) -> str:
        return fields.text(name, self.max_length)

    def schema(self) -> JsonSchema:
        return {**_described("string", self.description, None), "maxLength": self.max_length}


@dataclass(frozen=True, slots=True)
class Integers:
    """A list of whole numbers from `low` to `high`."""

    low: int
    high: int
    most: int
    description: str

    def take(self, fields: Fields, name: str) -> tuple[int, ...]:
        values = fields.list(name, self.most)
        for value in values:
            fields.check_integer(name, value, self.low, self.high)
        return tuple(values)

    def schema(self) -> JsonSchema:
        return {
            **_described("array", self.description, None),
            "items": {"type": "integer", "minimum": self.low, "maximum": self.high},
            "maxItems": self.most,
        }


@dataclass(frozen=True, slots=True)
class StopStrings:
    """One string or a list of them; none is empty."""

    most: int
    max_length: int
    description: str

    def take(self, fields: Fields, name: str) -> tuple[str, ...]:
        if isinstance(value := fields.any(name), str):
            value = [value]
        stops = Fields({name: value}).list(name, self.most)
        for stop in stops:
            if not isinstance(stop, str):
                raise fields.wrong_type(name, stop, "a string or a list of strings")
            if not 0 < len(stop) <= self.max_length:
                raise fields.wrong_value(
                    name, stop, f"a stop string has from 1 to {self.max_length} characters"
                )
        return tuple(stops)

    def schema(self) -> JsonSchema:
        one = {"type": "string", "minLength": 1, "maxLength": self.max_length}
        several = {"type": "array", "items": one, "maxItems": self.most}
        return {"anyOf": [one, several, {"type": "null"}], "description": self.description}


@dataclass(frozen=True, slots=True)
class LogitBias:
    """An object whose keys are token ids in decimal; its values are added to their logits."""

    most: int
    low: float
    high: float
    description: str

    def take(self, fields: Fields, name: str) -> tuple[tuple[int, float], ...]:
        values = fields.object(name)
        if len(values) > self.most:
            raise FieldError(name, f"{name} has {len(values)} entries; the limit is {self.most}.")
        entries = Fields(values, name)
        biases = []
        for key in values:
            if not _TOKEN_ID.fullmatch(key):
                raise fields.wrong_value(name, key, "its keys must be token ids in decimal")
            if not entries.given(key):
                raise entries.wrong_type(key, None, "a number")
            biases.append((int(key), entries.number(key, self.low, self.high, 0.0)))
        return tuple(biases)

    def schema(self) -> JsonSchema:
        return {
            **_described("object", self.description, None),
            "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
            "additionalProperties": {"type": "number", "minimum": self.low, "maximum": self.high},
            "maxProperties": self.most,
        }


@dataclass(frozen=True, slots=True)
class Labels:
    """An object of few strings, numbers and booleans."""

    most: int
    max_length: int
    description: str

    def take(self, fields: Fields, name: str) -> dict[str, Any]:
        values = fields.object(name)
        if len(values) > self.most:
            raise FieldError(name, f"{name} has {len(values)} entries; the limit is {self.most}.")
        entries = fields.inside(values, fields.name(name))
        for key, value in values.items():
            if len(key) > self.max_length:
                raise fields.wrong_value(
                    name, key, f"its keys have at most {self.max_length} characters"
                )
            if isinstance(value, str):
                entries.text(key, self.max_length)
            elif value is not None and not isinstance(value, (bool, int, float)):
                raise entries.wrong_type(key, value, "a string, a number, true or false")
        return values

    def schema(self) -> JsonSchema:
        value = {"type": ["string", "number", "boolean", "null"], "maxLength": self.max_length}
        return {
            **_described("object", self.description, None),
            "propertyNames": {"maxLength": self.max_length},
            "additionalProperties": value,
            "maxProperties": self.most,
        }


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object, whatever it holds."""

    description: str

    def take(self, fields: Fields, name: str) -> dict[str, Any]:
        return fields.object(name)

    def schema(self) -> JsonSchema:
        return _described("object", self.description, None)


@dataclass(frozen=True, slots=True)
class AnyList:
    """A list, whatever it holds."""

    most: int
    description: str

    def take(self, fields: Fields, name: str) -> list[Any]:
        return fields.list(name, self.most)

    def schema(self) -> JsonSchema:
        return {**_described("array", self.description, None), "maxItems": self.most}


class Unsupported:
    """A field of OpenAI's API that is refused, except for null and values that change nothing."""

    def __init__(self, *harmless: Any) -> None:
        self._harmless = harmless

    def take(self, fields: Fields, name: str) -> None:
        fields.unsupported(name, *self._harmless)

    def schema(self) -> JsonSchema:
        return {
            "enum": [*self._harmless, None],
            "description": "Not supported: only values that change nothing are accepted.",
        }


def take_all(fields: Fields, types: dict[str, FieldType]) -> dict[str, Any]:
    """The checked value of every field of the table."""
    return {name: kind.take(fields, name) for name, kind in types.items()}


def schemas(types: dict[str, FieldType]) -> dict[str, JsonSchema]:
    """JSON Schemas by field name: the "properties" of an object."""
    return {name: kind.schema() for name, kind in types.items()}


def _described(kind: str, description: str, default: Any) -> JsonSchema:
    schema: JsonSchema = {"type": [kind, "null"], "description": description}
    if default is not None:
        schema["default"] = default
    return schema
