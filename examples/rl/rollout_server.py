"""A server of ours as a process of a trainer's, and its control routes: what the trainers' shims
in this folder have in common."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from megatron_hybrid.ray.arguments import as_flags
from megatron_hybrid.ray.process import RankProcess
from megatron_hybrid.server.link.run_folder import RunFolder

ENDING_SECONDS = 10.0
POLL_SECONDS = 0.5


class ServerError(RuntimeError):
    """A server that did not start, or what it refused; the message says why."""


class RolloutServer(RankProcess):
    """`megatron-hybrid serve`; it ends with the process that has started it."""

    def __init__(
        self, host: str, port: int, flags: Mapping[str, Any], gpus: str | None = None
    ) -> None:
        """flags: of `serve`, by their names with underscores; None leaves one out. gpus: as in
        CUDA_VISIBLE_DEVICES; None: this process's."""
        host = host.strip("[]")
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._folder = RunFolder.for_address(host, port)
        own = {
            "host": host,
            "port": port,
            "enable_control_routes": True,
            # The trainer starts another one.
            "engine_restart_timeout": 1,
            "shutdown_timeout": ENDING_SECONDS / 2,
        }
        environment = {"TORCHELASTIC_RUN_ID": "trainer"}  # so that it looks for its parent
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        super().__init__(as_flags({**own, **flags}), environment)

    @property
    def pid(self) -> int:
        """Of the process whose children are the others."""
        return self._process.pid

    def wait_until_up(self, seconds: float) -> None:
        """Until a token can be generated. Raises ServerError, and ends it, if that takes longer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise ServerError(f"The server ended at its start:\n{self.last_words()}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health_generate", timeout=30),
            ):
                return
            time.sleep(POLL_SECONDS)
        self.end()
        raise ServerError(f"The server was not up after {seconds:g} s:\n{self.last_words()}")

    def end(self, seconds: float = ENDING_SECONDS) -> None:
        """Let it answer what is open, for so long, and leave no files."""
        super().end(seconds)
        self._folder.remove()


def post(url: str, path: str, body: Mapping[str, Any]) -> Any:
    """What a control route answers, for which the engine may first have to come to rest. Raises
    ServerError for what it refuses."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ServerError(f"{path} of {url} was answered {error.code}: {said}") from error
