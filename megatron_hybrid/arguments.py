"""Megatron's command-line flags <-> EngineConfig."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from megatron_hybrid.config import EngineConfig, read_yaml

_TYPES = {"int": int, "float": float, "str": str}


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
