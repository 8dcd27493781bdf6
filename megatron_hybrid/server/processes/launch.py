"""The front end as the engine process sees it: started or found, watched, and ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import zmq

import megatron_hybrid
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.server.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from megatron_hybrid.server.link.answer_memory import ENDPOINT_NAME, AnswerMemoryServer
from megatron_hybrid.server.link.memory_socket import MemoryServer
from megatron_hybrid.server.link.parent import start_process
from megatron_hybrid.server.link.response_memory import RESPONSES, serve_responses
from megatron_hybrid.server.link.run_folder import LOCK_SECONDS, LockOwner, RunFolder
from megatron_hybrid.server.link.sockets import bind_socket
from megatron_hybrid.server.options import FrontEndSettings, ServerOptions

FRONT_END = ("-m", "megatron_hybrid.server.processes.front_end")  # for the Python interpreter
START_SECONDS = 120.0
END_SECONDS = 5.0


class FrontEnd:
    """The front end process and this replica's socket to it.

    A living one, which the last engine process left on this address or which another replica has
    started, is taken over if it would be started with the same settings; another one is ended,
    unless other replicas have their requests from it.

    As a context manager it leaves in order at the end: the last replica to do so ends the process
    and removes the folder. After `abandon` the process stays in any case, to tell its clients that
    the engine died and to wait for the next one.
    """

    def __init__(self, options: ServerOptions, replica: int = 0) -> None:
        self._options = options
        self.replica = replica
        self._digest = _digest(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._found: int | None = None  # the pid of one that was there
        self._abandoned = False
        self._owner = LockOwner(os.getpid())
        self._take_locks()
        self._find()
        # Not earlier: the workers of one that ends would join us.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = bind_socket(self.context, self.folder.engine_endpoint(replica))
        self._memories: list[MemoryServer] = []
        if options.data_parallel_size == 1:
            # With several, the coordinator's process has the memories: it outlives any replica.
            self._memories.append(AnswerMemoryServer(self.folder.endpoint(ENDPOINT_NAME)))
            if responses := serve_responses(self.folder.endpoint(RESPONSES), options):
                self._memories.append(responses)
        self._start_unless_found()

    def wait_until_listening(self) -> None:
        """Return once it has its port and tokenizer; ConfigurationError if it ends instead."""
        deadline = time.monotonic() + START_SECONDS
        # Its first message waits in the socket until the engine's loop reads it.
        while not self.socket.poll(100):
            if self._found is not None and self.failure() is not None:
                # It had waited long enough, and ended just now.
                self._take_start_lock()
                self._find()
                self._start_unless_found()
            if self._process is not None and (code := self._process.poll()) is not None:
                raise FrontEndEnded(code)
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"The front end process did not start within {START_SECONDS:.0f} seconds."
                )
        self.folder.start_lock.release()  # which it is only if we have started the process

    def engine_is_ready(self) -> None:
        """From now on the front end waits for a restarted engine if this process dies."""
        self._owner.ready = True
        self._lock.write(self._owner)

    def failure(self) -> str | None:
        """Why the process is gone, or None while it is there."""
        if self._process is not None:
            code = self._process.poll()
            return None if code is None else f"The front end process ended with exit code {code}."
        if self.folder.front_end_lock.owner() is None:
            return "The front end process has ended."
        return None

    def begin_to_end(self) -> bool:
        """Let the process take no more connections, answer what is open, and end. False if other
        replicas need it, or a replica that died may come back to it: then it goes on."""
        if self._is_needed():
            return False
        if pid := self._pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return True

    def abandon(self) -> None:
        """Let the process tell its clients that the engine died, and wait for the next one."""
        self._abandoned = True

    def leave(self) -> None:
        """Say that this replica ends in order; if nobody else needs it, end the process now, and
        leave no files."""
        self._owner.ended = True
        self._lock.write(self._owner)
        with contextlib.suppress(ConfigurationError):  # somebody hangs while starting: go on
            self._take_start_lock()
        if not self._is_needed():
            self._end_process(self._pid())
            self.folder.remove()
        self._lock.release()
        self.folder.start_lock.release()

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *error: object) -> None:
        for memory in self._memories:
            memory.close()
        self.socket.close()  # it sends the last message first, for half a second at most
        self.context.destroy()  # with a lockstep group's waker, too: term would wait for it
        if not self._abandoned or self.failure() is not None:
            self.leave()
        self._lock.release()
        self.folder.start_lock.release()

    def _is_needed(self) -> bool:
        """Whether another replica lives, or died and may be restarted."""
        for replica, lock in self.folder.engine_locks().items():
            if replica == self.replica:
                continue
            last = lock.last_owner()
            if lock.owner() is not None or (last is not None and not last.ended):
                return True
        return False

    def _take_locks(self) -> None:
        """The replica's, for its life, and the one of whoever starts or ends a front end."""
        while True:
            self.folder = RunFolder.for_address(self._options.host, self._options.port)
            self._lock = self.folder.engine_lock(self.replica)
            try:
                if not self._lock.acquire(LOCK_SECONDS):
                    raise ConfigurationError(self._taken())
                self._lock.write(self._owner)
                self._take_start_lock()
            except FileNotFoundError:  # a server that ended just now has removed the folder
                self._lock.release()
            else:
                return

    def _taken(self) -> str:
        options = self._options
        owner = self._lock.owner()
        pid = owner.pid if owner is not None else "unknown"
        if options.data_parallel_size == 1:
            return (
                f"The server cannot listen on {options.host}:{options.port} (--host, --port): "
                f"another one is running there, with process id {pid}."
            )
        return (
            f"Replica {self.replica} (--data-parallel-rank) of the server on {options.host}:"
            f"{options.port} is running already, with process id {pid}."
        )

    def _take_start_lock(self) -> None:
        if not self.folder.start_lock.acquire(START_SECONDS):
            raise ConfigurationError(
                "Another replica has been starting or ending the front end process for "
                f"{START_SECONDS:.0f} seconds."
            )

    def _find(self) -> None:
        """Look for a living process that can be taken over. Under the start lock."""
        self._found = None
        found = self.folder.front_end_lock.owner()
        if found is None:
            self._forget_the_dead()
            return
        if found.digest == self._digest:
            self._found = found.pid
            return
        others = [one for one in self.folder.living_engines() if one != self.replica]
        # Without a digest it is not up yet, and who started it is gone: it serves nobody.
        if others and found.digest:
            self._owner.ended = True  # nobody shall wait for it
            self._lock.write(self._owner)
            self._lock.release()
            self.folder.start_lock.release()
            raise ConfigurationError(
                f"Replica {', '.join(map(str, others))} of the server on {self._options.host}:"
                f"{self._options.port} runs with other settings; start every replica with the "
                "same flags of the text server, and with the same files."
            )
        self._end_process(found.pid)
        self._forget_the_dead()

    def _forget_the_dead(self) -> None:
        """With the front end gone nobody waits for replicas that died, or that an earlier server
        had."""
        for replica, lock in self.folder.engine_locks().items():
            if replica != self.replica and lock.acquire():
                lock.remove()

    def _start_unless_found(self) -> None:
        if self._found is not None:
            self.folder.start_lock.release()
            return
        settings = FrontEndSettings(self._options, str(self.folder.path), self._digest)
        # In a session of its own: what ends our group (Ctrl-C, torchrun) shall not end its answers.
        self._process = start_process(
            FRONT_END, msgspec.json.encode(settings), env=_environment(), start_new_session=True
        )

    def _pid(self) -> int:
        if self._process is not None:
            return self._process.pid
        # Not who was found: a replica that was restarted may have started another one since.
        owner = self.folder.front_end_lock.owner()
        return 0 if owner is None else owner.pid

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
        return self.folder.front_end_lock.owner() is not None


def _digest(options: ServerOptions) -> str:
    """Of all that a front end is made from: a living one with the same digest is as good as new."""
    found = hashlib.blake2b(msgspec.json.encode(options), digest_size=16)
    package = Path(megatron_hybrid.__file__).resolve().parent
    tokenizer = Path(options.tokenizer_folder)
    files = [*package.rglob("*.py"), *package.glob("server/**/*"), *tokenizer.glob("*.jinja")]
    files += [path for path in tokenizer.glob("*.json") if "index" not in path.name]
    # A renewed certificate makes a new front end, too.
    named = (options.ssl_certfile, options.ssl_keyfile, options.chat_template)
    files += [Path(path) for path in named if path]
    for path in sorted(files):
        if path.is_file() and path.suffix != ".pyc":
            status = path.stat()
            found.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return found.hexdigest()


def python_path() -> str:
    """PYTHONPATH with which the package is found where we found it, installed or not."""
    root = str(Path(megatron_hybrid.__file__).resolve().parents[1])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _environment() -> dict[str, str]:
    """Ours, for a process that finds the package as we do; keys come by standard input."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    for name in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        environment.pop(name, None)
    return environment


class FrontEndEnded(RuntimeError):
    """The front end ended while starting; it has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"The front end process ended with exit code {exit_code}.")
        self.exit_code = exit_code
