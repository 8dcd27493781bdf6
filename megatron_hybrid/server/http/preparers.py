"""Processes that prepare large bodies (see preparation.py), so that no stream of a worker waits
while one is decoded, rendered and encoded.

    worker ---body---> child --- decodes, checks, encodes ---> worker
      |                  ^
      +---connects---> parent, which forks a child for each connection

The parent is forked by the front end's master before anything of gevent's is there. Its children
are polite (nice), have limits of memory and time, and die alone: then that one request fails.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from megatron_hybrid.errors import InvalidRequestError, RequestError
from megatron_hybrid.server.http.connection import let_others_run
from megatron_hybrid.server.http.preparation import Preparation
from megatron_hybrid.server.http.protocol.parsing import Bytes

logger = logging.getLogger(__name__)

PREPARERS = "preparers"  # the name of their socket
HUGE_BYTES = 2**20  # bodies that may not take the last child, which ends after such a one
MOST_SECONDS = 60  # for one body
MOST_BYTES = 4 * 2**30  # of memory, for one body
NICENESS = 10
RESTART_SECONDS = 0.5
BACKLOG = 128
_PIECE = 2**18
_LENGTH = struct.Struct("!Q")


def most_preparers(workers: int) -> int:
    """Children for each of so many workers: two at least, so that a huge body leaves one."""
    return max(2, min(8, (os.cpu_count() or 1) // workers))


class PreparationLost(RequestError):
    """The process that prepared a request ended before it was done."""

    status, code, field = 503, "preparation_lost", "body"


class Preparers:
    """A worker's connections to children, at most `most`; safe in threads and greenlets."""

    def __init__(self, endpoint: str, most: int) -> None:
        self._path = endpoint.removeprefix("ipc://")
        self._free = threading.BoundedSemaphore(most)
        self._free_for_huge = threading.BoundedSemaphore(max(1, most - 1))
        self._idle: list[socket.socket] = []

    def prepare(self, name: str, body: Sequence[bytes], *arguments: Any) -> Any:
        """What the method `name` of Preparation makes of a body, which comes in pieces.

        Raises what that raises, and PreparationLost.
        """
        huge = sum(map(len, body)) > HUGE_BYTES
        with (
            self._free_for_huge if huge else contextlib.nullcontext(),
            self._free,
            contextlib.ExitStack() as unless_kept,
        ):
            idle = self._idle.pop() if self._idle else None
            connection = idle or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unless_kept.callback(connection.close)
            try:
                if idle is None:
                    connection.connect(self._path)
                _send(connection, [pickle.dumps((name, *arguments))])
                _send(connection, body)
                done, value = pickle.loads(_receive(connection))
            except (OSError, EOFError) as error:
                raise PreparationLost(
                    "The process that read this request ended; it may have needed more than "
                    f"{MOST_SECONDS} seconds or {MOST_BYTES >> 30} GiB."
                ) from error
            if not huge:  # else the child has ended
                unless_kept.pop_all()
                self._idle.append(connection)
        if not done:
            raise value
        return value


class PreparingProcess:
    """The parent, which runs until `end`; it is started again if it dies."""

    def __init__(self, endpoint: str, preparation: Preparation) -> None:
        self._preparation = preparation
        path = endpoint.removeprefix("ipc://")
        with contextlib.suppress(FileNotFoundError):  # of a front end that was killed
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._pid = self._start()
        threading.Thread(target=self._watch, name="preparers", daemon=True).start()

    def end(self) -> None:
        """End the process, and start no other; its children end with their workers."""
        with self._lock:
            self._ending.set()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
        self._listener.close()

    def _start(self) -> int:
        master = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _run_parent(self._listener, self._preparation, master)
            finally:
                os._exit(1)
        return pid

    def _watch(self) -> None:
        while not self._ending.wait(RESTART_SECONDS):
            with self._lock:
                if not self._ending.is_set() and _has_ended(self._pid):
                    logger.warning("The process that reads large requests is started again.")
                    self._pid = self._start()


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # gunicorn has asked before us
        return True


def _run_parent(listener: socket.socket, preparation: Preparation, master: int) -> None:
    """Fork a child for each connection, until the master is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing behind
    # The port and the lock are the master's: they must be free when it is gone.
    own = listener.fileno()
    os.closerange(3, own)
    os.closerange(own + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    listener.settimeout(1.0)
    while os.getppid() == master:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            _limit_this_process()
            serve(connection, preparation)
            os._exit(0)
        connection.close()
    os._exit(0)


def _limit_this_process() -> None:
    os.nice(NICENESS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))
    gc.freeze()  # what is shared with the parent stays so


def serve(connection: socket.socket, preparation: Preparation) -> None:
    """A child's work, until the worker closes the connection, or up to the first huge body."""
    huge = False
    with contextlib.suppress(OSError, EOFError):
        while not huge:
            name, *arguments = pickle.loads(_receive(connection))
            body = _receive(connection)
            huge = len(body) > HUGE_BYTES
            signal.alarm(MOST_SECONDS)
            answer = _prepared(preparation, name, body, *arguments)
            signal.alarm(0)
            _send(connection, [pickle.dumps(answer)])


def _prepared(
    preparation: Preparation, name: str, body: Bytes, *arguments: Any
) -> tuple[bool, Any]:
    """Whether it could be done, and what came of it or why not."""
    try:
        return True, getattr(preparation, name)(body, *arguments)
    except RequestError as error:
        return False, error
    except MemoryError:
        return False, InvalidRequestError("body", "The body takes too much memory to read.")
    except Exception as error:
        logger.exception("A large request could not be prepared.")
        return False, RuntimeError(f"{type(error).__name__}: {error}")


def _send(connection: socket.socket, pieces: Sequence[bytes]) -> None:
    connection.sendall(_LENGTH.pack(sum(map(len, pieces))))
    for piece in pieces:
        connection.sendall(piece)
        let_others_run()


def _receive(connection: socket.socket) -> Bytes:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, received = memoryview(data), 0
    while received < length:
        count = connection.recv_into(view[received : received + _PIECE])
        if not count:
            raise EOFError
        received += count
        let_others_run()
    return data
