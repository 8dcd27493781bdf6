"""The console script `megatron-hybrid`: hands over to the command that was named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from megatron_hybrid import __version__
from megatron_hybrid.arguments import ArgumentParser

COMMANDS = {
    "serve": "a model over HTTP",
    "verify": "whether a model runs right here, beside transformers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megatron-hybrid COMMAND ...`; the process's exit code."""
    parser = ArgumentParser(
        prog="megatron-hybrid",
        description="Inference for hybrid language models.",
        epilog="`megatron-hybrid COMMAND --help` lists all flags of a command.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    described = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    parser.add_argument("command", metavar="COMMAND", help=described)
    # The command parses its own flags.
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = (arguments or [""])[0]
    if not command or (command.startswith("-") and command not in ("-h", "--help", "--version")):
        parser.error("name a command first: `megatron-hybrid serve MODEL` serves a model.")
    command = parser.parse_args([command]).command
    if command not in COMMANDS:
        (near,) = get_close_matches(command, COMMANDS, n=1, cutoff=0.0)
        parser.error(f"there is no command {command!r}; did you mean {near}?")
    if command == "verify":
        from megatron_hybrid.verify.cli import main as verify

        return verify(arguments[1:])

    from megatron_hybrid.server.cli import main as serve

    return serve(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
