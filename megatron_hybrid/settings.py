"""Settings: dataclasses whose fields hold all that flags, files and checks need to know of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_hybrid.errors import ConfigurationError

# Upper limit of whole numbers where more would do nothing.
MOST = 2**31 - 1


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    *,
    least: int = 0,
    least_means: str = "",
    most: int = MOST,
    group: str = "",
    shown: str | None = None,
    metavar: str = "",
    is_file: bool = False,
    is_secret: bool = False,
) -> Any:
    """A field of Settings; its type is bool, int, float, str or tuple[str, ...], or one | None.

    `default`: a function makes one. `least`, `most`: of a number, both included; `least_means`:
    what the first one stands for. In --help: `group`; `shown`, what to say of the default, "" for
    nothing; `metavar`. `is_file`: a path, relative to the file of options that it stands in.
    `is_secret`: never shown; and of a tuple each value comes with a flag of its own.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "least": least,
        "least_means": least_means,
        "most": most,
        "group": group,
        "shown": shown,
        "metavar": metavar,
        "is_file": is_file,
        "is_secret": is_secret,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True)
class Settings:
    """Field `a_b` is flag `--a-b` and a key in files of options; fields without `option` are
    neither. Raises ConfigurationError for a value that is none."""

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            if value is not None or "None" not in str(one.type):
                _check(one, value)

    def replace(self, **changes: Any) -> Self:
        """The same with other values."""
        return dataclasses.replace(self, **changes)


def options_of(kind: type[Settings]) -> list[dataclasses.Field[Any]]:
    """The fields that users set."""
    return [one for one in fields(kind) if one.metadata]


def plain_type(one: dataclasses.Field[Any]) -> str:
    """ "bool", "int", "float", "str" or "tuple": a field's type without `| None`."""
    return str(one.type).split(" ")[0].partition("[")[0]


def flag_of(name: str) -> str:
    """The flag of the field with this name."""
    return "--" + name.replace("_", "-")


def split_values(
    values: Mapping[str, Any], kinds: Iterable[type[Settings]], source: str
) -> list[dict[str, Any]]:
    """Values by field or flag names (without the dashes in front), divided among `kinds` of
    settings by field names. ConfigurationError for a key that is in none; `source` says where it
    stands."""
    divided: list[dict[str, Any]] = []
    left = {key.replace("-", "_"): key for key in values}
    for kind in kinds:
        names = {one.name for one in options_of(kind)} & left.keys()
        divided.append({name: values[left.pop(name)] for name in names})
    for key in left.values():
        raise ConfigurationError(f"{source} sets {key!r}, which is not an option.")
    return divided


def read_yaml(path: str | Path, kinds: Iterable[type[Settings]]) -> list[dict[str, Any]]:
    """What a YAML file sets, divided among `kinds`, as keyword arguments of each. Names of files in
    it are relative to its folder.

    Raises ConfigurationError that says what is wrong with the file.
    """
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"--config {path} is not YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigurationError(f"--config {path} must hold option names and their values.")
    kinds = list(kinds)
    divided = split_values(values, kinds, f"--config {path}")
    for kind, found in zip(kinds, divided, strict=True):
        for one in options_of(kind):
            value = found.get(one.name)
            if one.metadata["is_file"] and isinstance(value, str):
                found[one.name] = str(Path(path).parent / value)  # an absolute path stays as it is
            elif plain_type(one) == "tuple" and isinstance(value, list | str):
                found[one.name] = (value,) if isinstance(value, str) else tuple(value)
    return divided


_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "tuple": (tuple,),
}


def _check(one: dataclasses.Field[Any], value: Any) -> None:
    limits, wanted = one.metadata, _TYPES[plain_type(one)]
    says = f"{flag_of(one.name)} is {_shown(value)}; it must be"
    if limits["is_secret"]:
        says = f"{flag_of(one.name)} must be"
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigurationError(f"{says} of type {one.type}.")
    if isinstance(value, tuple):
        if not all(isinstance(text, str) for text in value):
            raise ConfigurationError(f"{flag_of(one.name)} must be text, or a list of texts.")
    elif limits["choices"] and value not in limits["choices"]:
        raise ConfigurationError(f"{says} one of {', '.join(limits['choices'])}.")
    elif isinstance(value, bool | str) or limits["least"] <= value <= limits["most"]:
        return
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{says} a finite number.")
    elif value > limits["most"]:
        raise ConfigurationError(f"{says} at most {limits['most']}.")
    elif limits["least_means"]:
        raise ConfigurationError(f"{says} {limits['least']} ({limits['least_means']}) or more.")
    else:
        raise ConfigurationError(f"{says} at least {limits['least']}.")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"  # which Python may refuse to print
    return repr(value)
