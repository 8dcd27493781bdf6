"""The console script `megatron-hybrid`: hands over to the command that was named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from megatron_hybrid import __version__
from megatron_hybrid.arguments import ArgumentParser
from megatron_hybrid.commands import COMMANDS
from megatron_hybrid.server.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

_ABOUT = """\
An inference engine for hybrid language models, with a prefix cache for KV blocks and recurrent
states, and a server that speaks OpenAI's wire format.

commands:
{commands}

`megatron-hybrid COMMAND --help` lists all flags of a command.
"""
_MORE = f"""\
examples:
  megatron-hybrid serve                                  the small model that ships with us
  megatron-hybrid serve ibm-granite/granite-4.0-h-tiny   one of the Hugging Face hub
  megatron-hybrid serve FOLDER --port 5000 --api-key-file keys.txt
  megatron-hybrid chat                                   with the server on this machine
  echo "What is a recurrent state?" | megatron-hybrid chat
  megatron-hybrid verify FOLDER --report report.json
  megatron-hybrid completion bash > ~/.local/share/bash-completion/completions/megatron-hybrid

exit codes:
  0    it is done; of serve: a signal ended it, and its requests were answered
  1    serve: the engine or the front end failed; verify: something differs;
       chat: the server can't be reached, or refused
  2    a flag, a file of options or a model is wrong: a sentence says what, and nothing was begun
  130  Ctrl-C (143: SIGTERM) before there was anything to finish

environment:
  {API_KEY_VARIABLE}        key that serve wants of clients, and that chat sends
  {ADMIN_KEY_VARIABLE}  key for the routes that steer the server
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE
                                 where the hub's files are kept; for private models; ask no hub
  CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS
                                 GPUs that may be used; threads of each process on a CPU
  NO_COLOR                       no colours in chat

documentation:
  docs/ of the source distribution: docs/command_line.md has the commands, docs/server.md the routes
  and fields, docs/docker.md the images. A running server describes itself: /openapi.json, and the
  page at /
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megatron-hybrid COMMAND ...`; the process's exit code."""
    parser = argument_parser()
    # The command parses its own flags.
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = (arguments or [""])[0]
    if not command or (command.startswith("-") and command not in ("-h", "--help", "--version")):
        parser.error("name a command first: `megatron-hybrid serve MODEL` serves a model.")
    command = parser.parse_args([command]).command
    if command == "help":
        parser.print_help()
        return 0
    if command not in COMMANDS:
        (near,) = get_close_matches(command, COMMANDS, n=1, cutoff=0.0)
        parser.error(f"there is no command {command!r}; did you mean {near}?")
    return COMMANDS[command].run(arguments[1:])


def argument_parser() -> ArgumentParser:
    """Of what stands before a command's own flags."""
    shown = {name: f"{name} {command.usage}" for name, command in COMMANDS.items()}
    lines = [f"  {shown[name]:<19}{command.what}" for name, command in COMMANDS.items()]
    parser = ArgumentParser(
        prog="megatron-hybrid",
        usage="%(prog)s COMMAND ...",
        description=_ABOUT.format(commands="\n".join(lines)),
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
