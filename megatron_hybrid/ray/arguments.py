"""The application's arguments: the flags of `serve`, and what Ray has to know."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_hybrid.arguments import (
    ArgumentParser,
    add_arguments,
    add_engine_arguments,
    values_from_args,
)
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.rank_layout import ParallelSizes, RankLayout
from megatron_hybrid.server.cli import (
    add_server_arguments,
    launch_options,
    server_options,
    with_model_files,
)
from megatron_hybrid.server.options import (
    MOST_REPLICAS,
    MOST_SECONDS,
    LaunchOptions,
    ServerOptions,
)
from megatron_hybrid.settings import Settings, flag_of, option

STRATEGIES = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")

# What Ray decides, or what would not be what it says with Ray in between.
_ELSEWHERE = {
    "host": "Ray Serve listens (http_options of its config)",
    "port": "Ray Serve listens (http_options of its config)",
    "root_path": "Ray Serve knows the path (route_prefix of the application)",
    "ssl_certfile": "Ray Serve listens, and speaks TLS by what is in front of it",
    "ssl_keyfile": "Ray Serve listens, and speaks TLS by what is in front of it",
    "trusted_proxies": "all requests come through Ray Serve's own proxy",
    "http_connections_per_address": "all requests come through Ray Serve's own proxy",
    "data_parallel_size": "Ray starts the replicas (replicas, max_replicas)",
    "data_parallel_rank": "Ray starts the replicas (replicas, max_replicas)",
    "inference_dynamic_batching_prefix_caching_coordinator_policy": "Ray's router is ours",
    "kv_events_config": "the request router has them already",
    "engine_restart_timeout": "Ray starts a new replica at once",
    "ask": "nobody would see the answer",
    "system": "nobody would see the answer",
    "exit_after_answer": "nobody would see the answer",
}


@dataclass(frozen=True, kw_only=True)
class RayOptions(Settings):
    """What Ray Serve has to know of the application."""

    replicas: int = option(
        1,
        "replicas of the model; with more max_replicas, the least number of them",
        least=1,
        most=MOST_REPLICAS,
    )
    max_replicas: int = option(
        0,
        "replicas that there may be when there is much to do; 0: always as many as replicas says",
        least_means="no autoscaling",
        most=MOST_REPLICAS,
    )
    target_requests: float = option(
        32.0,
        "requests that a replica is to have, running and waiting in its engine: more of them start "
        "another replica, fewer end one",
        least=0,
        most=1_000_000,
    )
    upscale_delay: float = option(
        30.0, "how long there must be too much to do before replicas start", most=MOST_SECONDS
    )
    downscale_delay: float = option(
        600.0, "how long there must be too little to do before replicas end", most=MOST_SECONDS
    )
    cpus: float = option(1.0, "CPU cores that Ray sets aside for each rank", most=1024)
    gpus: float | None = option(
        None,
        "GPUs that Ray sets aside for each rank; left out: 1, or none with device cpu",
        most=1,
    )
    placement_strategy: str = option(
        STRATEGIES[0],
        "where a replica's ranks are: STRICT_PACK: on one node; PACK: on few; SPREAD and "
        "STRICT_SPREAD: on many",
        STRATEGIES,
    )
    ingresses: int = option(
        1, "processes that take requests from Ray's proxies and place them", least=1, most=1024
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigurationError(
                f"{flag_of('max_replicas')} is {self.max_replicas}, and {flag_of('replicas')} "
                f"{self.replicas}; it must be at least that."
            )
        if self.target_requests <= 0:
            raise ConfigurationError(
                f"{flag_of('target_requests')} is {self.target_requests:g}; it must be more than 0."
            )


@dataclass(frozen=True)
class Application:
    """What is to be deployed. flags: of `serve`, on every rank."""

    flags: tuple[str, ...]
    ray: RayOptions
    sizes: ParallelSizes
    gpus: float
    open_requests: int
    shutdown_timeout: float
    controls: bool

    @property
    def ranks(self) -> int:
        """Processes of a replica."""
        return self.sizes.replica


class _Parser(ArgumentParser):
    """Raises ConfigurationError: it may run in a process of Ray's, which must not exit."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ConfigurationError((message or "").strip())


def _parser() -> ArgumentParser:
    parser = _Parser(prog="megatron_hybrid.ray:build", add_help=False)
    add_engine_arguments(parser)
    add_server_arguments(parser)
    add_arguments(parser, RayOptions, "Ray Serve")
    return parser


def as_flags(args: Mapping[str, Any]) -> list[str]:
    """Of names and values, as a YAML file or the command line of `serve run` gives them."""
    flags: list[str] = []
    for name, value in args.items():
        flag = "--" + str(name).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool) or (isinstance(value, str) and value in ("true", "false")):
            said = value if isinstance(value, bool) else value == "true"
            flags.append(flag if said else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            # Of keys each comes with a flag of its own.
            if name.replace("-", "_") in ("api_key", "admin_api_key"):
                flags += [f"{flag}={one}" for one in value]
            else:
                flags += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            raise ConfigurationError(f"{name} has names and values in it; it must be one value.")
        else:
            flags.append(f"{flag}={value}")
    return flags


def read(args: Mapping[str, Any]) -> Application:
    """What `build` is given. Raises ConfigurationError; looks at no file but that of `config`:
    the model need not be where this runs."""
    if "model" in args:  # as serve has it
        if "load" in args:
            raise ConfigurationError("Two models are named: by model, and by load; leave one out.")
        args = {("load" if name == "model" else name): value for name, value in args.items()}
    parsed = _parser().parse_args(as_flags(args))
    engine, server, launched = values_from_args(parsed, EngineConfig, ServerOptions, LaunchOptions)
    parsed.config = None  # its file is for the server, which knows nothing of Ray
    (of_ray,) = values_from_args(parsed, RayOptions)
    for name in (*server, *launched):
        if name in _ELSEWHERE:
            raise ConfigurationError(
                f"{flag_of(name)} can't be given in Ray Serve: {_ELSEWHERE[name]}."
            )
    config, options = EngineConfig(**engine), RayOptions(**of_ray)
    launch_options(dict(launched))
    checked = ServerOptions(tokenizer_folder="", model_name="", **server)
    sizes = config.parallel_sizes
    if sizes.replicas_in_lockstep > 1:
        raise ConfigurationError(
            f"Experts are split over {sizes.expert_group} ranks (--expert-model-parallel-size, "
            f"--expert-tensor-parallel-size) and other layers over {sizes.tensor} "
            "(--tensor-model-parallel-size): several replicas would share them, and Ray starts and "
            "ends each one by itself. Make both the same."
        )
    gpus = options.gpus
    if gpus is None:
        gpus = 0.0 if config.device == "cpu" else 1.0
    ours = {one.replace("_", "-") for one in RayOptions.__dataclass_fields__}
    kept = {name: value for name, value in args.items() if str(name).replace("_", "-") not in ours}
    return Application(
        flags=tuple(as_flags(kept)),
        ray=options,
        sizes=sizes,
        gpus=gpus,
        open_requests=checked.http_connections,
        shutdown_timeout=checked.shutdown_timeout,
        controls=checked.enable_control_routes,
    )


def options_of_server(flags: Sequence[str]) -> ServerOptions:
    """What a server with these flags goes by, where its model's files are. ConfigurationError for
    what can't be."""
    parsed: argparse.Namespace = _parser().parse_args(list(flags))
    engine, server, launched = values_from_args(parsed, EngineConfig, ServerOptions, LaunchOptions)
    config, launch = with_model_files(EngineConfig(**engine), launch_options(launched))
    sizes = config.parallel_sizes
    layout = RankLayout(sizes, world_size=sizes.replica)
    return server_options(config, server, launch, layout)
