"""The console script `megatron-hybrid`: hands over to the command that was named."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_hybrid import __version__
from megatron_hybrid.arguments import ArgumentParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megatron-hybrid COMMAND ...`; the process's exit code."""
    parser = ArgumentParser(
        prog="megatron-hybrid",
        description="Inference for hybrid language models.",
        epilog="`megatron-hybrid serve --help` lists all flags of the server.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", metavar="serve", help="serve: a model over HTTP")
    # The command parses its own flags.
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = (arguments or [""])[0]
    if not command or (command.startswith("-") and command not in ("-h", "--help", "--version")):
        parser.error("name a command first: `megatron-hybrid serve --load DIR` serves a model.")
    if parser.parse_args([command]).command != "serve":
        parser.error(f"there is no command {command!r}; did you mean serve?")

    from megatron_hybrid.server.cli import main as serve

    return serve(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
