"""A worker's engine process, without Dynamo; and what a worker can't be."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.dynamo import __main__ as command
from megatron_hybrid.dynamo.checks import check_block_size, check_ranks
from megatron_hybrid.dynamo.process import EngineProcess
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kv_events.messages import BlockStored, Event, decode_batch
from megatron_hybrid.rank_layout import ParallelSizes
from megatron_hybrid.request import RequestEvent, SamplingParams
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.subscription import Delivery
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from tests.server.running import ROOT, wait_until

LONG_PROMPT = list(range(5, 135))  # two blocks and a bit


class Receiver:
    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Delivery] = queue.SimpleQueue()

    def deliver(self, item: Delivery) -> None:
        self.items.put(item)

    def answer(self) -> list[int]:
        tokens: list[int] = []
        while True:
            event = self.items.get(timeout=30)
            assert isinstance(event, RequestEvent), event
            tokens += event.token_ids
            if event.finish_reason is not None:
                return tokens


def test_it_answers_tells_what_it_caches_and_ends() -> None:
    process = EngineProcess(EngineConfig(device="cpu"), rank_timeout=60.0)
    engine = ReplicaSet([process.endpoint])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.SUB)
    try:
        engine.join("")
        assert engine.wait_until_ready(300), process.exit_code
        events.subscribe(b"")
        events.connect(process.kv_events_endpoint)
        assert events.poll(10_000)  # it is there: what comes from now on is heard
        receiver = Receiver()
        params = SamplingParams(temperature=0.0, max_tokens=4)
        add = wire.AddRequest("a-0", wire.packed(LONG_PROMPT), params)
        engine.clients[0].submit(add, receiver)
        assert len(receiver.answer()) == 4
        stored = next(one for one in _events(events) if isinstance(one, BlockStored))
        assert stored.token_ids == LONG_PROMPT[:128] and stored.block_size == 64
    finally:
        process.end()
        engine.close()
        context.destroy(linger=0)
    assert process.exit_code == 0
    assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


def _events(socket: zmq.Socket[bytes]) -> Iterator[Event]:
    """Those of ten messages; most are only signs of life."""
    for _ in range(10):
        assert socket.poll(10_000)
        yield from decode_batch(socket.recv_multipart()[2]).events


def test_one_that_can_not_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(device="cpu", inference_dynamic_batching_buffer_size_gb=1e-6)
    process = EngineProcess(config, rank_timeout=60.0)
    assert process.wait() == 2
    process.end()  # leaves no folder
    assert "--inference-dynamic-batching-buffer-size-gb" in capfd.readouterr().err


def test_it_ends_with_its_worker() -> None:
    code = (
        "from megatron_hybrid.config import EngineConfig;"
        "from megatron_hybrid.dynamo.process import EngineProcess;"
        "import os; one = EngineProcess(EngineConfig(device='cpu'), 60.0);"
        "print(one._process.pid, one._folder.path, flush=True); os._exit(1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    pid, folder = done.stdout.split()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 10)
    wait_until(lambda: not os.path.exists(folder), 10)


def test_a_worker_needs_no_torch() -> None:
    code = (
        "import sys, megatron_hybrid.dynamo.process, megatron_hybrid.dynamo.requests,"
        "megatron_hybrid.dynamo.answers, megatron_hybrid.dynamo.stream,"
        "megatron_hybrid.dynamo.parsers; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_without_dynamo_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main([]) == 2
    assert "pip install --no-deps -r configs/dynamo/requirements.txt" in capsys.readouterr().err


def test_ranks_that_a_worker_can_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ranks(ParallelSizes(tensor=2, pipeline=2))
    with pytest.raises(ConfigurationError, match="Experts are split over 4 ranks"):
        check_ranks(ParallelSizes(tensor=2, expert=2))
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match="start it without torchrun"):
        check_ranks(ParallelSizes(tensor=2))


def test_blocks_have_the_size_that_the_front_end_is_told() -> None:
    check_block_size(64, {})
    check_block_size(64, {"DYN_KV_CACHE_BLOCK_SIZE": "64"})
    with pytest.raises(ConfigurationError, match=r"64 tokens .* DYN_KV_CACHE_BLOCK_SIZE is 16"):
        check_block_size(64, {"DYN_KV_CACHE_BLOCK_SIZE": "16"})
