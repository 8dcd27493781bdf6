"""The server's own settings: where it listens, who may ask, and how many may wait."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

import msgspec

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.addresses import parse_network
from megatron_hybrid.server.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, ApiKey
from megatron_hybrid.server.log_format import LOG_FORMATS
from megatron_hybrid.settings import Settings, flag_of, option

MOST_WORKERS = 64
CORES_A_WORKER = 16  # one worker keeps up with a GPU's engine; more take load off large machines
POLICIES = ("longest_prefix", "first_prefix_block", "bounded_rendezvous", "load_balanced")
MOST_REPLICAS = 1024
MOST_SECONDS = 86400
MOST_OPEN = 1_000_000  # requests and connections
MOST_STORED_GB, MOST_STORED_HOURS = 1024, 24 * 366
# The names in tool_calls/formats.py, which takes long to import.
TOOL_CALL_FORMATS = ("pythonic", "nemotron_json", "jamba", "xml", "hermes", "llama3_json")
OTLP_PROTOCOLS = ("grpc", "http/protobuf")  # the first one unless a variable names another
REASONING_FORMATS = ("granite", "qwen3", "deepseek_r1")  # those in text/reasoning.py
ACCESS, REPLICAS, QUESTION = "who may come in", "replicas", "a first question"  # groups in --help

# By the names of requests' fields, what those that leave one open get.
SamplingDefaults = tuple[tuple[str, int | float], ...]


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches a server on this address, by its looks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_workers() -> int:
    """One on small machines, up to four on those with many cores."""
    return max(1, min(4, (os.cpu_count() or 1) // CORES_A_WORKER))


@dataclass(frozen=True, kw_only=True)
class ParseOptions(Settings):
    """What the operator decides about bodies."""

    # What --generation-config comes to, and no option itself.
    sampling_defaults: SamplingDefaults = ()

    close_json_objects: bool = option(
        True,
        "an object with `properties` in a JSON schema has no others, unless the schema says so "
        "with additionalProperties; the standard's letter allows any, and small models then never "
        "end",
    )
    ignore_unknown_fields: bool = option(
        False,
        "drop fields of requests that are not known here instead of refusing them by name; those "
        "that are known and not supported are refused all the same",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ParseOptions):
    """What the front end process needs to know. Replicas that share it have the same."""

    # What other settings come to, and no options themselves.
    tokenizer_folder: str
    model_name: str
    other_names: tuple[str, ...] = ()  # that the model is served under as well
    api_keys: tuple[ApiKey, ...] = ()
    returns_routed_experts: bool = False  # whether the engine keeps which experts tokens had

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(5000, "port to listen on; 0 takes a free one", most=65535)
    root_path: str = option(
        "",
        "path under which a proxy shows this server, such as /llm; requests come with it or "
        "without",
        metavar="PATH",
    )
    max_queue: int = option(
        1024,
        "requests that may wait for their first token before new ones get 429",
        least=1,
        most=MOST_OPEN,
    )
    http_workers: int = option(
        default_workers,
        "processes that answer HTTP requests and share the port",
        least=1,
        most=MOST_WORKERS,
        shown=str(default_workers()),
    )
    http_connections: int = option(
        4096,
        "requests that may be open at the same time, running or waiting; more get 429",
        least=1,
        most=MOST_OPEN,
    )
    http_connections_per_address: int = option(
        1024,
        "connections that may be open from one address, or IPv6 network of 64 bits; more get 429. "
        "0: any number; this machine and --trusted-proxies are not counted",
        least_means="any number",
        most=MOST_OPEN,
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        "addresses or networks (10.0.0.0/8) of proxies that clients come through: their "
        "connections are not counted, and X-Forwarded-For says who the client is, for the log",
        metavar="ADDRESS",
    )
    log_format: str = option(
        LOG_FORMATS[0], "of what the server logs: text, or one JSON object a line", LOG_FORMATS
    )
    access_log: bool = option(True, "log a line for every request that has ended")
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector that traces of requests are sent to, such as "
        "http://localhost:4317; needs the extra `otel`",
        metavar="URL",
    )
    otlp_traces_protocol: str | None = option(
        None,
        "how they are sent; left out: as the variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says, or "
        + OTLP_PROTOCOLS[0],
        OTLP_PROTOCOLS,
    )
    chat_template: str | None = option(
        None,
        "file with the chat template (Jinja); left out: the one in the tokenizer's folder",
        metavar="FILE",
        is_file=True,
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows",
        ("auto", *TOOL_CALL_FORMATS),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks what it thinks before it answers; auto: as its chat template shows; "
        "none: thoughts stay in the answer's text",
        ("auto", "none", *REASONING_FORMATS),
    )
    responses_store_gb: float = option(
        0.25,
        "memory for responses of /v1/responses that are stored, to be read or gone on with; the "
        "least recently used go first. 0: none is stored",
        least_means="none is stored",
        most=MOST_STORED_GB,
    )
    responses_store_hours: float = option(
        24.0,
        "how long a stored response is kept after it was last asked for",
        most=MOST_STORED_HOURS,
    )
    request_timeout: float = option(
        0.0,
        "when a request that is not done is given up with status 504; 0: never. A request can ask "
        "for less with its field `timeout`",
        least_means="never",
        most=MOST_SECONDS,
        metavar="SECONDS",
    )
    engine_restart_timeout: float = option(
        60.0,
        "how long the front end answers 503 and waits for a restarted engine after the engine "
        "process has died; then it ends too",
        most=MOST_SECONDS,
        metavar="SECONDS",
    )
    shutdown_timeout: float = option(
        30.0,
        "how long requests that are open may go on after SIGTERM or SIGINT; a second signal ends "
        "them at once",
        most=MOST_SECONDS,
        metavar="SECONDS",
    )
    enable_control_routes: bool = option(
        False,
        "serve the routes by which a trainer stops the server and brings new weights (/pause, "
        "/update_weights, ...: docs/rl.md) to whoever holds the key. Left out: only where --host "
        "is a loopback address",
        shown="",
    )
    weight_folders: tuple[str, ...] = option(
        (),
        "folders below which the control routes may read weights and adapters; the model's own is "
        "one in any case",
        metavar="DIR",
    )

    cache_salt_per_key: bool = option(
        False,
        "share cached prefixes, and remembered answers, only between requests with the same key; "
        "a request's own cache_salt divides them further",
        group=ACCESS,
    )
    report_cached_tokens: bool = option(
        True,
        "say in `usage` how much of a prompt was cached, from which others' prompts can be guessed "
        "where prefixes are shared",
        group=ACCESS,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "web pages that may use the server besides its own, such as https://chat.example; * is all",
        group=ACCESS,
        metavar="ORIGIN",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names in the Host header that are answered, besides localhost; without it, a server on a "
        "loopback address answers to no other, and one that others can reach to any",
        group=ACCESS,
        metavar="NAME",
    )
    ssl_certfile: str | None = option(
        None,
        "speak TLS, with this certificate (chain)",
        group=ACCESS,
        metavar="PEM",
        is_file=True,
    )
    ssl_keyfile: str | None = option(
        None,
        "the certificate's key, unless its file holds it too",
        group=ACCESS,
        metavar="PEM",
        is_file=True,
    )

    data_parallel_size: int = option(
        1,
        "replicas of the model behind this address, all of which are started unless "
        "--data-parallel-rank says that each is launched by itself; left out: as many as there are",
        least=1,
        most=MOST_REPLICAS,
        group=REPLICAS,
        shown="",
    )
    inference_dynamic_batching_prefix_caching_coordinator_policy: str = option(
        POLICIES[0],
        "which replica takes a request. longest_prefix: the one that would have computed it first, "
        "for what it has cached and what it has to do; first_prefix_block: always the same one for "
        "prompts that begin with the same block; bounded_rendezvous: the same, unless it has much "
        "more than its share to do; load_balanced: the one with the least to do",
        POLICIES,
        group=REPLICAS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        root = self.root_path
        if root and (not re.fullmatch(r"(/[\w.~-]+)+", root, re.ASCII)):
            raise ConfigurationError(
                f"{flag_of('root_path')} is {root!r}; it must be a path such as /llm, without a "
                "slash at its end."
            )
        for text in self.trusted_proxies:
            try:
                parse_network(text)
            except ValueError:
                raise ConfigurationError(
                    f"{flag_of('trusted_proxies')}: {text} is not an address, nor a network such "
                    "as 10.0.0.0/8."
                ) from None

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that requests may ask for."""
        return (self.model_name, *self.other_names)

    @property
    def serves_control(self) -> bool:
        """Whether /pause, /resume and /update_weights are there: on request, or when nobody else
        can reach the server."""
        return self.enable_control_routes or is_loopback(self.host)

    @property
    def stores_responses(self) -> bool:
        """Whether responses can be stored."""
        return self.responses_store_gb > 0 and self.responses_store_hours > 0

    @property
    def connections_a_worker(self) -> int:
        """Requests that one worker may have open: its share, rounded up."""
        return -(-self.http_connections // self.http_workers)

    @property
    def connections_an_address(self) -> int:
        """Connections that one worker may have from an address: its share, rounded up; 0: any
        number."""
        return -(-self.http_connections_per_address // self.http_workers)


_KEYS_HELP = "give it again for more. Without keys of flag or file, {} has them, between spaces"
_KEY_FILE_HELP = "one such key a line, with its name for the log before it and a space between"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Settings):
    """Which model is served, as what, and how; besides EngineConfig."""

    served_model_name: tuple[str, ...] = option(
        (),
        "names on the wire; answers carry the first one. Left out: the folder's name, or the "
        "model's on the Hugging Face hub",
        metavar="NAME",
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a model on the Hugging Face hub; left out: main",
        metavar="REVISION",
    )
    generation_config: str = option(
        "auto",
        "sampling of requests that leave it open. auto: as the model's generation_config.json "
        "says; none, or vllm: as OpenAI has it. The file's end tokens hold in any case",
        ("auto", "vllm", "none"),
    )
    inference_rank_timeout: float = option(
        300.0,
        "when a rank that says nothing, or that holds up the others, ends all ranks that run in "
        "step with it, for torchrun to start them again; compiling a kernel for the first time "
        "must fit in; 0: never",
        least_means="never",
        most=MOST_SECONDS,
        metavar="SECONDS",
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(ModelOptions):
    """What only engine processes need to know."""

    kv_events_config: str = option(
        "{}",
        "publish what the prefix cache holds, for routers outside, as vLLM does and with its "
        'names: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5657", "topic": ""}; see docs/routing.md',
        metavar="JSON",
    )

    api_key: tuple[str, ...] | None = option(
        None,
        "bearer key that clients must send, one of them; " + _KEYS_HELP.format(API_KEY_VARIABLE),
        group=ACCESS,
        metavar="KEY",
        is_secret=True,
    )
    api_key_file: str | None = option(
        None, _KEY_FILE_HELP, group=ACCESS, metavar="FILE", is_file=True
    )
    admin_api_key: tuple[str, ...] | None = option(
        None,
        "key that is good for every route, and the only kind for /pause, /resume, /update_weights "
        "and /reset_prefix_cache; " + _KEYS_HELP.format(ADMIN_KEY_VARIABLE),
        group=ACCESS,
        metavar="KEY",
        is_secret=True,
    )
    admin_api_key_file: str | None = option(
        None, _KEY_FILE_HELP, group=ACCESS, metavar="FILE", is_file=True
    )

    data_parallel_rank: int = option(
        0,
        "number of this launch's first replica, where each replica is launched by itself",
        most=MOST_REPLICAS - 1,
        group=REPLICAS,
    )

    ask: str | None = option(
        None,
        "once the server is up, send this question over HTTP, twice",
        group=QUESTION,
        metavar="TEXT",
    )
    system: str | None = option(
        None, "system message that goes with --ask", group=QUESTION, metavar="TEXT"
    )
    exit_after_answer: bool = option(
        False, "end the server after --ask is answered", group=QUESTION
    )


class FrontEndSettings(msgspec.Struct, frozen=True):
    """What a front end process is given on its standard input."""

    options: ServerOptions
    folder: str  # where the engines' sockets and the locks are
    digest: str  # of the settings and the files that a front end reads, to know an equal one by
