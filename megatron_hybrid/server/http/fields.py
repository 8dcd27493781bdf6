"""A JSON body taken apart field by field. Whatever nobody asked for is unknown, and refused, or
dropped where the operator says so."""

from __future__ import annotations

import json
import re
from typing import Any, overload

import msgspec

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.server.options import ParseOptions

Body = bytes | bytearray

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # paired or not


class FieldError(InvalidRequestError):
    """A field that is wrong; `code` is OpenAI's word for the way in which it is."""

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(field, message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, str(self), self.code)


BY_DEFAULT = ParseOptions()


class Fields:
    """One JSON object. Every method takes a field out and returns its checked value.

    null counts as left out, as in OpenAI's API. ignore_unknown: `finish` refuses nothing.
    """

    def __init__(
        self, values: dict[str, Any], path: str = "", *, ignore_unknown: bool = False
    ) -> None:
        self._values = dict(values)
        self._path = path
        self._ignore_unknown = ignore_unknown

    def inside(self, values: dict[str, Any], path: str) -> Fields:
        """An object within this one; `path` is its name from the body's root."""
        return Fields(values, path, ignore_unknown=self._ignore_unknown)

    def name(self, field: str) -> str:
        return f"{self._path}.{field}" if self._path else field

    def given(self, field: str) -> bool:
        return self._values.get(field) is not None

    @property
    def are_taken(self) -> bool:
        """Whether nothing is left."""
        return not self._values

    def any(self, field: str) -> Any:
        return self._values.pop(field, None)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.any(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(field, value, "true or false")
        return value

    def integer(self, field: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.any(field)
        if value is None:
            return default
        self.check_integer(field, value, low, high)
        return int(value)

    def check_integer(self, field: str, value: Any, low: int, high: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong_type(field, value, "a whole number")
        if not low <= value <= high:
            raise self.wrong_value(field, value, f"it must be from {low} to {high}")

    @overload
    def number(
        self, field: str, low: float, high: float, default: float, *, above_low: bool = ...
    ) -> float: ...

    @overload
    def number(
        self, field: str, low: float, high: float, default: None = ..., *, above_low: bool = ...
    ) -> float | None: ...

    @overload
    def number(
        self, field: str, low: float, high: float, default: float | None, *, above_low: bool = ...
    ) -> float | None: ...

    def number(
        self,
        field: str,
        low: float,
        high: float,
        default: float | None = None,
        *,
        above_low: bool = False,
    ) -> float | None:
        """From `low` to `high`; above_low: `low` itself is out."""
        value = self.any(field)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong_type(field, value, "a number")
        # NaN and infinity are outside every range.
        if not (low < value if above_low else low <= value) or not value <= high:
            start = f"more than {low:g} and at most" if above_low else f"from {low:g} to"
            raise self.wrong_value(field, value, f"it must be {start} {high:g}")
        return value

    def text(self, field: str, max_length: int, default: str = "") -> str:
        value = self.any(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong_type(field, value, "a string")
        if len(value) > max_length:
            raise FieldError(
                self.name(field),
                f"{self.name(field)} has {len(value)} characters; the limit is {max_length}.",
            )
        return value

    def object(self, field: str) -> dict[str, Any]:
        value = self.any(field)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong_type(field, value, "an object")
        return value

    def list(self, field: str, max_length: int) -> list[Any]:
        value = self.any(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong_type(field, value, "a list")
        if len(value) > max_length:
            raise FieldError(
                self.name(field),
                f"{self.name(field)} has {len(value)} entries; the limit is {max_length}.",
            )
        return value

    def unsupported(self, field: str, *harmless: Any) -> None:
        """Accept null and the values that change nothing; refuse the others."""
        value = self.any(field)
        if value is None or any(_same(value, allowed) for allowed in harmless):
            return
        raise FieldError(
            self.name(field),
            f"{self.name(field)} is not supported yet; leave it out.",
            "unsupported_parameter",
        )

    def finish(self) -> None:
        """Refuse the first field that nobody took, unless unknown ones are ignored."""
        if self._ignore_unknown:
            return
        for field in self._values:
            name = self.name(field)
            raise FieldError(name, f"Unknown field: {name}.", "unknown_parameter")

    def missing(self, field: str) -> FieldError:
        name = self.name(field)
        return FieldError(name, f"{name} is required.", "missing_required_parameter")

    def wrong_type(self, field: str, value: Any, wanted: str) -> FieldError:
        name = self.name(field)
        return FieldError(name, f"{name} is {show(value)}; it must be {wanted}.", "invalid_type")

    def wrong_value(self, field: str, value: Any, rule: str) -> FieldError:
        name = self.name(field)
        return FieldError(name, f"{name} is {show(value)}; {rule}.")


def parse_body(body: Body) -> dict[str, Any]:
    """The JSON object of a request body, with every string valid Unicode."""
    # Wrong bytes become lone surrogates here, so that the field that holds them can be named.
    text = body.decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise FieldError("body", "The body is nested too deeply.") from error
    except ValueError as error:
        reason = str(error).encode("utf-8", "replace").decode()
        message = f"The body is not valid JSON: {reason}."
        raise FieldError("body", message, "invalid_json") from error
    if not isinstance(value, dict):
        raise FieldError("body", f"The body is {show(value)}; it must be a JSON object.")
    if _SURROGATE.search(body) or not _is_utf8(body):
        _refuse_surrogates(value)
    return value


def show(value: Any) -> str:
    """A value as the client wrote it, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _same(value: Any, allowed: Any) -> bool:
    # True == 1 in Python, not in JSON.
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _is_utf8(body: Body) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _refuse_surrogates(value: dict[str, Any]) -> None:
    """Name the first text that is no valid Unicode."""
    try:
        msgspec.json.encode(value)  # much faster than to look at each text here
        return
    except (ValueError, RecursionError):
        pass
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


def _check_text(path: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FieldError(
            path,
            f"{path} is not valid Unicode: character {error.start} is half of a surrogate pair "
            "or a byte that is not UTF-8.",
        ) from error
