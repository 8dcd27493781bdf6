"""A rank of a replica: `megatron-hybrid serve` as a process of its own, in the actor that Ray has
placed."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from megatron_hybrid.ray.ports import free_port
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.processes.launch import python_path

HOST = "127.0.0.1"
# The front end outlives its engine only to say what became of it: Ray starts another replica.
RESTART_SECONDS = 1
LAST_LINES = 20


def rank_environment(
    rank: int, ranks: int, address: str, port: int, local: Sequence[int], gpus: Sequence[str]
) -> dict[str, str]:
    """What torchrun would set. local: the ranks on this one's node; gpus: those of all of them."""
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(list(local).index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # That the rank ends with its parent, the actor, and watches itself.
        "TORCHELASTIC_RUN_ID": "ray",
    }
    if gpus:
        # All of the node's, so that they can read one another's memory.
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return found


class RankProcess:
    """Starts the rank, and ends it."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_hybrid.cli", "serve", *flags],
            env={**os.environ, "PYTHONPATH": python_path(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # what ends the actor's group shall not cut off answers
        )
        self._reader = threading.Thread(target=self._read, name="lines", daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        return self._process.wait()

    def last_words(self) -> str:
        """Of one that has ended."""
        self._reader.join(1.0)
        return "\n".join(self._lines)

    def end(self, seconds: float) -> None:
        """Let it answer what is open, for so long. Twice is once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))
            print(line, end="", flush=True)  # Ray keeps it in the actor's log


class FirstRank(RankProcess):
    """The one with the front end, at `url`. folder: where its sockets are."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self.folder = RunFolder.for_address(HOST, port)
        events = {
            "enable_kv_cache_events": True,
            "endpoint": self.folder.kv_events_endpoint(0),
            "replay_endpoint": self.folder.kv_replay_endpoint(0),
        }
        here = (
            *(f"--host={HOST}", f"--port={port}"),
            f"--engine-restart-timeout={RESTART_SECONDS}",
            f"--kv-events-config={json.dumps(events)}",
        )
        super().__init__((*flags, *here), environment)

    def end(self, seconds: float) -> None:
        """And leave no files."""
        super().end(seconds)
        self.folder.remove()
