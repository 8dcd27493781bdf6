"""`megatron-hybrid chat`: with a running server, in a dialogue or with one question."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.arguments import ArgumentParser, add_arguments, values_from_args
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.keys import API_KEY_VARIABLE
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.settings import Settings, option
from megatron_hybrid.terminal.client import Server, ServerError
from megatron_hybrid.terminal.conversation import Conversation
from megatron_hybrid.terminal.prompt import Dialogue
from megatron_hybrid.terminal.screen import Screen, clean

INTERRUPTED = 130  # the exit code, as shells have it


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Settings):
    """Whom to ask, and what is shown."""

    url: str = option(
        f"http://{ServerOptions.host}:{ServerOptions.port}",
        "where the server is; /v1 may follow",
        metavar="URL",
    )
    model: str | None = option(
        None, "name of the model; left out: the first that is served", metavar="NAME"
    )
    api_key: str | None = option(
        None,
        f"key that the server wants; left out: the first one in {API_KEY_VARIABLE}, if that is "
        "set. Everybody on the machine sees flags",
        metavar="KEY",
        is_secret=True,
    )
    system: str | None = option(None, "system message", metavar="TEXT")
    thoughts: bool = option(True, "show what the model thinks before it answers")
    figures: bool = option(True, "show tokens and times after each answer")


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """Fields of requests, by their names; None is left to the server."""

    temperature: float | None = option(None, "0 takes the likeliest token each time")
    top_p: float | None = option(None, "choose from the likeliest tokens that have this share")
    top_k: int | None = option(None, "choose from so many of the likeliest tokens")
    min_p: float | None = option(
        None, "choose from tokens with at least this part of the likeliest one's probability"
    )
    repetition_penalty: float | None = option(
        None, "above 1, tokens that were there become less likely"
    )
    presence_penalty: float | None = option(
        None, "above 0, tokens of the answer become less likely", least=-2
    )
    frequency_penalty: float | None = option(
        None, "above 0, tokens of the answer become less likely each time", least=-2
    )
    max_tokens: int | None = option(None, "most tokens of an answer", least=1)
    seed: int | None = option(None, "the same one gives the same answer")
    stop: tuple[str, ...] | None = option(
        None, "texts that end an answer; they are not shown", metavar="TEXT"
    )
    reasoning_effort: str | None = option(
        None, "how much a model that thinks thinks; none: not at all", metavar="EFFORT"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Chat; 0, or 1 when a server can't be reached or refuses, or 2 for a wrong flag, or 130 when
    the one question was interrupted."""
    args = argument_parser().parse_args(argv)
    try:
        options, sampling = _read(args)
        question = args.question or _piped_question()
        server = Server(options.url, options.api_key or _key_of_environment())
        out, notes = sys.stdout, sys.stdout if question is None else sys.stderr
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # of a terminal that does not show every letter
        conversation = Conversation(
            server,
            options.model or server.model(),
            Screen(out, notes),
            options.system,
            sampling,
            # Whoever reads a file or a pipe wants the answer.
            shows_thoughts=options.thoughts and out.isatty(),
            shows_figures=options.figures,
        )
        if question is not None:
            conversation.ask(question)
            return 0
        conversation.screen.note(
            f"{conversation.model} at {server.url}; /help lists commands, Ctrl-D leaves."
        )
        Dialogue(conversation).run()
        return 0
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    except ServerError as error:
        print(clean(str(error)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read us has gone; nor is there anybody for what Python would still write at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def argument_parser() -> ArgumentParser:
    """Of this command."""
    parser = ArgumentParser(
        prog="megatron-hybrid chat",
        description="Chat with a running server, or ask it one question.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "question",
        nargs="?",
        metavar="QUESTION",
        help="is asked alone, as is what is piped in: the answer goes to standard output, and the "
        "exit code says whether there was one",
    )
    add_arguments(parser, ChatOptions, "chat")
    add_arguments(parser, Sampling, "sampling; what is left out, the server chooses")
    parser.set_defaults(config=None)
    return parser


_EXAMPLES = """\
examples:
  megatron-hybrid chat
  megatron-hybrid chat "What is a recurrent state?" --temperature 0
  git diff | megatron-hybrid chat --system "Review this change." > review.txt
"""


def _read(args: argparse.Namespace) -> tuple[ChatOptions, dict[str, Any]]:
    own, sampling = values_from_args(args, ChatOptions, Sampling)
    Sampling(**sampling)  # which checks them
    return ChatOptions(**own), sampling


def _piped_question() -> str | None:
    """What comes on standard input; None: a person sits there."""
    if sys.stdin.isatty():
        return None
    try:
        question = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError:
        raise ConfigurationError("What came on standard input is no UTF-8 text.") from None
    if not question:
        raise ConfigurationError("No question came on standard input.")
    return question


def _key_of_environment() -> str | None:
    return next(iter(os.environ.get(API_KEY_VARIABLE, "").split()), None)
