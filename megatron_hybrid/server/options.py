"""The server's own flags: where it listens, who may ask, and how many may wait."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from megatron_hybrid.server.addresses import parse_network
from megatron_hybrid.server.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, ApiKey
from megatron_hybrid.server.log_format import LOG_FORMATS

MOST_WORKERS = 64
CORES_A_WORKER = 16  # one worker keeps up with a GPU's engine; more take load off large machines
POLICIES = ("longest_prefix", "first_prefix_block", "load_balanced")
MOST_REPLICAS = 1024
# The names in tool_calls/formats.py, which takes long to import.
TOOL_CALL_FORMATS = ("pythonic", "nemotron_json", "jamba", "xml", "hermes", "llama3_json")


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """What the operator decides about bodies. close_json_objects: an object of a JSON Schema has no
    properties but those that it names, unless it says otherwise. ignore_unknown_fields: they are
    dropped instead of refused."""

    close_json_objects: bool = True
    ignore_unknown_fields: bool = False


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end process needs to know."""

    tokenizer_folder: str
    model_name: str
    host: str = "127.0.0.1"
    port: int = 5000
    api_keys: tuple[ApiKey, ...] = ()
    cache_salt_per_key: bool = False
    report_cached_tokens: bool = True
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_queue: int = 1024
    request_timeout: float = 0.0  # seconds; 0: none
    http_workers: int = 1
    http_connections: int = 4096
    http_connections_per_address: int = 1024  # 0: any number
    trusted_proxies: tuple[str, ...] = ()
    log_format: str = LOG_FORMATS[0]
    access_log: bool = True
    engine_restart_timeout: float = 60.0  # seconds
    shutdown_timeout: float = 30.0  # seconds
    tool_call_parser: str = "auto"
    data_parallel_size: int = 1
    coordinator_policy: str = POLICIES[0]

    control_routes: bool = False
    close_json_objects: bool = True
    ignore_unknown_fields: bool = False

    @property
    def parsing(self) -> ParseOptions:
        """What concerns the reading of bodies."""
        return ParseOptions(self.close_json_objects, self.ignore_unknown_fields)

    @property
    def serves_control(self) -> bool:
        """Whether /pause, /resume and /update_weights are there: on request, or when nobody else
        can reach the server."""
        return self.control_routes or is_loopback(self.host)

    @property
    def connections_a_worker(self) -> int:
        """Requests that one worker may have open: its share, rounded up."""
        return -(-self.http_connections // self.http_workers)

    @property
    def connections_an_address(self) -> int:
        """Connections that one worker may have from an address: its share, rounded up; 0: any
        number."""
        return -(-self.http_connections_per_address // self.http_workers)


class FrontEndSettings(msgspec.Struct, frozen=True):
    """What a front end process is given on its standard input."""

    options: ServerOptions
    folder: str  # where the engines' sockets and the locks are
    digest: str  # of the settings and the files that a front end reads, to know an equal one by


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument(
        "--port", type=_whole(0, 65535), default=5000, help="port to listen on; 0 takes a free one"
    )
    _add_access_arguments(parser)
    group.add_argument(
        "--max-queue",
        type=_whole(1, 1_000_000),
        default=1024,
        help="requests that may wait for their first token before new ones get 429",
    )
    group.add_argument(
        "--http-workers",
        type=_whole(1, MOST_WORKERS),
        default=default_workers(),
        help="processes that answer HTTP requests and share the port",
    )
    group.add_argument(
        "--http-connections",
        type=_whole(1, 1_000_000),
        default=4096,
        help="requests that may be open at the same time, running or waiting; more get 429",
    )
    group.add_argument(
        "--http-connections-per-address",
        type=_whole(0, 1_000_000),
        default=1024,
        help="connections that may be open from one address, or IPv6 network of 64 bits; more get "
        "429. 0: any number; this machine and --trusted-proxies are not counted",
    )
    group.add_argument(
        "--trusted-proxies",
        type=_network,
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="addresses or networks (10.0.0.0/8) of proxies that clients come through: their "
        "connections are not counted, and X-Forwarded-For says who the client is, for the log",
    )
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=LOG_FORMATS[0],
        help="of what the server logs: text, or one JSON object a line",
    )
    group.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="log no line for every request that has ended",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("auto", *TOOL_CALL_FORMATS),
        default="auto",
        help="how the model writes tool calls; auto: as its chat template shows",
    )
    group.add_argument(
        "--close-json-objects",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="an object with `properties` in a JSON schema has no others, unless the schema says "
        "so with additionalProperties; the standard's letter allows any, and small models then "
        "never end",
    )
    group.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="drop fields of requests that are not known here instead of refusing them by name; "
        "those that are known and not supported are refused all the same",
    )
    group.add_argument(
        "--request-timeout",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="when a request that is not done is given up with status 504; 0: never. A request "
        "can ask for less with its field `timeout`",
    )
    group.add_argument(
        "--engine-restart-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long the front end answers 503 and waits for a restarted engine after the "
        "engine process has died; then it ends too",
    )
    group.add_argument(
        "--inference-rank-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="when a rank that says nothing, or that holds up the others, ends all ranks that run "
        "in step with it, for torchrun to start them again; compiling a kernel for the first time "
        "must fit in; 0: never",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long requests that are open may go on after SIGTERM or SIGINT; a second signal "
        "ends them at once",
    )
    group.add_argument(
        "--enable-control-routes",
        action="store_true",
        help="serve POST /pause, /resume and /update_weights, which stop the server for everybody "
        "and read weights from any folder of this machine, to whoever holds the key. Left out: "
        "only where --host is a loopback address",
    )
    group.add_argument(
        "--served-model-name", default=None, help="name on the wire; the folder's name if left out"
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        default="{}",
        help="publish what the prefix cache holds, for routers outside, as vLLM does and with its "
        'names: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5657", "topic": ""}; see docs/routing.md',
    )


def _add_access_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may come in")
    for flag, variable, purpose in (
        ("--api-key", API_KEY_VARIABLE, "bearer key that clients must send, one of them"),
        (
            "--admin-api-key",
            ADMIN_KEY_VARIABLE,
            "key that is good for every route, and the only kind for /pause, /resume, "
            "/update_weights and /reset_prefix_cache",
        ),
    ):
        group.add_argument(
            flag,
            action="append",
            metavar="KEY",
            help=f"{purpose}; give it again for more. Without keys of flag or file, {variable} "
            "has them, between spaces",
        )
        group.add_argument(
            f"{flag}-file",
            metavar="FILE",
            help="one such key a line, with its name for the log before it and a space between",
        )
    group.add_argument(
        "--cache-salt-per-key",
        action="store_true",
        help="share cached prefixes, and remembered answers, only between requests with the same "
        "key; a request's own cache_salt divides them further",
    )
    group.add_argument(
        "--report-cached-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="say in `usage` how much of a prompt was cached, from which others' prompts can be "
        "guessed where prefixes are shared",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        action="extend",
        default=[],
        metavar="ORIGIN",
        help="web pages that may use the server besides its own, such as https://chat.example; "
        "* is all",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names in the Host header that are answered, besides localhost; without it, a server "
        "on a loopback address answers to no other, and one that others can reach to any",
    )
    group.add_argument(
        "--ssl-certfile", metavar="PEM", help="speak TLS, with this certificate (chain)"
    )
    group.add_argument(
        "--ssl-keyfile", metavar="PEM", help="the certificate's key, unless its file holds it too"
    )


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of several replicas behind one address; the first two are called as vLLM's."""
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--data-parallel-size",
        type=_whole(1, MOST_REPLICAS),
        default=None,
        help="replicas of the model behind this address, in all launches together; left out: as "
        "many as this launch has",
    )
    group.add_argument(
        "--data-parallel-rank",
        type=_whole(0, MOST_REPLICAS - 1),
        default=0,
        help="number of this launch's first replica, where each replica is launched by itself",
    )
    group.add_argument(
        "--inference-dynamic-batching-prefix-caching-coordinator-policy",
        dest="coordinator_policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="which replica takes a request. longest_prefix: the one that would have computed it "
        "first, for what it has cached and what it has to do; first_prefix_block: always the same "
        "one for prompts that begin with the same block; load_balanced: the one with the least to "
        "do (default: %(default)s)",
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


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a server on this address, by its looks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_workers() -> int:
    """One on small machines, up to four on those with many cores."""
    return max(1, min(4, (os.cpu_count() or 1) // CORES_A_WORKER))


def _network(text: str) -> str:
    try:
        return str(parse_network(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not an address, nor a network such as 10.0.0.0/8"
        ) from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 86400.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 to 86400")
    return value


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
