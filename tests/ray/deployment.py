"""Ray on this machine with an application of ours, as `serve run` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.ports import free_port
from bench.ways import ray_config, ray_environment
from tests.dynamo.deployment import ancestors, body_of, post
from tests.server.running import ROOT, wait_until

START_SECONDS = 120
END_SECONDS = 60
REPLICA = "ray::ServeReplica:llm:Replica"


class Deployment:
    """With these arguments of `build`; `args: {device: cpu}` go without saying."""

    def __init__(self, folder: Path, **args: Any) -> None:
        self.address = "127.0.0.1", (port := free_port())
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        self._temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        config = ray_config(port, device="cpu", **args)
        (folder / "serve.yaml").write_text(config)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command(), "run", str(folder / "serve.yaml")],
                env={
                    **os.environ,
                    **ray_environment(self._temporary),
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    # Ten seconds pass else before the figures for autoscaling are seen.
                    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self, replicas: int) -> None:
        """Until so many answer."""
        wait_until(lambda: len(self.figures("up")) == replicas, START_SECONDS)

    def figures(self, name: str) -> dict[str, float]:
        """Of a metric of ours, by the name of the replica; of all its labels together."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        found: dict[str, float] = {}
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as page:
                lines = page.read().decode().splitlines()
            for line in lines:
                if line.startswith(f"megatron_hybrid:{name}{{"):
                    replica = line.partition('ray_replica="')[2].partition('"')[0]
                    found[replica] = found.get(replica, 0.0) + float(line.rpartition(" ")[2])
        return found

    def pids(self, name: str = REPLICA) -> list[int]:
        """Of the replicas' actors, or of others of this name."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().replace(b"\0", b" ").startswith(name.encode()):
                    found.append(int(path.parent.name))
        return [pid for pid in found if self.process.pid in ancestors(pid)]

    def engines(self) -> list[int]:
        """Of all ranks' servers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"megatron_hybrid.cli\0serve" in path.read_bytes():
                    found.append(int(path.parent.name))
        return [pid for pid in found if self.process.pid in ancestors(pid)]

    def chat(self, question: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return post(f"{self.url}/v1/chat/completions", body_of(question, **fields))

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        return post(f"{self.url}{path}", body)

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return json.load(answer)

    @contextlib.contextmanager
    def stream(self, question: str, **fields: Any) -> Iterator[Iterator[Any]]:
        """The chunks of a stream as they come; it is broken off at the end of the block."""
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body_of(question, **fields)).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = (line.decode().strip() for line in answer)
            data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
            yield (json.loads(one) for one in data if one != "[DONE]")

    def close(self) -> None:
        """As Ctrl-C does it; and nothing may be left."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(END_SECONDS)
        finally:
            self.process.kill()
            self.process.wait(10)
            shutil.rmtree(self._temporary, ignore_errors=True)


def command() -> list[str]:
    """`serve`, of this interpreter's environment."""
    return [sys.executable, "-c", "from ray.serve.scripts import cli; cli()"]
