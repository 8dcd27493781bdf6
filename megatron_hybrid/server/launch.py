"""The front end as the engine process sees it: started or found, watched, and ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

import megatron_hybrid
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.answer_memory import ENDPOINT_NAME, AnswerMemoryServer
from megatron_hybrid.server.engine_process import bind_socket
from megatron_hybrid.server.options import FrontEndSettings, ServerOptions
from megatron_hybrid.server.run_folder import Holder, RunFolder

FRONT_END = ("-m", "megatron_hybrid.server.front_end")  # for the Python interpreter
START_SECONDS = 120.0
END_SECONDS = 5.0
LOCK_SECONDS = 1.0  # a front end that looks who holds the lock holds it for an instant itself


class FrontEnd:
    """The front end process and the engine's socket to it.

    A living one that the last engine process left on this address is taken over if it would be
    started with the same settings; another one is ended.

    As a context manager it ends the process at the end, and removes the folder; but after `abandon`
    the process stays, to tell its clients that the engine died and to wait for the next one.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.folder = RunFolder.for_address(options.host, options.port)
        self._take_engine_lock()
        self._digest = _digest(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._found: int | None = None  # the pid of one that was there
        self._abandoned = False
        found = self.folder.front_end_lock.holder()
        if found is not None and found.digest == self._digest:
            self._found = found.pid
        elif found is not None:
            self._end_process(found.pid)
        # Not earlier: the workers of one that ends would join us.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = bind_socket(self.context, self.folder.endpoint())
        self._answers = AnswerMemoryServer(self.context, self.folder.endpoint(ENDPOINT_NAME))
        if self._found is None:
            self._start()

    def wait_until_listening(self) -> None:
        """Return once it has its port and tokenizer; ConfigurationError if it ends instead."""
        deadline = time.monotonic() + START_SECONDS
        # Its first message waits in the socket until the engine's loop reads it.
        while not self.socket.poll(100):
            if self._found is not None and self.failure() is not None:
                self._found = None
                self._start()  # it had waited long enough, and ended just now
            if self._process is not None and (code := self._process.poll()) is not None:
                raise FrontEndEnded(code)
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"The front end process did not start within {START_SECONDS:.0f} seconds."
                )

    def engine_is_ready(self) -> None:
        """From now on the front end waits for a restarted engine if this process dies."""
        self.folder.engine_lock.write(Holder(os.getpid(), ready=True))

    def failure(self) -> str | None:
        """Why the process is gone, or None while it is there."""
        if self._process is not None:
            code = self._process.poll()
            return None if code is None else f"The front end process ended with exit code {code}."
        if self.folder.front_end_lock.holder() is None:
            return "The front end process has ended."
        return None

    def begin_to_end(self) -> None:
        """Let the process take no more connections, answer what is open, and end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid(), signal.SIGTERM)

    def abandon(self) -> None:
        """Let the process tell its clients that the engine died, and wait for the next one."""
        self._abandoned = True

    def end(self) -> None:
        """End the process now, and leave no files."""
        self._end_process(self._pid())
        self.folder.remove()

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._answers.close()
        self.socket.close()  # it sends the last message first, for half a second at most
        self.context.term()
        if not self._abandoned or self.failure() is not None:
            self.end()
        self.folder.engine_lock.release()

    def _take_engine_lock(self) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        lock = self.folder.engine_lock
        while not lock.acquire():
            if time.monotonic() > deadline:
                holder = lock.holder()
                raise ConfigurationError(
                    f"The server cannot listen on {self._options.host}:{self._options.port} "
                    "(--host, --port): another one is running there, with process id "
                    f"{holder.pid if holder is not None else 'unknown'}."
                )
            time.sleep(0.02)
        lock.write(Holder(os.getpid()))

    def _start(self) -> None:
        # In a session of its own: what ends our group (Ctrl-C, torchrun) shall not end its answers.
        self._process = subprocess.Popen(
            [sys.executable, *FRONT_END],
            stdin=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        settings = FrontEndSettings(self._options, str(self.folder.path), self._digest)
        with contextlib.suppress(BrokenPipeError):  # wait_until_listening reports its end
            self._process.stdin.write(msgspec.json.encode(settings))
            self._process.stdin.close()

    def _pid(self) -> int:
        if self._process is not None:
            return self._process.pid
        assert self._found is not None
        return self._found

    def _end_process(self, pid: int) -> None:
        """SIGTERM, and SIGKILL for it and its workers if that does not help."""
        if pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while self._is_there() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._is_there():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # it leads its session, so its group too
        if self._process is not None:
            self._process.wait()

    def _is_there(self) -> bool:
        """The master or one of its workers, which hold its lock too, or, before it has the lock,
        the process that we started."""
        if self._process is not None and self._process.poll() is None:
            return True
        return self.folder.front_end_lock.holder() is not None


def _digest(options: ServerOptions) -> str:
    """Of all that a front end is made from: a living one with the same digest is as good as new."""
    found = hashlib.blake2b(msgspec.json.encode(options), digest_size=16)
    package = Path(__file__).resolve().parents[1]
    tokenizer = Path(options.tokenizer_folder)
    files = [*package.glob("*.py"), *package.glob("server/**/*"), *tokenizer.glob("*.jinja")]
    files += [path for path in tokenizer.glob("*.json") if "index" not in path.name]
    for path in sorted(files):
        if path.is_file() and path.suffix != ".pyc":
            status = path.stat()
            found.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return found.hexdigest()


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
