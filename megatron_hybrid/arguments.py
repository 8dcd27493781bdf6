"""Megatron's command-line flags <-> EngineConfig, and a parser that answers mistakes in a
sentence."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn

from megatron_hybrid.config import EngineConfig, read_yaml
from megatron_hybrid.flag_names import elsewhere


class ArgumentParser(argparse.ArgumentParser):
    """Exits with 2 and a sentence for each wrong flag, without the usage. A flag's name has to be
    whole: more flags may come, and what an abbreviation means would change."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | options)

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        # Before anything else: a required flag that is missing may be there under a wrong name.
        if unknown := self._unknown_flags(given):
            self.exit(2, "".join(f"{self.prog}: {self._about(flag)}\n" for flag in unknown))
        found, rest = super().parse_known_args(given, namespace)
        if rest:
            hint = "a model's folder is named by --load." if self._has("--load") else _HELP
            self.error(f"{rest[0]!r} belongs to no flag; {hint}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ').rstrip('.')}.\n")

    def _has(self, flag: str) -> bool:
        return flag in self._option_string_actions

    def _unknown_flags(self, given: list[str]) -> list[str]:
        flags = given[: given.index("--")] if "--" in given else given
        found = []
        for text in flags:
            name = text.partition("=")[0]
            # What has a space in it is a value.
            if re.match(r"--?[A-Za-z]", text) and " " not in text and not self._is_known(name):
                found.append(name)
        return found

    def _is_known(self, name: str) -> bool:
        """`-xVALUE` is known where -x is."""
        return self._has(name) or (not name.startswith("--") and self._has(name[:2]))

    def _about(self, flag: str) -> str:
        ours, reason = elsewhere(flag)
        if reason:
            return f"{flag} is no flag here, and there is none: {reason}."
        dashes = flag.replace("_", "-")
        if self._has(dashes):
            ours = dashes
        if ours is not None and self._has(ours.partition(" ")[0]):
            return f"{flag} is no flag here; it is called {ours}."
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        longer = [name for name in flags if name.startswith(dashes)]
        near = get_close_matches(dashes, longer or flags, n=1, cutoff=0.0 if longer else 0.6)
        return f"{flag} is no flag; " + (f"did you mean {near[0]}?" if near else _HELP)


_HELP = "--help lists all."


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_TYPES = {"int": _whole, "float": _number, "str": str}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of EngineConfig, and --config for a file of them."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="YAML", help="file of options; flags win over it")
    for option in fields(EngineConfig):
        kind = str(option.type)
        settings: dict[str, Any] = {
            "dest": option.name,
            "default": argparse.SUPPRESS,  # so that only flags that were given win over --config
            "help": f"{option.metadata['help']} (default: {_shown(option.default)})",
        }
        if kind.startswith("bool"):
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["type"] = _TYPES[kind.split(" ")[0]]
            if option.metadata["choices"]:
                settings["choices"] = option.metadata["choices"]
            else:
                settings["metavar"] = kind.split(" ")[0].upper()
        group.add_argument("--" + option.name.replace("_", "-"), **settings)


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags, and the file that --config names, describe.

    Raises ConfigurationError, whose message is fit for the user.
    """
    values = read_yaml(args.config) if args.config else {}
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for option in fields(EngineConfig):
        if hasattr(args, option.name):
            values[option.name] = getattr(args, option.name)
    return EngineConfig.from_mapping(values, f"--config {args.config}")


def _shown(default: object) -> str:
    if default is None:
        return "chosen by the engine"
    return str(default).lower() if isinstance(default, bool) else str(default)
