"""The coordinator's sockets, and workers with and without it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from flask.testing import FlaskClient

from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.changes import CacheChanges
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.kv_events import KVEventPublisher, KVEventsConfig
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.answer_memory import ENDPOINT_NAME, AnswerMemoryClient
from megatron_hybrid.server.link.engine_client import EngineClient
from megatron_hybrid.server.link.response_memory import RESPONSES, ResponseMemoryClient, Stored
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.link.sockets import bind_socket
from megatron_hybrid.server.link.subscription import EngineUnavailable, Subscription
from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas import coordinator_client
from megatron_hybrid.server.replicas.coordinator import Coordinator
from megatron_hybrid.server.replicas.coordinator_client import COORDINATOR, CoordinatorClient
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.replicas.test_placer import BLOCK, HYBRID, prompt
from tests.server.running import wait_until

SHARED = list(range(10 * BLOCK))
GEOMETRY = CacheGeometry(BLOCK, BLOCK, 100, 4, 4, bytes_per_block=1, bytes_per_state=1)


class Replica:
    """A fake engine in its loop, in a thread, and what it publishes."""

    def __init__(self, folder: RunFolder, number: int, tokenizer: Tokenizer) -> None:
        self.engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_socket(self._context, folder.engine_endpoint(number))
        self.joined: list[str] = []  # URLs of front ends
        self.loop = EngineLoop(
            self.engine, self._socket, max_queue=4, cache=HYBRID, on_join=self.joined.append
        )
        self.publisher = KVEventPublisher(
            [folder.kv_events_endpoint(number)],
            [folder.kv_replay_endpoint(number)],
            KVEventsConfig(),
        )
        self._changes = CacheChanges(GEOMETRY)
        self.publisher.publish(self._changes.take())
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def has(self, tokens: list[int]) -> None:
        """It has cached a prefix of whole blocks, with a state at its end."""
        self.stores(prompt(tokens).of(0)[0], tokens)

    def stores(self, keys: SequenceKeys, tokens: list[int]) -> None:
        """The same, by these keys."""
        self._changes.blocks_stored(keys, 0, len(tokens) // BLOCK)
        self._changes.state_stored(keys, len(tokens), False)
        self.publisher.publish(self._changes.take())

    def close(self) -> None:
        self.loop.request_stop()
        self._thread.join(5)
        self.publisher.close()
        self._socket.close(linger=0)
        self._context.term()


class Server:
    """Two replicas in one folder, a worker's clients, and a coordinator when it is started."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.folder = RunFolder(path)
        self.replicas = [Replica(self.folder, number, tokenizer) for number in range(2)]
        self.worker = self.connect()
        self.coordinator: Coordinator | None = None
        self._thread: threading.Thread | None = None
        self._ends = False

    def connect(self) -> ReplicaSet:
        endpoints = [self.folder.engine_endpoint(number) for number in range(2)]
        worker = ReplicaSet(endpoints, CoordinatorClient(self.folder.endpoint(COORDINATOR)))
        worker.join("http://nowhere")
        wait_until(lambda: [client.state for client in worker.clients] == ["ok", "ok"])
        return worker

    def start_coordinator(self) -> Coordinator:
        options = ServerOptions(tokenizer_folder="", model_name="", data_parallel_size=2)
        found = self.coordinator = Coordinator(options, self.folder)
        self._ends = False
        self._thread = threading.Thread(target=found.run, args=(lambda: self._ends,), daemon=True)
        self._thread.start()
        wait_until(lambda: all(found._ready) and self.worker._coordinator._connected)
        return found

    def stop_coordinator(self) -> None:
        if self._thread is not None:
            self._ends = True
            self._thread.join(5)
            self._thread = None

    def close(self) -> None:
        self.worker.close()
        self.stop_coordinator()
        for replica in self.replicas:
            replica.close()


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = Server(Path(folder), tokenizer)
        yield server
        server.close()


def answers_of(coordinator: Coordinator) -> int:
    assert coordinator.placer is not None
    return sum(coordinator.placer.replicas[number].answers for number in range(2))


def wanted(name: str, tokens: list[int]) -> wire.Wanted:
    return wire.Wanted(name, [wire.packed(tokens)], n=1, max_tokens=4, cache_salt="")


def test_a_coordinator_that_comes_late_knows_what_is_cached(server: Server) -> None:
    server.replicas[1].has(SHARED)
    for _ in range(2):
        replicas = server.start_coordinator().placer.replicas
        wait_until(lambda found=replicas: len(found[1].contents.blocks) == 10)
        placement = server.worker.place(wanted("a", [*SHARED, 1]))
        assert placement.client is server.worker.clients[1]
        placement.ended(4)
        server.stop_coordinator()
        wait_until(lambda: not server.worker._coordinator._connected)


def test_a_coordinator_that_comes_late_knows_what_runs(server: Server) -> None:
    """Three requests that the worker has placed by itself, one of which has ended."""
    link = server.worker._coordinator
    for name in "abc":
        link.moved(wanted(name, [1]), 0)
    link.ended("b", 4)
    for _ in range(2):
        placer = server.start_coordinator().placer
        assert placer is not None
        wait_until(lambda found=placer: found.replicas[0].answers == 2)
        placement = server.worker.place(wanted("d", [1]))
        assert placement.client is server.worker.clients[1]
        placement.ended(4)
        wait_until(lambda found=placer: found.replicas[1].answers == 0)
        server.stop_coordinator()
        wait_until(lambda: not link._connected)


def test_a_coordinator_keeps_what_it_is_told_before_it_knows_a_replica(
    tokenizer: Tokenizer,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        folder, ends = RunFolder(Path(path)), threading.Event()
        options = ServerOptions(tokenizer_folder="", model_name="", data_parallel_size=2)
        coordinator = Coordinator(options, folder)
        thread = threading.Thread(target=coordinator.run, args=(ends.is_set,), daemon=True)
        thread.start()
        link = CoordinatorClient(folder.endpoint(COORDINATOR))
        link.join("")
        wait_until(lambda: link._connected)
        link.moved(wanted("a", [1]), 0)
        assert coordinator.placer is None
        replicas = [Replica(folder, number, tokenizer) for number in range(2)]
        wait_until(
            lambda: coordinator.placer is not None and coordinator.placer.replicas[0].answers == 1
        )
        wait_until(lambda: all(coordinator._ready))
        assert link.place(wanted("b", [1]), [0, 1]) == 1
        link.close()
        ends.set()
        thread.join(5)
        for replica in replicas:
            replica.close()


def test_the_requests_of_a_worker_that_dies_stop_counting(server: Server) -> None:
    coordinator = server.start_coordinator()
    other = server.connect()
    wait_until(lambda: other._coordinator._connected)
    other.place(wanted("a", SHARED))
    mine = server.worker.place(wanted("b", SHARED))
    assert answers_of(coordinator) == 2
    other.close()
    wait_until(lambda: answers_of(coordinator) == 1)
    mine.ended(1)
    wait_until(lambda: answers_of(coordinator) == 0)


def test_a_coordinator_that_hangs_is_not_waited_for_long(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "PAUSE_SECONDS", 60.0)  # on however slow a machine
    coordinator = server.start_coordinator()
    monkeypatch.setattr(coordinator, "_receive", lambda: time.sleep(0.01))
    monkeypatch.setattr(coordinator_client, "PAUSE_SECONDS", 60.0)  # on a busy machine, too
    asked = []
    send = server.worker._coordinator._link.send
    monkeypatch.setattr(
        server.worker._coordinator._link, "send", lambda one: asked.append(one) or send(one)
    )
    placements = [server.worker.place(wanted(f"r{number}", SHARED)) for number in range(3)]
    assert len(placements) == 3
    kinds = [type(one).__name__ for one in asked]
    assert kinds == ["Place", "Moved", "Moved", "Moved"]  # asked once, and not again at once
    assert coordinator_client.PLACE_SECONDS <= 0.25


def test_a_prompt_counts_until_its_first_token_and_a_request_until_its_end(
    server: Server,
) -> None:
    coordinator = server.start_coordinator()
    server.replicas[0].engine.step_seconds = server.replicas[1].engine.step_seconds = 0.05
    request = wanted("a", SHARED)
    placement = server.worker.place(request)
    number = server.worker.clients.index(placement.client)
    assert coordinator.placer.replicas[number].prefill == len(SHARED)
    subscription = Subscription(placement.client, whole=True)
    subscription.on_first = placement.on_first
    subscription.add(wire.AddRequest("a-0", wire.packed(SHARED), SamplingParams(max_tokens=20)))
    wait_until(lambda: coordinator.placer.replicas[number].prefill == 0)
    assert coordinator.placer.replicas[number].answers == 1
    subscription.close()
    placement.ended(20)
    wait_until(lambda: coordinator.placer.replicas[number].answers == 0)


def test_a_replica_that_ends_has_nothing_any_more(server: Server) -> None:
    coordinator = server.start_coordinator()
    server.replicas[1].has(SHARED)
    wait_until(lambda: len(coordinator.placer.replicas[1].contents.blocks) == 10)
    server.worker.place(wanted("a", [*SHARED, 1]))
    server.replicas[1].loop.request_stop()
    server.worker.clients[1].send(wire.ResetPrefixCache(0))  # an idle loop looks up at once
    wait_until(lambda: len(coordinator.placer.replicas[1].contents.blocks) == 0)
    assert coordinator.placer.replicas[1].answers == 0
    wait_until(lambda: server.worker.clients[1].state == "down")
    placement = server.worker.place(wanted("b", [*SHARED, 1]))
    assert placement.client is server.worker.clients[0]
    assert placement.elsewhere() is None


def test_the_coordinator_has_the_memories_of_answers_and_of_responses(server: Server) -> None:
    server.start_coordinator()
    responses = ResponseMemoryClient(server.folder.endpoint(RESPONSES))
    kept = Stored(b"me", "", b"[]", b"{}")
    responses.keep("resp_1", kept)
    assert responses.find(["resp_1"], b"me") == [kept]
    responses.close()
    memory = AnswerMemoryClient(server.folder.endpoint(ENDPOINT_NAME))
    memory.remember(b"key", [1, 2], "text")
    found = memory.find([b"key"])
    assert found[0] is not None
    assert found[0].text == "text"
    memory.close()


@pytest.fixture
def http(server: Server, tokenizer: Tokenizer, options: ServerOptions) -> FlaskClient:
    return create_app(Serving(server.worker, tokenizer, options)).test_client()


def ask(http: FlaskClient, **fields: Any) -> Any:
    return http.post("/v1/completions", json={"prompt": ["Hello", "World"], **fields})


def test_a_replica_with_a_full_queue_is_passed_over(server: Server, http: FlaskClient) -> None:
    server.replicas[0].engine.num_waiting = 4  # of four; without a coordinator it comes first
    assert ask(http, max_tokens=3).status_code == 200
    assert server.replicas[0].engine.added == []
    assert [len(one.engine.added) for one in server.replicas] == [0, 2]
    server.replicas[1].engine.num_waiting = 4
    refused = ask(http, max_tokens=3)
    assert refused.status_code == 429
    assert "waiting" in refused.json["error"]["message"]
    assert [client.running() for client in server.worker.clients] == [0, 0]


def test_requests_that_are_refused_say_nothing_of_how_long_answers_are(
    server: Server, http: FlaskClient
) -> None:
    coordinator = server.start_coordinator()
    assert ask(http, max_tokens=20, ignore_eos=True).status_code == 200
    wait_until(lambda: coordinator.placer._mean_answer == 20.0)
    for replica in server.replicas:
        replica.engine.num_waiting = 4
    for _ in range(5):
        assert ask(http, max_tokens=20).status_code == 429
    wait_until(lambda: answers_of(coordinator) == 0)
    assert coordinator.placer._mean_answer == 20.0


def test_what_a_busy_replica_has_not_done_yet_is_said(server: Server) -> None:
    server.replicas[1].engine.step_seconds = 1.0
    busy = Subscription(server.worker.clients[1], whole=True)
    busy.add(
        wire.AddRequest("a-0", wire.packed([5]), SamplingParams(max_tokens=2, ignore_eos=True))
    )
    wait_until(lambda: server.replicas[1].engine.added != [])
    with pytest.raises(EngineUnavailable, match=r"Replica 1: .* busy .* done on replica 0"):
        server.worker.ask(wire.ResetPrefixCache, timeout=0.1)
    busy.close()


def test_without_a_coordinator_nothing_is_kept_for_it(server: Server) -> None:
    link = server.worker._coordinator
    for number in range(100):
        link.ended(f"r{number}", 1)
    wait_until(lambda: link._link._outgoing.empty())


def test_without_a_coordinator_requests_go_where_this_worker_has_fewest(server: Server) -> None:
    first, second = server.worker.clients
    submitted = Subscription(first, whole=True)
    server.replicas[0].engine.step_seconds = 0.05
    submitted.add(
        wire.AddRequest("a-0", wire.packed([5]), SamplingParams(max_tokens=50, ignore_eos=True))
    )
    assert server.worker.place(wanted("b", [1])).client is second
    submitted.close()


def test_why_there_is_no_replica_is_said_once_or_for_each(tmp_path: Path) -> None:
    worker = ReplicaSet(
        [f"ipc://{tmp_path}/{n}" for n in range(2)], CoordinatorClient(f"ipc://{tmp_path}/c")
    )
    with pytest.raises(EngineUnavailable, match=r"^The engine is still loading the model\.$"):
        worker.place(wanted("a", [1]))
    worker.clients[1].received([wire.EngineEnded("It failed.")])
    with pytest.raises(EngineUnavailable, match=r"Replica 0: .* loading .* Replica 1: It failed\."):
        worker.check()
    assert worker.states() == {"0": {"status": "loading"}, "1": {"status": "down"}}


@pytest.mark.parametrize(
    ("silent", "paused", "expected"),
    [
        ([], [], [0, 1, 2]),
        ([0], [], [1, 2]),
        ([0], [1], [2]),
        ([0], [1, 2], [1, 2]),
        ([], [0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [0], [0, 1, 2]),
    ],
)
def test_replicas_that_hang_or_are_paused_take_requests_only_where_no_other_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent: list[int],
    paused: list[int],
    expected: list[int],
) -> None:
    asked: list[list[int]] = []

    class Asked(CoordinatorClient):
        def place(self, wanted: wire.Wanted, replicas: list[int]) -> int | None:
            asked.append(replicas)
            return replicas[0]

    worker = ReplicaSet([f"ipc://{tmp_path}/{n}" for n in range(3)], Asked(f"ipc://{tmp_path}/c"))
    for number, client in enumerate(worker.clients):
        monkeypatch.setattr(client._link, "send", lambda command: None)
        heartbeat = wire.Heartbeat(paused=number in paused)
        client.received([wire.EngineReady(10, 10, ()), heartbeat])
        monkeypatch.setattr(client, "silence", lambda n=number: 20.0 if n in silent else 1.0)
    first = worker.place(wanted("a", [1]))
    assert first.client is worker.clients[expected[0]]
    assert first.elsewhere() is not None  # others are still tried after a refusal
    assert asked[0] == expected


def test_an_engine_client_that_drains_takes_nothing_and_says_that_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(f"ipc://{tmp_path}/engine")
    sent: list[wire.Command] = []
    monkeypatch.setattr(client._link, "send", sent.append)
    client.received([wire.EngineReady(10, 10, ()), wire.Draining(), wire.Heartbeat()])
    assert client.state == "draining"
    with pytest.raises(EngineUnavailable, match="shutting down"):
        client.submit(wire.AddRequest("a-0", wire.packed([1]), SamplingParams()), None)  # type: ignore[arg-type]
    assert sent == [wire.Left()]
    client.connected()  # the next one
    assert client.state != "draining"


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)  # for a machine with a lot to do
    socket.connect(endpoint)
    return socket


def test_a_replica_that_drains_waits_for_requests_that_were_under_way(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A worker may have sent one before it heard: only after its Left nothing can come."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        socket = bind_socket(context, f"ipc://{folder}/engine")
        joined: list[str] = []
        engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
        loop = EngineLoop(engine, socket, on_join=joined.append)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        worker = dealer(context, f"ipc://{folder}/engine")
        worker.send(wire.encode([wire.Join()]))
        for kind in (wire.Fingerprint, wire.EngineReady):
            assert isinstance(wire.decode_replies(worker.recv())[0], kind)
        loop.request_drain(30.0, apart=True)

        def next_reply() -> wire.AnyReply:
            while isinstance(reply := wire.decode_replies(worker.recv())[0], wire.Heartbeat):
                pass
            return reply

        assert isinstance(next_reply(), wire.Draining)
        thread.join(0.3)
        assert thread.is_alive()
        add = wire.AddRequest("late-0", wire.packed([5, 6]), SamplingParams(max_tokens=1))
        worker.send(wire.encode([add, wire.Left()]))
        events = next_reply()
        assert isinstance(events, wire.Events)
        assert events.events[0].finish_reason is not None
        assert isinstance(next_reply(), wire.EngineEnded)
        thread.join(5)
        assert not thread.is_alive()
        assert joined == []
        worker.close()
        socket.close(linger=0)
        context.term()


def test_only_who_takes_requests_counts_as_a_front_end(server: Server) -> None:
    server.start_coordinator()
    other = server.connect()
    wait_until(lambda: all(len(replica.joined) >= 2 for replica in server.replicas))
    assert [replica.joined for replica in server.replicas] == [["http://nowhere"] * 2] * 2
    other.close()
