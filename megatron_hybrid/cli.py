"""The console script `megatron-hybrid`: hands over to the command that was named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_hybrid import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megatron-hybrid COMMAND ...`; the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="megatron-hybrid",
        description="Inference for hybrid language models.",
        epilog="`megatron-hybrid serve --help` lists all flags of the server.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=["serve"], help="serve: a model over HTTP")
    # The command parses its own flags.
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser.parse_args(arguments[:1])

    from megatron_hybrid.server.cli import main as serve

    return serve(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
