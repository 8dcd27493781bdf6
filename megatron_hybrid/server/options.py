"""The server's own flags: where it listens, who may ask, and how many may wait."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import msgspec

RUNNING_THREADS = 512  # for requests that run: an open request holds a thread until it ends
MOST_THREADS = 8192
API_KEY_VARIABLE = "MEGATRON_HYBRID_API_KEY"


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end process needs to know."""

    tokenizer_folder: str
    model_name: str
    host: str = "127.0.0.1"
    port: int = 5000
    api_key: str | None = None
    max_queue: int = 1024
    http_threads: int = 1024 + RUNNING_THREADS


class FrontEndSettings(msgspec.Struct, frozen=True):
    """The first line on a front end's standard input."""

    options: ServerOptions
    endpoint: str  # of the engine's socket
    socket_folder: str  # that holds it; removed by whoever ends last


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument(
        "--port", type=_whole(0, 65535), default=5000, help="port to listen on; 0 takes a free one"
    )
    group.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        help=f"bearer key that clients must send; also from {API_KEY_VARIABLE}",
    )
    group.add_argument(
        "--max-queue",
        type=_whole(1, 1_000_000),
        default=1024,
        help="requests that may wait for their first token before new ones get 429",
    )
    group.add_argument(
        "--http-threads",
        type=_whole(8, MOST_THREADS),
        default=None,
        help="requests that may be open at the same time, running or waiting; more get 429. Left "
        f"out: --max-queue and {RUNNING_THREADS} more",
    )
    group.add_argument(
        "--served-model-name", default=None, help="name on the wire; the folder's name if left out"
    )


def add_ask_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a first question")
    group.add_argument(
        "--ask", metavar="TEXT", help="once the server is up, send this question over HTTP, twice"
    )
    group.add_argument("--system", metavar="TEXT", help="system message that goes with --ask")
    group.add_argument(
        "--exit-after-answer", action="store_true", help="end the server after --ask is answered"
    )


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {low} to {high}")
        return value

    return parse
