"""The commands of the console script: what each is for, and where it lives."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from megatron_hybrid.arguments import ArgumentParser


class Command(NamedTuple):
    """module: has `main(argv)`, which gives the exit code, and `argument_parser()`; imported when
    it is wanted, since some take long."""

    usage: str  # what comes behind its name
    what: str
    module: str

    def run(self, argv: Sequence[str]) -> int:
        """Its exit code."""
        code: int = import_module(self.module).main(argv)
        return code

    def argument_parser(self) -> ArgumentParser:
        """With all of its flags."""
        parser: ArgumentParser = import_module(self.module).argument_parser()
        return parser


COMMANDS = {
    "serve": Command(
        "[MODEL]",
        "a model over HTTP, in OpenAI's wire format, with a page to chat with it",
        "megatron_hybrid.server.cli",
    ),
    "chat": Command(
        "[QUESTION]", "with a running server, in the terminal", "megatron_hybrid.terminal.cli"
    ),
    "verify": Command(
        "[MODEL]",
        "whether a model runs right here, beside transformers",
        "megatron_hybrid.verify.cli",
    ),
    "completion": Command(
        "SHELL", "of commands and flags in bash, zsh and fish", "megatron_hybrid.completion"
    ),
    "version": Command("", "ours, and those of what we stand on", "megatron_hybrid.versions"),
}
