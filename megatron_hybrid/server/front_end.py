"""The front end process: HTTP, JSON and tokenizing, so that none of it holds up a step.

The engine process starts it and holds the other end of its standard input. The first line there
is its settings; end of file means that the engine process is gone, however it went.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
from types import FrameType

import msgspec
import waitress
import waitress.server

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.app import MAX_BODY_BYTES, create_app
from megatron_hybrid.server.engine_client import EngineClient
from megatron_hybrid.server.options import FrontEndSettings
from megatron_hybrid.server.serving import Serving
from megatron_hybrid.tokenizer import Tokenizer

GRACE_SECONDS = 5.0  # how long clients are told that the engine died, before the port closes
FAREWELL_SECONDS = 0.3  # for answers that say so to go out
READ_TIMEOUT_SECONDS = 3600  # a streamed answer may pause for long


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front end: %(message)s")
    logging.getLogger("waitress").setLevel(logging.ERROR)  # not each client that hangs up
    # Ctrl-C reaches the whole terminal group; the engine process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontEndSettings)
    try:
        run(settings)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(settings: FrontEndSettings) -> None:
    """Serve until the engine process ends or SIGTERM comes."""
    options = settings.options
    listener = listen(options.host, options.port)
    _raise_file_limit()
    tokenizer = Tokenizer.load(options.tokenizer_folder)
    url = f"http://{_in_url(options.host)}:{listener.getsockname()[1]}"
    client = EngineClient(settings.endpoint)
    client.on_ready = lambda: print(f"serving {options.model_name} on {url}", flush=True)
    server = waitress.server.create_server(
        create_app(Serving(client, tokenizer, options)),
        sockets=[listener],
        threads=options.http_threads,
        connection_limit=_file_limit() - 64,
        channel_timeout=READ_TIMEOUT_SECONDS,
        channel_request_lookahead=1,  # notices a client that hangs up during its request
        max_request_body_size=2 * MAX_BODY_BYTES,  # Flask refuses it earlier, in JSON
        asyncore_use_poll=True,  # select() ends at 1024 connections
        ident="megatron_hybrid",
        clear_untrusted_proxy_headers=True,
    )
    ending = _Ending(client, settings.socket_folder)
    signal.signal(signal.SIGTERM, ending.on_terminate)
    threading.Thread(target=ending.watch_engine_process, name="lifeline", daemon=True).start()
    client.join(url)
    server.run()


class _Ending:
    """The ways in which a front end ends; all of them leave nothing behind."""

    def __init__(self, client: EngineClient, socket_folder: str | None) -> None:
        self._client = client
        self._socket_folder = socket_folder

    def watch_engine_process(self) -> None:
        """Wait until the engine process is gone, tell its clients for a while, and end."""
        parent = os.getppid()
        # Some child of the engine process may have inherited the pipe, so look at the parent too.
        while os.getppid() == parent:
            readable, _, _ = select.select([sys.stdin], [], [], 1.0)
            if readable and not os.read(sys.stdin.fileno(), 1024):
                break
        self._client.engine_ended("The engine process has ended; its log says why.")
        if self._client.ready is not None:  # else nobody was served yet
            time.sleep(GRACE_SECONDS)
        self._exit()

    def on_terminate(self, signum: int, frame: FrameType | None) -> None:
        # In a thread: the handler interrupts the server's loop, which must still send answers.
        threading.Thread(target=self._terminate, daemon=True).start()

    def _terminate(self) -> None:
        self._client.engine_ended("The server is shutting down.")
        time.sleep(FAREWELL_SECONDS)
        self._exit()

    def _exit(self) -> None:
        self._client.close()
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        sys.stdout.flush()
        os._exit(0)  # hundreds of threads may still wait for clients that do not read


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


def _file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 65536 if soft == resource.RLIM_INFINITY else min(soft, 65536)


def _in_url(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())
