"""What an orchestrator's probes see of a server from its start to its end (docs/kubernetes.md)."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.ports import free_port
from tests.server.running import ROOT, ServerProcess, wait_until

FAKE = ("-m", "tests.server.fake_server", "--step-seconds", "0.05")
STREAM = {"prompt": "Hello", "max_tokens": 60, "temperature": 0, "stream": True}
DOWNLOADS_FOR_EVER = """
import os, time
from megatron_hybrid.server import cli

os.getpid = lambda: 1

def download(*arguments):
    print("downloading", flush=True)
    time.sleep(60)

cli.with_model_files = download
cli.main([])
"""


def status(port: int, path: str = "/health") -> int | None:
    """None: no connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return None
    finally:
        connection.close()


def test_probes_see_a_server_load_serve_and_drain(tokenizer_folder: Path) -> None:
    port = free_port()
    command = (*FAKE, "--tokenizer", str(tokenizer_folder), "--port", str(port))
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(ServerProcess, *command, "--load-seconds", "1")
        wait_until(lambda: status(port) is not None)
        assert status(port) == status(port, "/ping") == 503  # the model loads
        assert status(port, "/metrics") == 200
        with starting.result() as server:
            assert status(port) == status(port, "/ping") == 200
            stream = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            body = json.dumps(STREAM)
            stream.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = stream.getresponse()
            assert answer.readline().startswith(b"data: ") and status(port) == 200
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: status(port) is None)  # no more requests, and the answer goes on
            assert server.process.poll() is None
            assert answer.read().endswith(b"data: [DONE]\n\n")
            stream.close()
            assert server.process.wait(10) == 0


def test_the_first_process_of_a_container_ends_while_it_downloads() -> None:
    """The kernel keeps signals from process 1 that it has no handler for."""
    command = [sys.executable, "-c", DOWNLOADS_FOR_EVER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"downloading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
