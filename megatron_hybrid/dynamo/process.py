"""The engine of a worker: a process of its own, or one a rank, as `serve` has them without its
front end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import zmq

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.kv_events import KVEventsConfig
from megatron_hybrid.rank_layout import is_started_as_rank
from megatron_hybrid.server.cli import (
    broadcast_in,
    build,
    import_engine,
    launch_layout,
    serve_other_rank,
)
from megatron_hybrid.server.link.messages import CacheSizes
from megatron_hybrid.server.link.parent import end_with_parent
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.link.sockets import bind_socket
from megatron_hybrid.server.log_format import LOG_FORMATS, set_up_logging
from megatron_hybrid.server.loop.cache_publishing import publishing
from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.server.loop.waker import Waker
from megatron_hybrid.server.processes.launch import python_path
from megatron_hybrid.server.processes.ranks import SAID_WHY, check_devices, run_ranks
from megatron_hybrid.watchdog import Watchdog

MODULE = "megatron_hybrid.dynamo.process"
SETTINGS = "settings.json"
END_SECONDS = 30.0  # then its ranks hang

MOST_WAITING = 1_000_000  # Dynamo's --engine-request-limit bounds requests
REPLICA = 0  # there is one: of sockets' names


class EngineSettings(msgspec.Struct, frozen=True):
    """What an engine process is given, in its folder. worker: the process that it ends with."""

    config: EngineConfig
    rank_timeout: float
    worker: int


class EngineProcess:
    """Starts the engine of this process, and ends it."""

    def __init__(self, config: EngineConfig, rank_timeout: float) -> None:
        self._folder = RunFolder.for_address("", 0)  # of its own, with a new name
        self.endpoint = self._folder.engine_endpoint(REPLICA)
        self.kv_events_endpoint = self._folder.kv_events_endpoint(REPLICA)
        settings = EngineSettings(config, rank_timeout, os.getpid())
        path = self._folder.path / SETTINGS
        path.write_bytes(msgspec.json.encode(settings))
        # In a session of its own: Ctrl-C is for the worker, which lets requests end first.
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._folder.path)],
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        return self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it now, whatever it does. Twice is once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.remove()


def main(folder: str) -> int:
    """The engine process with this folder; its exit code."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as in the server's command
    set_up_logging(LOG_FORMATS[0], "engine", "%(asctime)s %(name)s: ", logging.WARNING)
    logging.getLogger("megatron_hybrid").setLevel(logging.INFO)
    settings = msgspec.json.decode(Path(folder, SETTINGS).read_bytes(), type=EngineSettings)
    config = settings.config
    try:
        layout = launch_layout(config, {}, {})
        if is_started_as_rank():
            end_with_parent()
        else:
            end_with_parent(settings.worker, RunFolder(Path(folder)).remove)
            if layout.world_size > 1:
                check_devices(layout.world_size, config.device)
                return run_ranks(layout.world_size, config.device, ("-m", MODULE, folder))
        with Watchdog(layout, settings.rank_timeout) as watchdog:
            if layout.is_first_of_replica:
                exit_code = _run_first_rank(config, RunFolder(Path(folder)), watchdog)
            else:
                exit_code = serve_other_rank(config, MOST_WAITING, watchdog)
            if exit_code != 0:
                watchdog.fail()  # the other ranks wait for this one
            return exit_code
    except (ConfigurationError, WeightsError) as error:
        print(error, file=sys.stderr)
        return SAID_WHY


def _run_first_rank(config: EngineConfig, folder: RunFolder, watchdog: Watchdog) -> int:
    start = import_engine()
    watchdog.start()
    engine, parallel = build(config, start)
    geometry = engine.cache_geometry
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_socket(context, folder.engine_endpoint(REPLICA))
    events = KVEventsConfig(
        enable_kv_cache_events=config.inference_dynamic_batching_prefix_caching,
        endpoint=folder.kv_events_endpoint(REPLICA),
    )
    with publishing(engine, events, folder, REPLICA, num_replicas=1) as publish:
        loop = EngineLoop(
            engine,
            socket,
            broadcast=broadcast_in(parallel),
            max_queue=MOST_WAITING,
            cache=CacheSizes(
                geometry.block_size, geometry.smallest_reusable_prefix, geometry.stored_as
            ),
            handover_address=engine.context.transfers.handover_address,
            publish_cache=publish,
            waker=Waker.of(context, parallel),
            on_turn=watchdog.turn,
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The worker's, when it has no more requests, or that of the ranks' launcher.
        signal.signal(
            signal.SIGTERM, lambda signum, frame: watchdog.when_all_live(loop.request_stop)
        )
        exit_code = loop.run()
    socket.close()
    context.destroy()
    if exit_code != 0:
        watchdog.failure = loop.failure
        return exit_code
    watchdog.leave()
    parallel.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
