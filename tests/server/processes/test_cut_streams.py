"""Clients that hang up in the middle of a stream of /v1/messages: at any byte, its request ends."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

from tests.server.running import ServerProcess, wait_until
from tests.thorough import thorough

BODY = json.dumps(
    {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4000,
        "temperature": 1,
        "seed": 1,
        "stream": True,
    }
)
HEAD = "\r\n".join(
    [
        "POST /v1/messages HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
        "\r\n",
    ]
)
MOST_BYTES = 1500  # about the first ten events


def figures(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/stats") as answer:
        return json.load(answer)["engine"]


@thorough
def test_a_stream_that_is_cut_at_any_byte_frees_its_request(tokenizer_folder: Path) -> None:
    flags = ("--step-seconds", "0.005", "--max-seq-length", "8192", "--never-fails")
    command = ("-m", "tests.server.fake_server", "--tokenizer", str(tokenizer_folder), *flags)
    with ServerProcess(*command) as server:
        port = int(server.url.rpartition(":")[2])
        cuts = range(0, MOST_BYTES, 7)
        for length in cuts:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(f"{HEAD}{BODY}".encode())
                left = length
                while left:
                    left -= len(client.recv(left))
        wait_until(lambda: figures(server.url)["requests_running"] == 0, 20)
        # Nobody has asked before the first byte came.
        assert figures(server.url)["requests_finished"].keys() == {"abort"}
        assert figures(server.url)["requests_finished"]["abort"] >= len(cuts) - 1
