"""The front end: gunicorn's master process, whose workers do HTTP, JSON and tokenizing.

The first engine process starts it, but it outlives that process: it tells its clients that the
engine died, and waits for a restarted one. Its standard input holds its settings. With several
replicas it has a process beside it that places requests.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.http.preparation import Preparation
from megatron_hybrid.server.http.preparers import PREPARERS, PreparingProcess
from megatron_hybrid.server.link.answer_memory import ENDPOINT_NAME, AnswerMemoryClient
from megatron_hybrid.server.link.parent import start_process
from megatron_hybrid.server.link.response_memory import RESPONSES, ResponseMemoryClient
from megatron_hybrid.server.link.run_folder import LOCK_SECONDS, LockOwner, RunFolder
from megatron_hybrid.server.log_format import ACCESS_LOG, set_up_logging
from megatron_hybrid.server.options import FrontEndSettings
from megatron_hybrid.server.processes import trace_exporter
from megatron_hybrid.text.tokenizer import Tokenizer

NO_RESTART_SECONDS = 5.0  # with port 0, where no engine could find us: to tell clients
FIRST_CONTACT_SECONDS = 0.5
WATCH_SECONDS = 0.1
WORKER_SECONDS = 120  # a worker that says nothing for that long is replaced
BACKLOG = 2048
COORDINATOR_COMMAND = ("-m", "megatron_hybrid.server.replicas.coordinator")  # for the interpreter
RESTART_SECONDS = 0.5  # a process that fails at once shall not keep a core busy
END_SECONDS = 3.0

logger = logging.getLogger(__name__)


def main() -> int:
    """Run a front end with the settings on standard input; the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontEndSettings)
    options = settings.options
    set_up_logging(options.log_format, "front end", "%(asctime)s front end: ", logging.INFO)
    logging.getLogger(ACCESS_LOG).disabled = not options.access_log
    try:
        run(settings)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(settings: FrontEndSettings) -> None:
    """Serve until SIGTERM comes, or the engine is gone and none follows."""
    folder = RunFolder(Path(settings.folder))
    if not folder.front_end_lock.acquire(LOCK_SECONDS):
        raise ConfigurationError(f"Another front end holds {folder.path}.")
    process = os.getpid()
    folder.front_end_lock.write(LockOwner(process))  # no digest: it is not up yet
    options = settings.options
    listener = listen(options.host, options.port)
    _raise_file_limit()
    # Once, for all workers: it is shared memory after the fork, and says now what is wrong with it.
    tokenizer = Tokenizer.load(options.tokenizer_folder, options.chat_template)
    folder.front_end_lock.write(LockOwner(process, settings.digest))
    threading.Thread(
        target=_end_without_engine,
        args=(folder, options.engine_restart_timeout if options.port else NO_RESTART_SECONDS),
        name="engine-watch",
        daemon=True,
    ).start()
    master = _make_master(settings, listener, tokenizer)
    memory, responses = folder.endpoint(ENDPOINT_NAME), folder.endpoint(RESPONSES)
    preparing = PreparingProcess(
        folder.endpoint(PREPARERS),
        Preparation(
            tokenizer,
            options,
            lambda: AnswerMemoryClient(memory),
            (lambda: ResponseMemoryClient(responses)) if options.stores_responses else None,
        ),
    )
    beside = []
    if options.data_parallel_size > 1:
        beside.append(_keep("coordinator", COORDINATOR_COMMAND, settings))
    if options.otlp_traces_endpoint is not None:
        beside.append(_keep("exporter of traces", trace_exporter.COMMAND, settings))
    try:
        master.run()
    finally:
        if os.getpid() == process:  # a worker that ends comes by here, too
            preparing.end()
            for end in beside:
                end()
            if not folder.living_engines():  # else the last engine process removes it
                folder.remove()


def _keep(name: str, command: tuple[str, ...], settings: FrontEndSettings) -> Callable[[], None]:
    """Run a process beside this one until what this gives is called: a coordinator, without which
    workers place requests by themselves, or an exporter, without which traces are dropped."""
    command, said = (*command, str(os.getpid())), msgspec.json.encode(settings)
    # Not in the thread: a worker that is forked meanwhile would hold a pipe that this waits for.
    process = start_process(command, said)
    ending = threading.Event()

    def keep() -> None:
        nonlocal process
        while not ending.wait(RESTART_SECONDS):
            if process.poll() is not None:
                logger.warning("The %s has ended, and is started again.", name)
                process = start_process(command, said)
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()

    thread = threading.Thread(target=keep, name=name, daemon=True)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()

    return end


def _make_master(settings: FrontEndSettings, listener: socket.socket, tokenizer: Tokenizer) -> Any:
    from gunicorn.app.base import BaseApplication

    from megatron_hybrid.server.processes.worker import KEEP_ALIVE_SECONDS, ServerLog

    options = settings.options
    address, port = listener.getsockname()[:2]
    url = f"{'https' if options.ssl_certfile else 'http'}://{_in_url(options.host)}:{port}"
    descriptor = listener.detach()  # gunicorn makes a socket of its own from it

    class Master(BaseApplication):
        server_options = options

        def load_config(self) -> None:
            for name, value in {
                "bind": f"fd://{descriptor}",
                "workers": options.http_workers,
                "worker_class": "megatron_hybrid.server.processes.worker.FrontEndWorker",
                "keepalive": int(KEEP_ALIVE_SECONDS),
                "backlog": BACKLOG,
                "timeout": WORKER_SECONDS,
                # The engine process ends what is left by then; this is for when it cannot.
                "graceful_timeout": int(options.shutdown_timeout) + 3,
                # Nobody's headers (SCRIPT_NAME) may change what our paths are, not even those of a
                # client on this machine.
                "forwarded_allow_ips": "",
                "loglevel": "error",
                "logger_class": ServerLog,
                "proc_name": "megatron-hybrid",
                "control_socket_disable": True,
                "worker_tmp_dir": settings.folder,
                "certfile": options.ssl_certfile,
                "keyfile": options.ssl_keyfile,
            }.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            return _make_app(settings, tokenizer, url, address)

    return Master()


def _make_app(settings: FrontEndSettings, tokenizer: Tokenizer, url: str, address: str) -> Any:
    """One worker's application. Imported here: what it uses must be gevent's by now."""
    from megatron_hybrid.server.http.app import create_app
    from megatron_hybrid.server.http.preparers import Preparers, most_preparers
    from megatron_hybrid.server.http.serving import Serving
    from megatron_hybrid.server.link.traces import TRACES, TraceSender
    from megatron_hybrid.server.replicas.coordinator_client import COORDINATOR, CoordinatorClient
    from megatron_hybrid.server.replicas.replica_set import ReplicaSet

    folder = RunFolder(Path(settings.folder))
    endpoints = list(map(folder.engine_endpoint, range(settings.options.data_parallel_size)))
    coordinator = None
    if len(endpoints) > 1:
        coordinator = CoordinatorClient(folder.endpoint(COORDINATOR))
    client = ReplicaSet(endpoints, coordinator)
    answers = AnswerMemoryClient(folder.endpoint(ENDPOINT_NAME))
    responses = None
    if settings.options.stores_responses:
        responses = ResponseMemoryClient(folder.endpoint(RESPONSES))
    preparers = Preparers(folder.endpoint(PREPARERS), most_preparers(settings.options.http_workers))
    send_trace = None
    if settings.options.otlp_traces_endpoint is not None:
        send_trace = TraceSender(folder.endpoint(TRACES)).send
    serving = Serving(client, tokenizer, settings.options, answers, preparers, responses)
    app = create_app(serving, address, send_trace)
    client.join(url)
    # With an engine that serves, as for a worker that replaces another one, no client shall hear
    # that there is none yet.
    client.wait_until_ready(FIRST_CONTACT_SECONDS)
    return app


def _end_without_engine(folder: RunFolder, restart_seconds: float) -> None:
    """End this process when every engine process has been gone for that long; at once if none ever
    served, since then nobody was served by us either."""
    has_served = False
    last_seen = time.monotonic()
    while True:
        for lock in folder.engine_locks().values():
            last = lock.last_owner()
            has_served = has_served or (last is not None and last.ready)
        if folder.living_engines():
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > (restart_seconds if has_served else WATCH_SECONDS):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(WATCH_SECONDS)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigurationError if that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"The server cannot listen on {host}:{port} (--host, --port): {error.strerror}."
        ) from error
    return listener


def _raise_file_limit() -> None:
    """A connection is a file; many systems start processes with a limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _in_url(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())
