"""The arguments of a LeaderWorkerSet's pods start one server, here on CPUs with a small model."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from urllib.parse import urlsplit

from bench.ports import free_port
from tests.kubernetes.manifests import GROUP, LEADER, ROOT, container
from tests.server.running import ServerProcess
from tests.thorough import thorough

TORCHRUN = ("-m", "torch.distributed.run")
LONG = {"prompt": "The cat", "max_tokens": 200, "ignore_eos": True, "stream": True}


def arguments(index: int, meeting: int, port: int) -> list[str]:
    """Of the pod with this number, with a rank on a CPU instead of two GPUs."""
    changed = {
        "$(LWS_GROUP_SIZE)": str(GROUP["size"]),
        "$(LWS_WORKER_INDEX)": str(index),
        "$(LWS_LEADER_ADDRESS)": "127.0.0.1",
        "--master-port=29500": f"--master-port={meeting}",
        "--nproc-per-node=2": "--nproc-per-node=1",
        "Qwen/Qwen3-Next-80B-A3B-Instruct": "--device=cpu",
        "--tensor-model-parallel-size\n2": "--tensor-model-parallel-size\n1",
    }
    text = "\n".join(container(LEADER)["args"])
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    return [*text.split("\n"), "--port", str(port)]


@thorough  # test_launch_files.py has two nodes that meet in another way
def test_the_leader_answers_and_a_signal_to_all_pods_lets_answers_finish() -> None:
    meeting, port = free_port(), free_port()
    worker = subprocess.Popen(
        [sys.executable, *TORCHRUN, *arguments(1, meeting, port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        with ServerProcess(*TORCHRUN, *arguments(0, meeting, port)) as leader:
            client = http.client.HTTPConnection("127.0.0.1", urlsplit(leader.url).port, timeout=60)
            body = json.dumps(LONG)
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            assert answer.readline().startswith(b"data: ")
            for process in (worker, leader.process):
                process.send_signal(signal.SIGTERM)
            text = answer.read()
            assert b'"finish_reason":"length"' in text and text.endswith(b"data: [DONE]\n\n")
            client.close()
            worker.wait(30)
            leader.process.wait(30)
    finally:
        worker.kill()
        worker.wait()
