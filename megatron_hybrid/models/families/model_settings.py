"""Settings as somebody wrote them, by any of the names that they have had."""

from __future__ import annotations

from collections.abc import Mapping
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

    def whole(self, *names: str, default: int | None = None) -> int:
        """A whole number; without a default one that has to be there. Raises ConfigurationError for
        another value."""
        value = self.require(*names) if default is None else self.get(*names, default=default)
        number = self._number(names[0], value)
        if not float(number).is_integer():
            raise self._wrong(names[0], value, "a whole number")
        return int(number)

    def number(self, *names: str, default: float) -> float:
        """A number, the default where it is not there. Raises ConfigurationError for another
        value."""
        return float(self._number(names[0], self.get(*names, default=default)))

    def _number(self, name: str, value: Any) -> int | float:
        if not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> ConfigurationError:
        shown = self.shown(name, _short(value))
        return ConfigurationError(f"{shown} in {self.where}, which is not {wanted}.")

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false, the default where it is not there."""
        return bool(self.get(*names, default=default))

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

    def refuse_below(self, least: Mapping[str, int]) -> None:
        """Raise for a whole number of those that is there and less than what stands beside it."""
        for name, number in least.items():
            if self.whole(name, default=number) < number:
                raise ConfigurationError(
                    f"{name} = {self.get(name)} in {self.where}; it must be at least {number}."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
