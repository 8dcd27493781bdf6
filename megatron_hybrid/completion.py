"""`megatron-hybrid completion SHELL`: a script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.commands import COMMANDS

SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("load", "tokenizer_model", "named_model")
_FILE_METAVARS = ("FILE", "PEM", "YAML")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of the shell that is named; the process's exit code."""
    shell = argument_parser().parse_args(argv).shell
    try:
        import shtab
    except ModuleNotFoundError:
        print("Completion needs the package shtab: pip install shtab.", file=sys.stderr)
        return 2
    print(shtab.complete(_whole_parser(), shell))
    return 0


def argument_parser() -> ArgumentParser:
    """Of this command."""
    parser = ArgumentParser(
        prog="megatron-hybrid completion",
        description="Print what makes a shell complete commands and flags, from where it reads it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


_EXAMPLES = """\
bash:  megatron-hybrid completion bash > ~/.local/share/bash-completion/completions/megatron-hybrid
zsh:   megatron-hybrid completion zsh > FOLDER/_megatron-hybrid      (FOLDER: one of $fpath)
fish:  megatron-hybrid completion fish > ~/.config/fish/completions/megatron-hybrid.fish
"""


def _whole_parser() -> argparse.ArgumentParser:
    """Of all commands at once, which nothing else needs."""
    whole = argparse.ArgumentParser(prog="megatron-hybrid")
    whole.add_argument("--version", action="version", version="")
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        parser = command.argument_parser()
        for action in parser._actions:
            _tell_values(action)
        commands.add_parser(name, help=command.what, parents=[parser], add_help=False)
    return whole


def _tell_values(action: argparse.Action) -> None:
    """As shtab wants to know them. Our flags check choices themselves, and show them as {a,b}."""
    import shtab

    shown = action.metavar if isinstance(action.metavar, str) else ""
    if shown.startswith("{"):
        action.choices = shown.strip("{}").split(",")
    elif action.dest in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif shown in _FILE_METAVARS:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
