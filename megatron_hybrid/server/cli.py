"""`megatron-hybrid serve`: one engine process a rank, and a front end beside the first ones."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_hybrid.arguments import (
    ArgumentParser,
    add_arguments,
    add_engine_arguments,
    add_model_argument,
    values_from_args,
)
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.kv_events import KVEventsConfig
from megatron_hybrid.models.checkpoints import hub
from megatron_hybrid.models.checkpoints.folder import ModelFolder, check_model_files
from megatron_hybrid.rank_layout import RankLayout, is_started_as_rank
from megatron_hybrid.server import keys, tls
from megatron_hybrid.server.ask import FirstQuestion
from megatron_hybrid.server.http import browsers
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.link.parent import end_with_parent
from megatron_hybrid.server.log_format import LOG_FORMATS, set_up_logging
from megatron_hybrid.server.loop.cache_publishing import publishing
from megatron_hybrid.server.loop.engine_loop import Broadcast, EngineLoop
from megatron_hybrid.server.loop.lifecycle import (
    ENDING_SIGNALS,
    end_loading_on_signals,
    say_when_served,
    serve,
)
from megatron_hybrid.server.loop.waker import Waker
from megatron_hybrid.server.options import (
    LaunchOptions,
    ModelOptions,
    ServerOptions,
    is_loopback,
)
from megatron_hybrid.server.processes.launch import FrontEnd, FrontEndEnded
from megatron_hybrid.server.processes.ranks import check_devices, run_ranks
from megatron_hybrid.server.processes.trace_exporter import check_tracing
from megatron_hybrid.server.sampling_defaults import describe, read_sampling_defaults
from megatron_hybrid.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron_hybrid.engine.engine import DynamicInferenceEngine
    from megatron_hybrid.engine.start import StartTimes
    from megatron_hybrid.parallel import ParallelContext

REFERENCE_MODEL_NAME = "reference_model"

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=ModelOptions)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; the process's exit code."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing is compiled: see parallel/megatron
    given = list(sys.argv[1:] if argv is None else argv)
    args = argument_parser().parse_args(given)
    # Until the loop runs nothing needs care: a signal ends us at once, even while torch waits for
    # other ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getpid() == 1:  # of a container: the kernel passes on only what has a handler
        for signum in ENDING_SIGNALS:
            signal.signal(signum, lambda signum, frame: os._exit(128 + signum))
    try:
        engine, server, launched = values_from_args(
            args, EngineConfig, ServerOptions, LaunchOptions
        )
        log_format = server.get("log_format", LOG_FORMATS[0])
        set_up_logging(log_format, "engine", "%(asctime)s %(name)s: ", logging.WARNING)
        logging.getLogger("megatron_hybrid").setLevel(logging.INFO)
        config, launch = EngineConfig(**engine), launch_options(launched)
        layout = launch_layout(config, server, launched)
        if starts_ranks := layout.world_size > 1 and not is_started_as_rank():
            check_devices(layout.world_size, config.device)  # before anything is downloaded
        config, launch = with_model_files(config, launch)
        check_model_files(config)
        kv_events = KVEventsConfig.from_json(launch.kv_events_config)
        options = server_options(config, server, launch, layout)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        if starts_ranks:
            arguments = ("-m", "megatron_hybrid.cli", "serve", *given)
            return run_ranks(layout.world_size, config.device, arguments)
        if layout.is_first_of_replica and layout.replica == 0:
            for said in getattr(args, "aliases", ()):
                logger.info("%s", said)
            if options.sampling_defaults:
                logger.info("%s", describe(options.sampling_defaults))
        with Watchdog(layout, launch.inference_rank_timeout) as watchdog:
            if layout.is_first_of_replica:
                exit_code = _serve_first_rank(config, options, launch, kv_events, layout, watchdog)
            else:
                exit_code = serve_other_rank(config, options.max_queue, watchdog)
            if exit_code != 0:
                watchdog.fail()  # the other ranks wait for this one
            return exit_code
    except (ConfigurationError, WeightsError) as error:
        print(error, file=sys.stderr)
        return 2
    except FrontEndEnded as error:
        return error.exit_code or 1


def launch_layout(
    config: EngineConfig, server: Mapping[str, Any], launched: Mapping[str, Any]
) -> RankLayout:
    """As torchrun says; of a process that was started alone, the first place among all ranks that
    the model's sizes, and --data-parallel-size where no --data-parallel-rank says that each
    replica is launched by itself, ask for."""
    sizes = config.parallel_sizes
    if is_started_as_rank():
        return RankLayout.from_environment(sizes)
    replicas = server.get("data_parallel_size", 1)
    if "data_parallel_rank" in launched or not isinstance(replicas, int):
        replicas = 1
    return RankLayout(sizes, world_size=max(sizes.lockstep_group, sizes.replica * replicas))


def _serve_first_rank(
    config: EngineConfig,
    options: ServerOptions,
    launch: LaunchOptions,
    kv_events: KVEventsConfig,
    layout: RankLayout,
    watchdog: Watchdog,
) -> int:
    if layout.replica == 0:
        _warn(options)
    with FrontEnd(options, launch.data_parallel_rank + layout.replica) as front_end:
        end_loading_on_signals(front_end)
        start = import_engine()  # while the front end starts
        # What a user can get wrong about the server is found before the model is loaded.
        front_end.wait_until_listening()
        start.end_part("front end")
        watchdog.start()
        engine, parallel = build(config, start)
        geometry, question = engine.cache_geometry, None
        size = options.data_parallel_size
        with publishing(engine, kv_events, front_end.folder, front_end.replica, size) as publish:
            loop = EngineLoop(
                engine,
                front_end.socket,
                broadcast=broadcast_in(parallel),
                front_end_failure=front_end.failure,
                on_join=say_when_served(
                    options, front_end.replica, lambda url: _start(question, url)
                ),
                max_queue=options.max_queue,
                cache=CacheSizes(
                    geometry.block_size, geometry.smallest_reusable_prefix, geometry.stored_as
                ),
                handover_address=engine.context.transfers.handover_address,
                publish_cache=publish,
                waker=Waker.of(front_end.context, parallel),
                on_turn=watchdog.turn,
            )
            if launch.ask is not None and layout.replica == 0:
                question = FirstQuestion(launch, options, loop.request_stop)
            exit_code = serve(loop, front_end, options, when_all_live=watchdog.when_all_live)
        if exit_code != 0:
            watchdog.failure = loop.failure
            return exit_code
        watchdog.leave()
    parallel.destroy()
    return int(launch.exit_after_answer and question is not None and question.failed)


def serve_other_rank(config: EngineConfig, max_queue: int, watchdog: Watchdog) -> int:
    """Run one that is not its replica's first until that one ends it; the exit code."""
    watchdog.start()
    engine, parallel = build(config, import_engine())
    # A signal reaches every rank; the first one decides, and tells the others in a broadcast.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Waker.of(None, parallel)  # every rank hears of the first ones' addresses
    loop = EngineLoop(
        engine,
        None,
        broadcast=broadcast_in(parallel),
        max_queue=max_queue,
        on_turn=watchdog.turn,
    )
    exit_code = loop.run()
    watchdog.failure = loop.failure
    if exit_code == 0:
        watchdog.leave()
        parallel.destroy()
    return exit_code


def import_engine() -> StartTimes:
    """Torch alone takes seconds. The times of this process's start, with the imports' part."""
    from megatron_hybrid.engine.start import StartTimes

    start = StartTimes.of_process()
    import_module("megatron_hybrid.engine.build")
    start.end_part("imports")
    return start


def build(
    config: EngineConfig, start: StartTimes
) -> tuple[DynamicInferenceEngine, ParallelContext]:
    """One rank's engine, and the groups of ranks that it is in."""
    from megatron_hybrid.engine.build import build_engine
    from megatron_hybrid.engine.choices import resolve_device
    from megatron_hybrid.engine.garbage import collect_seldom
    from megatron_hybrid.parallel import initialize

    engine = build_engine(config, refuse_useless_budget=True, serves=True, start=start)
    collect_seldom()
    device = resolve_device(config)
    return engine, initialize(config.parallel_sizes, device=device)  # the groups that it joined


def broadcast_in(parallel: ParallelContext) -> Broadcast | None:
    """For EngineLoop, in a replica of several ranks."""
    return parallel.replica.broadcast_object if parallel.replica.size > 1 else None


def argument_parser() -> ArgumentParser:
    """Of this command."""
    parser = ArgumentParser(
        prog="megatron-hybrid serve",
        description="Serve a model over HTTP, in OpenAI's wire format.",
    )
    add_engine_arguments(parser)
    add_server_arguments(parser)
    return parser


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The server's flags, besides the engine's, and which model it serves."""
    add_model_argument(parser)
    add_arguments(parser, ServerOptions, "text server")
    add_arguments(parser, LaunchOptions, "text server")


def with_model_files(config: EngineConfig, launch: Model) -> tuple[EngineConfig, Model]:
    """A model that is named as on the Hugging Face hub: its files' folder, and what it is served
    as. ConfigurationError where it can't be had."""
    found = hub.with_files(config, launch.revision)
    if found is config or config.load is None:
        return config, launch
    names = launch.served_model_name or (config.load,)
    return found, launch.replace(served_model_name=names)


def server_options(
    config: EngineConfig, values: dict[str, Any], launch: LaunchOptions, layout: RankLayout
) -> ServerOptions:
    """The options that `values` set of a front end, with what follows from the launch.

    ConfigurationError when the replicas do not fit their number, or could not meet, and for what
    can't be of who may come in.
    """
    folder = ModelFolder.of(config)
    name = REFERENCE_MODEL_NAME if config.load is None else folder.path.resolve().name
    names = list(dict.fromkeys(launch.served_model_name or (name,)))
    end = launch.data_parallel_rank + layout.num_replicas
    options = ServerOptions(
        tokenizer_folder=str(folder.tokenizer),
        model_name=names[0],
        other_names=tuple(names[1:]),
        returns_routed_experts=config.enable_return_routed_experts,
        **{"data_parallel_size": end, **values},
    )
    size = options.data_parallel_size
    if end > size:
        raise ConfigurationError(
            f"This launch has {layout.num_replicas} replica(s), the first with number "
            f"{launch.data_parallel_rank} (--data-parallel-rank), but --data-parallel-size is "
            f"{size}."
        )
    if size > 1 and launch.exit_after_answer:
        raise ConfigurationError(
            f"--exit-after-answer ends one engine process, and there are {size} replicas."
        )
    if size > 1 and options.port == 0:
        raise ConfigurationError(
            f"--port is 0, but {size} replicas share one address: choose a port."
        )
    # Other ranks serve nobody, and may be on machines without these files.
    if not layout.is_first_of_replica:
        return options
    if launch.generation_config == "auto":
        options = options.replace(sampling_defaults=read_sampling_defaults(folder))
    return _with_access(options, launch)


def launch_options(values: dict[str, Any]) -> LaunchOptions:
    """The options that `values` set; a file may say what --kv-events-config does without quotes."""
    if isinstance(events := values.get("kv_events_config"), dict):
        values["kv_events_config"] = json.dumps(events)
    return LaunchOptions(**values)


def _with_access(options: ServerOptions, launch: LaunchOptions) -> ServerOptions:
    """With the keys, and who may come in as it is compared; ConfigurationError for what can't
    be."""
    tls.check_certificate(options.ssl_certfile, options.ssl_keyfile)
    check_tracing(options)
    api_keys = [
        *keys.read_keys(
            launch.api_key, launch.api_key_file, flag="--api-key", variable=keys.API_KEY_VARIABLE
        ),
        *keys.read_keys(
            launch.admin_api_key,
            launch.admin_api_key_file,
            flag="--admin-api-key",
            variable=keys.ADMIN_KEY_VARIABLE,
            admin=True,
        ),
    ]
    keys.check_distinct(api_keys)
    if options.cache_salt_per_key and not api_keys:
        raise ConfigurationError("--cache-salt-per-key needs keys (--api-key).")
    return options.replace(
        api_keys=tuple(api_keys),
        allowed_origins=browsers.parse_origins(options.allowed_origins),
        allowed_hosts=browsers.parse_hosts(options.allowed_hosts),
    )


def _warn(options: ServerOptions) -> None:
    if not options.api_keys and not is_loopback(options.host):
        logger.warning(
            "Others can reach this server (--host %s), and it wants no key of them (--api-key).",
            options.host,
        )
    if browsers.ANY_ORIGIN in options.allowed_origins and not options.api_keys:
        logger.warning(
            "Any web page that somebody here opens can use this server (--allowed-origins *), and "
            "it wants no key of them (--api-key)."
        )


def _start(question: FirstQuestion | None, url: str) -> None:
    if question is not None:
        threading.Thread(target=question.ask, args=(url,), name="question", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
