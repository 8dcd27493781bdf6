"""A rank that dies or hangs: the others end and say who it was, torchrun starts the group again,
clients see an error, then 503, then service, from the same front end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ports import free_port
from tests.parallel.hang.sitecustomize import HANGS
from tests.parallel.launches import ROOT, Client, Node, front_end_of, gone, wait_until
from tests.thorough import thorough

WATCHED = ("--inference-rank-timeout", "5")
HANGING = {HANGS: "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'parallel' / 'hang'}"}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def node(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    flags = ("--tensor-model-parallel-size", "2", "--port", str(port), *WATCHED)
    log = tmp_path_factory.mktemp("launch") / "log"
    with Node("tensor_parallel.sh", log, *flags, **HANGING) as node:
        yield node


@pytest.fixture(scope="module")
def client(port: int, node: Node) -> Client:
    client = Client(port)
    client.wait_for_service(node)
    return client


@pytest.fixture(scope="module")
def front_end(client: Client) -> list[int]:
    engine = client.engine()
    assert engine is not None
    return front_end_of(engine)


@pytest.fixture(scope="module")
def answer(client: Client) -> str:
    return client.complete()


@pytest.mark.parametrize(
    ("signum", "rank", "words"),
    [
        pytest.param(signal.SIGKILL, 1, "is gone: its process has ended", marks=thorough),
        pytest.param(signal.SIGSTOP, 1, "has said nothing for", marks=thorough),
        (signal.SIGUSR1, 0, "has been in turn"),  # a loop inside a step
    ],
    ids=["dies", "stops", "hangs in a step"],
)
def test_a_lost_rank_is_named_and_service_comes_back_behind_the_same_front_end(
    node: Node,
    client: Client,
    front_end: list[int],
    answer: str,
    signum: signal.Signals,
    rank: int,
    words: str,
) -> None:
    ranks, before = node.ranks(), len(node.log)
    assert len(ranks) == 2
    stream = client.open_stream()
    os.kill(ranks[rank], signum)
    wait_until(lambda: client.get("/health")[0] == 503, lambda: "no 503")
    status, body = client.get("/health")
    assert status == 503
    assert int(body["Retry-After"]) > 0
    assert b'"error"' in stream.read()
    # The front end sees the first rank that ends; the others say so in their own time.
    ends = f"So rank {1 - rank} (process {ranks[1 - rank]}) ends"
    wait_until(lambda: ends in node.log[before:], lambda: node.log[before:])
    said = node.log[before:]
    pattern = rf"rank {rank} \(host \S+, process {ranks[rank]}, CPU, replica 0, .* {words}"
    assert re.search(pattern, said), said
    assert client.wait_for_service(node, after=ranks[0]) in node.ranks()
    assert gone(ranks)
    assert client.complete() == answer
    assert len(front_end) >= 2
    assert not any(gone([process]) for process in front_end)


@thorough
def test_a_replica_of_one_rank_that_hangs_is_named_and_started_again(
    answer: str, tmp_path: Path
) -> None:
    port = free_port()
    flags = ("--tensor-model-parallel-size", "1", "--port", str(port), *WATCHED)
    log = tmp_path / "log"
    with Node("tensor_parallel.sh", log, *flags, GPUS_PER_NODE="1", **HANGING) as node:
        client = Client(port)
        engine = client.wait_for_service(node)
        (rank,) = node.ranks()
        assert engine == rank
        stream = client.open_stream()
        os.kill(rank, signal.SIGUSR1)
        assert b'"error"' in stream.read()
        pattern = rf"rank 0 \(host \S+, process {rank}, CPU, .* has been in turn"
        assert re.search(pattern, node.log), node.log
        client.wait_for_service(node, after=rank)
        assert client.complete() == answer


def test_a_server_that_is_told_to_end_ends_with_its_front_end(
    node: Node, client: Client, front_end: list[int]
) -> None:
    ranks = node.ranks()
    node.process.terminate()
    wait_until(lambda: gone([*ranks, *front_end]), lambda: node.log)
    assert client.get("/health")[0] == 0
