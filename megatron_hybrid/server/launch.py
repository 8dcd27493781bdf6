"""Starting the front end from the engine process, and ending it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

import megatron_hybrid
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.engine_process import bind_socket
from megatron_hybrid.server.options import FrontEndSettings, ServerOptions

START_SECONDS = 120.0
END_SECONDS = 2.0
LONGEST_TEMP_FOLDER = 60  # the path of a Unix socket has about 100 characters


class FrontEnd:
    """The front end process and the engine's socket to it.

    As a context manager it ends the process at the end; but after `abandon` the process stays for
    a few seconds, to tell its clients that the engine died, and ends by itself.
    """

    def __init__(self, options: ServerOptions) -> None:
        folder = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="megatron-hybrid-", dir=folder if len(folder) <= LONGEST_TEMP_FOLDER else "/tmp"
        )
        endpoint = f"ipc://{self._folder}/engine"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = bind_socket(self._context, endpoint)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_hybrid.server.front_end"],
            stdin=subprocess.PIPE,
            env=_environment(),
        )
        self._abandoned = False
        assert self._process.stdin is not None
        settings = FrontEndSettings(options, endpoint, self._folder)
        with contextlib.suppress(BrokenPipeError):  # wait_until_listening reports its end
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.flush()

    def wait_until_listening(self) -> None:
        """Return once it has its port and tokenizer; ConfigurationError if it ends instead."""
        deadline = time.monotonic() + START_SECONDS
        # Its first message waits in the socket until the engine's loop reads it.
        while not self.socket.poll(100):
            code = self._process.poll()
            if code is not None:
                raise FrontEndEnded(code)
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"The front end process did not start within {START_SECONDS:.0f} seconds."
                )

    def failure(self) -> str | None:
        """Why the process is gone, or None while it is there."""
        code = self._process.poll()
        return None if code is None else f"The front end process ended with exit code {code}."

    def abandon(self) -> None:
        """Let the process tell its clients that the engine died, and end by itself."""
        self._abandoned = True

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()
        self._context.term()
        if self._abandoned and self.failure() is None:
            return  # it notices that its standard input ends with us
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def end_with_parent() -> None:
    """End this rank when torchrun is gone: killed, it can't tell the ranks, which would wait for
    one another for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _environment() -> dict[str, str]:
    """Ours, in which the package is found where we found it, installed or not."""
    root = str(Path(megatron_hybrid.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class FrontEndEnded(RuntimeError):
    """The front end ended while starting; it has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"The front end process ended with exit code {exit_code}.")
        self.exit_code = exit_code
