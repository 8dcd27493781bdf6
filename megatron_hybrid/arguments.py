"""Command-line flags and files of options to Settings, and a parser that answers mistakes in a
sentence."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.flag_names import VALUES, aliases_of, elsewhere, read_count
from megatron_hybrid.settings import Settings, flag_of, options_of, plain_type, read_yaml


class ArgumentParser(argparse.ArgumentParser):
    """Exits with 2 and a sentence for each wrong flag, without the usage. A flag's name has to be
    whole: more flags may come, and what an abbreviation means would change."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | options)

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse, but exits with a sentence for each unknown flag, for a stray value, or for a
        flag that another name of it contradicts. `aliases`: what other names set, a line each."""
        given = list(sys.argv[1:] if args is None else args)
        # Before anything else: a required flag that is missing may be there under a wrong name.
        if unknown := self._unknown_flags(given):
            self.exit(2, "".join(f"{self.prog}: {self._about(flag)}\n" for flag in unknown))
        found, rest = super().parse_known_args(given, namespace)
        self._resolve_aliases(found)
        if rest:
            hint = "a model is named by --load, and once." if self._has("--load") else _HELP
            self.error(f"{rest[0]!r} belongs to no flag; {hint}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and this sentence."""
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ').rstrip('.')}.\n")

    def _resolve_aliases(self, found: argparse.Namespace) -> None:
        """Their values become those of the flags that they stand for."""
        for alias in [name for name in vars(found) if name.startswith(_ALIAS)]:
            _, flag, name = alias.split("|")
            value = vars(found).pop(alias)
            if getattr(found, name, value) != value:
                both = f"{flag} is {value}, and {flag_of(name)}, which it stands for, is"
                self.error(f"{both} {getattr(found, name)}; leave one of them out")
            setattr(found, name, value)
            said = f"{flag} sets {flag_of(name)}: {'left out' if value is None else value}"
            found.aliases = [*getattr(found, "aliases", ()), said]

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
OTHER_NAMES = "vLLM's names of flags"
_ALIAS = "alias|"  # dest of a flag's other name: alias|--other-name|field_of_the_flag


def _read(kind: Callable[[str], int | float], what: str, text: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None


def _reader(flag: str, read: Callable[[str], Any], choices: tuple[str, ...]) -> Callable[..., Any]:
    """Of a value that may go by another name."""
    names = VALUES.get(flag, {})

    def value(text: str) -> Any:
        text = names.get(text, text)  # type: ignore[assignment]
        if text is not None and choices and text not in choices:
            raise argparse.ArgumentTypeError(
                f"invalid choice: {text!r} (choose from {', '.join((*choices, *names))})"
            )
        return None if text is None else read(text)

    return value


_TYPES = {"int": partial(_read, int, "a whole number"), "float": partial(_read, float, "a number")}
_COUNT = partial(_read, read_count, "a whole number")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of EngineConfig, and --config for a file of them."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="YAML", help="file of options; flags win over it")
    add_arguments(parser, EngineConfig, "engine", "chosen by the engine")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, another way to say --load."""
    parser.add_argument(
        "named_model",
        nargs="?",
        metavar="MODEL",
        help="what --load names, too: a folder, or a model's name on the Hugging Face hub "
        "(OWNER/NAME), whose files are downloaded unless the cache has them",
    )


def add_arguments(
    parser: argparse.ArgumentParser, kind: type[Settings], group: str, none: str = ""
) -> None:
    """One flag for each option of `kind`, in its group or else in `group`. `none`: what --help says
    of the default None."""
    groups = {one.title: one for one in parser._action_groups}
    for option in options_of(kind):
        title, name = option.metadata["group"] or group, plain_type(option)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = _shown(option, none)
        settings: dict[str, Any] = {
            "dest": option.name,
            "default": argparse.SUPPRESS,  # so that only flags that were given win over --config
            "help": option.metadata["help"] + (f" (default: {default})" if default else ""),
        }
        if name == "bool":
            settings["action"] = argparse.BooleanOptionalAction
        elif choices := option.metadata["choices"]:
            settings["type"] = _reader(flag_of(option.name), str, choices)
            settings["metavar"] = "{" + ",".join(choices) + "}"
        else:
            settings["type"] = _TYPES.get(name, str)
            settings["metavar"] = option.metadata["metavar"] or name.upper()
        if name == "tuple":
            secret = option.metadata["is_secret"]
            settings |= {"action": "append"} if secret else {"action": "extend", "nargs": "+"}
        groups[title].add_argument(flag_of(option.name), **settings)
        _add_aliases(parser, option, name, settings)


def _add_aliases(
    parser: argparse.ArgumentParser, option: Field[Any], kind: str, settings: dict[str, Any]
) -> None:
    """Other names of an option's flag, each with a place of its own until all are read."""
    flag = flag_of(option.name)
    for name, value in aliases_of(flag):
        known = {one.title: one for one in parser._action_groups}
        group = known.get(OTHER_NAMES) or parser.add_argument_group(OTHER_NAMES)
        read = _COUNT if kind == "int" else _TYPES.get(kind, str)
        own: dict[str, Any] = {
            key: settings[key] for key in ("action", "default", "metavar") if key in settings
        }
        if value:
            own |= {"action": "store_const", "const": read(value)}
            del own["metavar"]
        elif kind != "bool":
            own["type"] = _reader(name, read, option.metadata["choices"])
        own["help"] = f"sets {flag}" + (f" {value}" if value else "")
        group.add_argument(name, dest=f"{_ALIAS}{name}|{option.name}", **own)


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags, and the file that --config names, describe.

    Raises ConfigurationError, whose message is fit for the user.
    """
    (values,) = values_from_args(args, EngineConfig)
    return EngineConfig(**values)


def values_from_args(args: argparse.Namespace, *kinds: type[Settings]) -> list[dict[str, Any]]:
    """What the flags, and the file that --config names, set: keyword arguments for each of the
    `kinds`.

    Raises ConfigurationError for a file that is wrong, or that sets what none of them has, and for
    a MODEL beside --load of another.
    """
    model = getattr(args, "named_model", None)
    if model is not None:
        if getattr(args, "load", model) != model:
            raise ConfigurationError(
                f"Two models are named: {model}, and {args.load} (--load); leave one of them out."
            )
        args.load = model
    notes = list(getattr(args, "aliases", ()))
    found = read_yaml(args.config, kinds, notes.append) if args.config else [{} for _ in kinds]
    args.aliases = notes
    for kind, values in zip(kinds, found, strict=True):
        for option in options_of(kind):
            if hasattr(args, option.name):
                value = getattr(args, option.name)
                values[option.name] = tuple(value) if isinstance(value, list) else value
    return found


def _shown(option: Field[Any], none: str) -> str:
    """What --help says of the default."""
    default = option.default
    if option.metadata["shown"] is not None:
        return str(option.metadata["shown"])
    if default is None or default is MISSING or default == ():
        return none
    return str(default).lower() if isinstance(default, bool) else str(default)
