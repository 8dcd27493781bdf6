"""Starting a server as a user does, and ending it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """PYTHONPATH for processes that import this checkout, and what this one can import."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


class Hold:
    """While it is held, no answer of fake servers with `flags` ends, on the busiest machine."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "hold"
        self.flags = ("--held-by", str(self._file))

    def __enter__(self) -> None:
        self._file.touch()

    def __exit__(self, *raised: object) -> None:
        self._file.unlink()


@contextlib.contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Somebody else's, whom ours calls, in a thread of this process; its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class ServerProcess:
    """A server in processes of its own; `url` is known once it is up."""

    def __init__(self, *command: str, seconds: float = 180.0, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = self.wait_for_line(r"serving .* on (https?://\S+)", seconds)
        except BaseException:
            self._end()
            raise

    def wait_for_line(self, pattern: str, seconds: float) -> str:
        """The first group of the first line of output that matches."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = not self._reader.is_alive()
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found.group(1)
            assert not ended, f"the server ended: {self.output}"
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} within {seconds} s: {self.output}")

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def descendants(self) -> list[int]:
        """The front end's processes too: its master, and then its workers."""
        found = self.children()
        for pid in found:  # which grows meanwhile
            with contextlib.suppress(FileNotFoundError):
                found += children_of(pid)
        return found

    def stop(self, signum: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        """The exit code after this signal."""
        self.process.send_signal(signum)
        return self.process.wait(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # torchrun ends its ranks then, but not when it is killed
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [
        int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()
    ]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went while it was read
        return False
    return state != "Z"
