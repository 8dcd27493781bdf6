"""Replicas of a model on this machine behind each way there is to reach them: our own front end
and coordinator, other people's routers, Dynamo and Ray Serve."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.ports import free_port
from bench.replicas import get_json, started

ROOT = Path(__file__).parents[2]
ROUTERS = {  # by the ways' names
    "smg": ("smg", "launch"),
    "vllm-router": ("vllm_router.launch_router",),
    "sglang-router": ("sglang_router.launch_router",),
}
WAYS = ("server", "coordinator", *ROUTERS, "dynamo", "ray", "ray-haproxy")
START_SECONDS = 300.0
END_SECONDS = 60.0


@dataclass(frozen=True)
class Deployment:
    """python: what has the way's packages; the project is added to its path. flags: of each
    replica, a name and a value each. gpus: a replica has one, else all are on the CPU."""

    python: str = sys.executable
    flags: Sequence[str] = ()
    replicas: int = 2
    gpus: bool = False

    @contextlib.contextmanager
    def behind(self, way: str) -> Iterator[str]:
        """Its address, once all replicas are reached there; all is ended afterwards."""
        with contextlib.ExitStack() as stack:
            if way in ("server", "coordinator"):
                replicas = 1 if way == "server" else self.replicas
                environments = [self._device(rank) for rank in range(replicas)]
                yield stack.enter_context(started(replicas, self._flags(), environments)).url
                return
            folder = Path(tempfile.mkdtemp(prefix="way-", dir="/tmp"))  # a short path
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            processes = stack.enter_context(Processes(self.python, folder))
            if way in ROUTERS:
                yield self._router(way, processes)
            elif way == "dynamo":
                yield self._dynamo(processes)
            else:
                yield self._ray(processes, haproxy=way == "ray-haproxy")

    def _flags(self) -> list[str]:
        return [*self.flags, *(() if self.gpus else ("--device", "cpu"))]

    def _device(self, rank: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": str(rank)} if self.gpus else {}

    def _router(self, way: str, processes: Processes) -> str:
        servers = []
        for rank in range(self.replicas):
            servers.append(f"http://127.0.0.1:{(port := free_port())}")
            serve = ("megatron_hybrid.server.cli", *self._flags(), "--port", str(port))
            processes.start(f"server {rank}", *serve, python=sys.executable, **self._device(rank))
        for server in servers:
            processes.wait(lambda server=server: '"ok"' in _read(f"{server}/health"))  # type: ignore[misc]
        url = f"http://127.0.0.1:{(port := free_port())}"
        processes.start(
            way,
            *(*ROUTERS[way], "--worker-urls", *servers, "--policy", "cache_aware"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"),
        )

        def reaches_all() -> bool:
            workers = get_json(f"{url}/workers")["workers"]
            return sum(worker["is_healthy"] for worker in workers) == self.replicas

        processes.wait(reaches_all)
        return url

    def _dynamo(self, processes: Processes) -> str:
        environment = dynamo_environment(processes.folder)
        url = f"http://127.0.0.1:{(port := free_port())}"
        front_end = ("--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", str(port))
        processes.start("front end", "dynamo.frontend", *front_end, **environment)
        pages = []
        for rank in range(self.replicas):
            port = free_port()
            pages.append(f"http://127.0.0.1:{port}/metrics")
            own = environment | self._device(rank) | {"DYN_SYSTEM_PORT": str(port)}
            processes.start(f"worker {rank}", "megatron_hybrid.dynamo", *self._flags(), **own)
        for page in pages:
            processes.wait(lambda page=page: _up(page) == 1)  # type: ignore[misc]
        processes.wait(lambda: '"id"' in _read(f"{url}/v1/models"))
        return url

    def _ray(self, processes: Processes, haproxy: bool) -> str:
        pairs = list(zip(self._flags()[::2], self._flags()[1::2], strict=True))
        arguments = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}
        port = free_port()
        file = processes.folder / "serve.yaml"
        file.write_text(ray_config(port, replicas=self.replicas, **arguments))
        environment = ray_environment(processes.folder) | {
            "RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy)),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }
        processes.start("ray", "ray.serve.scripts", "run", str(file), **environment)
        url = f"http://127.0.0.1:{port}"
        processes.wait(lambda: _up(f"{url}/metrics") == self.replicas)
        return url


def dynamo_environment(folder: Path) -> dict[str, str]:
    """Of a front end and its workers on one machine, which find one another in this folder."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
    }


def ray_config(port: int, **args: Any) -> str:
    """What `serve run` takes, with these arguments of our application; JSON, which is YAML, too."""
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "megatron_hybrid.ray:build",
        "args": {"cpus": 0.1, **args},
    }
    http = {"host": "127.0.0.1", "port": port}
    return json.dumps({"http_options": http, "applications": [application]})


def ray_environment(folder: Path | str) -> dict[str, str]:
    """Of a Ray of its own. folder: its sockets are in it, and the paths of those are short."""
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",  # else a token is left in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@dataclass
class Processes:
    """Started in order, ended in the opposite one, each with whatever it has started."""

    python: str
    folder: Path
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *module: str, python: str = "", **environment: str) -> None:
        with open(self._log(name), "w") as log:
            self._running[name] = subprocess.Popen(
                [python or self.python, "-m", *module],
                env={**os.environ, **environment, "PYTHONPATH": _python_path()},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, condition: Callable[[], bool]) -> None:
        """Raises RuntimeError with the log of a process that has ended, or after START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if condition():
                    return
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise RuntimeError(f"The {name} has ended: {self._end_of_log(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"{name}: {self._end_of_log(name)}" for name in self._running)
                raise RuntimeError(f"Not all is up after {START_SECONDS:g} s: {logs}")
            time.sleep(0.2)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running.values()):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.log"

    def _end_of_log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")[-2000:]


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as page:
        return str(page.read().decode())


def _up(page: str) -> int:
    """How many replicas say on a page of metrics that they serve."""
    lines = _read(page).splitlines()
    figures = [line for line in lines if line.startswith("megatron_hybrid:up{")]
    return sum(float(line.rpartition(" ")[2]) == 1 for line in figures)
