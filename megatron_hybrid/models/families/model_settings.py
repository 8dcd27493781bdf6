"""Settings as somebody wrote them, by any of the names that they have had."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.errors import ConfigurationError


@dataclass(frozen=True)
class ModelSettings:
    """A model's settings as somebody wrote them, looked up by any of the names that they have
    had."""

    values: Mapping[str, Any]
    where: str  # they stand, for messages

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not null."""
        return next((v for v in map(self.values.get, names) if v is not None), default)

    def require(self, *names: str) -> Any:
        """The same; raises ConfigurationError where there is none."""
        value = self.get(*names)
        if value is None:
            raise ConfigurationError(self.missing(names[0]))
        return value

    def missing(self, name: str) -> str:
        """The sentence for a value that is not there."""
        return f"{self.where} has no {name!r}."

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of `least` or more; without a default one that has to be there. Raises
        ConfigurationError for another value."""
        value = self.require(*names) if default is None else self.get(*names, default=default)
        is_whole = isinstance(value, int) or isinstance(value, float) and value.is_integer()
        if not is_whole or value < least:
            raise self._wrong(names, value, f"a whole number of at least {least}")
        return int(value)

    def whole_or_auto(self, name: str, auto: int) -> int:
        """The same, or `auto` where it is not there or "auto"."""
        return auto if self.get(name, default="auto") == "auto" else self.whole(name)

    def whole_or_none(self, name: str) -> int | None:
        """The same, None where it is not there."""
        return None if self.get(name) is None else self.whole(name)

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number; without a default one that has to be there. Raises ConfigurationError
        for another value."""
        value = self.require(*names) if default is None else self.get(*names, default=default)
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self._wrong(names, value, "a number")
        return float(value)

    def positive(self, *names: str, default: float) -> float:
        """A number above 0, the default where it is not there. Raises ConfigurationError for
        another value."""
        value = self.number(*names, default=default)
        if value <= 0:
            raise self._wrong(names, value, "a number above 0")
        return value

    def listed(self, *names: str, default: list[Any] | None = None, of: type = str) -> list[Any]:
        """A list of names, or `of` other values; without a default one that has to be there. Raises
        ConfigurationError for another value."""
        value = self.require(*names) if default is None else self.get(*names, default=default)
        kinds = (int, float) if of is float else of
        if not isinstance(value, list) or not all(isinstance(one, kinds) for one in value):
            wanted = {str: "names", int: "whole numbers", float: "numbers", object: "values"}[of]
            raise self._wrong(names, value, f"a list of {wanted}")
        return value

    def inside(self, name: str) -> ModelSettings:
        """Those of an object; none where it is not there. Raises ConfigurationError for another
        value."""
        value = self.get(name, default={})
        if not isinstance(value, Mapping):
            raise self._wrong((name,), value, "an object")
        return ModelSettings(value, f"{name} in {self.where}")

    def _wrong(self, names: Sequence[str], value: Any, wanted: str) -> ConfigurationError:
        said = next((name for name in names if self.values.get(name) is not None), names[0])
        shown = self.shown(said, _short(value))
        return ConfigurationError(f"{shown} in {self.where}, which is not {wanted}.")

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false, the default where it is not there. Raises ConfigurationError for another
        value than those, 1 and 0."""
        value = self.get(*names, default=default)
        if value not in (True, False):
            raise self._wrong(names, value, "true or false")
        return bool(value)

    def shown(self, name: str, value: str) -> str:
        """A value that is there, as a sentence about it begins."""
        return f"{name} = {value}"

    def refuse_unless(self, name: str, *supported: Any) -> None:
        """Raise unless the value is one of those; a value that is missing or null is fine."""
        value = self.get(name)
        if value is not None and value not in supported:
            wanted = " or ".join(repr(s) for s in supported if s is not None) or "nothing"
            raise ConfigurationError(
                f"{self.shown(name, _short(value))} in {self.where}, which is not supported, only "
                f"{wanted} is."
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
