"""Settings: dataclasses whose fields hold all that flags, files and checks need to know of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.flag_names import VALUES, aliases_of, elsewhere, read_count

logger = logging.getLogger(__name__)

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


def named_values(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """What a flag of NAME=VALUE texts says. Raises ConfigurationError for others, and for a name
    that comes twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            raise ConfigurationError(f"{flag} has {text!r}; it takes NAME=DIR, each name once.")
        found[name] = value
    return found


Note = Callable[[str], None]


def split_values(
    values: Mapping[str, Any],
    kinds: Iterable[type[Settings]],
    source: str,
    note: Note = logger.info,
) -> list[dict[str, Any]]:
    """Values by field or flag names (without the dashes in front), ours or vLLM's, divided among
    `kinds` of settings by field names. note: told what other names set. ConfigurationError for a
    key that is in none; `source` says where it stands."""
    divided: list[dict[str, Any]] = []
    spelled = {key.replace("-", "_"): key for key in values}
    left = {name: values[key] for name, key in spelled.items()}
    for kind in kinds:
        found: dict[str, Any] = {}
        for one in options_of(kind):
            if one.name in left:
                value = left.pop(one.name)
                names = VALUES.get(flag_of(one.name), {})
                found[one.name] = names.get(value, value) if isinstance(value, str) else value
            for key, value in _take_aliases(one, left, source).items():
                if found.get(one.name, value) not in (value, None):
                    raise ConfigurationError(
                        f"{source} sets {key} to {value}, and {one.name}, which it stands for, to "
                        f"{found[one.name]}; leave one of them out."
                    )
                found[one.name] = value
                shown = "left out" if value is None else value
                note(f"{source}: {key} sets {flag_of(one.name)}: {shown}")
        divided.append(found)
    for key in left:
        ours, reason = elsewhere("--" + key.replace("_", "-"))
        why = f": {reason}" if reason else f"; it is called {ours}" if ours else ""
        raise ConfigurationError(f"{source} sets {spelled[key]!r}, which is not an option{why}.")
    return divided


def _take_aliases(
    one: dataclasses.Field[Any], values: dict[str, Any], source: str
) -> dict[str, Any]:
    """What vLLM's names of an option say, by these; they are taken out of `values`."""
    found: dict[str, Any] = {}
    for flag, constant in aliases_of(flag_of(one.name)):
        key = flag.lstrip("-").replace("-", "_")
        no = f"no_{key}"
        if plain_type(one) == "bool" and isinstance(values.get(no), bool):
            found[no] = not values.pop(no)
        if key not in values:
            continue
        value = values.pop(key)
        if constant and not isinstance(value, bool):
            raise ConfigurationError(f"{source} sets {key} to {value!r}; it must be true or false.")
        if not constant:
            names = VALUES.get(flag, {})
            value = names.get(str(value), value)
            if isinstance(value, str) and plain_type(one) == "int":
                with contextlib.suppress(ValueError):  # it is refused by its name below
                    value = read_count(value)
            found[key] = value
        elif value:
            found[key] = read_count(constant)
    return found


def read_yaml(
    path: str | Path, kinds: Iterable[type[Settings]], note: Note = logger.info
) -> list[dict[str, Any]]:
    """What a YAML file sets, divided among `kinds`, as keyword arguments of each. Names of files in
    it are relative to its folder; vLLM's `model` is so if it is there, and else as it stands. note:
    as in split_values.

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
    kinds, folder = list(kinds), Path(path).parent
    files = {one.name for kind in kinds for one in options_of(kind) if one.metadata["is_file"]}
    for key, value in values.items():
        is_file = key.replace("-", "_") in files
        if isinstance(value, str) and (is_file or (key == "model" and (folder / value).exists())):
            values[key] = str(folder / value)  # an absolute path stays as it is
    divided = split_values(values, kinds, f"--config {path}", note)
    for kind, found in zip(kinds, divided, strict=True):
        for one in options_of(kind):
            value = found.get(one.name)
            if plain_type(one) == "tuple" and isinstance(value, list | str):
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
