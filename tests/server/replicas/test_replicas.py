"""Several replicas behind one address: the processes, their deaths and their returns."""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.ports import free_port
from megatron_hybrid.server import cli
from tests.server.processes.test_processes import FAKE, open_stream, send
from tests.server.running import Hold, ServerProcess, is_alive, wait_until
from tests.thorough import thorough

STEPS = ("--step-seconds", "0.01")


class Replicas:
    """Two fake servers on one address, each launched by itself."""

    def __init__(self, tokenizer: Path, temporary: str, hold: Hold, *flags: str) -> None:
        self._tokenizer = tokenizer
        self._temporary = temporary
        address = ("--port", str(free_port()), "--data-parallel-size", "2")
        self._flags = (*address, *STEPS, *hold.flags, *flags)
        self._stack = ExitStack()
        self._started: list[ServerProcess] = []
        self.servers: list[ServerProcess] = []
        starting = [threading.Thread(target=self._start_at, args=(rank,)) for rank in range(2)]
        found: dict[int, ServerProcess] = {}
        self._found = found
        for thread in starting:  # at the same time, as torchrun does
            thread.start()
        for thread in starting:
            thread.join()
        self.servers = [found[rank] for rank in range(2)]
        self.url = self.servers[0].url
        wait_until(lambda: self.states() == ["ok", "ok"])

    def _start_at(self, rank: int) -> None:
        self._found[rank] = self.start(rank)

    def start(self, rank: int, *flags: str) -> ServerProcess:
        """One replica, or another one in its place."""
        server = ServerProcess(
            *FAKE,
            str(self._tokenizer),
            "--data-parallel-rank",
            str(rank),
            *self._flags,
            *flags,
            TMPDIR=self._temporary,
        )
        self._started.append(server)
        return self._stack.enter_context(server)

    def states(self) -> list[str]:
        status, health = send(f"{self.url}/health")
        if status != 200:
            return ["down"]
        return [health["engines"][str(rank)]["status"] for rank in range(2)]

    def figures(self) -> dict[str, Any]:
        return send(f"{self.url}/stats")[1]["engine"]

    def running(self) -> list[int]:
        """Requests of each; a replica that is down has none."""
        engines = self.figures()["engines"]
        return [engines.get(str(rank), {}).get("requests_running", 0) for rank in range(2)]

    def streams(self, wanted: list[int]) -> list[tuple[Any, Any]]:
        """As many on each replica, while answers are held; those of the first one come first.

        One that has just ended may be counted still: what is placed elsewhere for that is closed.
        """
        before = self.running()
        opened: list[list[tuple[Any, Any]]] = [[], []]
        while any(len(opened[rank]) < wanted[rank] for rank in range(2)):
            assert sum(map(len, opened)) < 5 * sum(wanted)
            running = self.running()
            stream = open_stream(self.servers[0], max_tokens=5)
            opened[int(self.running()[1] > running[1])].append(stream)
        for rank in range(2):
            for connection, answer in opened[rank][wanted[rank] :]:
                answer.close()
                connection.close()
        after = [old + new for old, new in zip(before, wanted, strict=True)]
        wait_until(lambda: self.running() == after)
        return opened[0][: wanted[0]] + opened[1][: wanted[1]]

    def front_end(self) -> int:
        """The process id of gunicorn's master, whichever replica has started it."""
        folder = next(Path(self._temporary).glob("megatron-hybrid-*"))
        return int(json.loads((folder / "front_end.lock").read_text())["pid"])

    def close(self) -> None:
        # All at once: the last one ends the front end, which holds the first one's output open.
        for server in self._started:
            if server.process.poll() is None:
                server.process.terminate()
        self._stack.close()


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture(scope="module")
def shared(tokenizer_folder: Path, folder: str, hold: Hold) -> Iterator[Replicas]:
    """For tests that leave both replicas alive."""
    replicas = Replicas(tokenizer_folder, folder, hold)
    yield replicas
    front_end = replicas.front_end()
    replicas.close()
    # Long before it would give up waiting for replicas that died.
    wait_until(lambda: not is_alive(front_end))


@pytest.fixture
def own(tokenizer_folder: Path, hold: Hold) -> Iterator[Replicas]:
    """For tests that end some."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        replicas = Replicas(tokenizer_folder, folder, hold, "--engine-restart-timeout", "20")
        yield replicas
        replicas.close()
        wait_until(lambda: os.listdir(folder) == [])


def finish(streams: list[tuple[http.client.HTTPConnection, Any]]) -> list[bytes]:
    """What is left of these streams."""
    texts = []
    for connection, answer in streams:
        texts.append(answer.read())
        connection.close()
    return texts


def is_whole(text: bytes) -> bool:
    return b'"finish_reason":"length"' in text and text.endswith(b"data: [DONE]\n\n")


def test_one_address_shows_its_replicas(shared: Replicas) -> None:
    status, health = send(f"{shared.url}/health")
    assert status == 200
    assert {one["pid"] for one in health["engines"].values()} == {
        server.process.pid for server in shared.servers
    }
    with urllib.request.urlopen(f"{shared.url}/metrics", timeout=20) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = [sample for family in families for sample in family.samples]
    for name in ("up", "num_requests_running", "prompt_tokens_total"):
        engines = [s.labels["engine"] for s in samples if s.name == f"megatron_hybrid:{name}"]
        assert engines == ["0", "1"]
    outputs = sorted(server.output for server in shared.servers)
    assert "(replica 0 of 2)" in outputs[0] + outputs[1]
    assert "(replica 1 of 2)" in outputs[0] + outputs[1]


def test_requests_go_to_the_replica_with_less_to_do_and_figures_are_added_up(
    shared: Replicas, hold: Hold
) -> None:
    before = shared.figures()
    with hold:
        streams = [open_stream(shared.servers[0], max_tokens=5) for _ in range(6)]
        assert shared.running() == [3, 3]
        assert shared.figures()["requests_running"] == 6
    assert all(map(is_whole, finish(streams)))
    figures = shared.figures()
    assert figures["generated_tokens"] - before["generated_tokens"] == 6 * 5
    assert figures["generated_tokens"] == sum(
        one["generated_tokens"] for one in figures["engines"].values()
    )
    assert figures["latency"]["e2e_request_latency_seconds"]["count"] == sum(
        one["latency"]["e2e_request_latency_seconds"]["count"]
        for one in figures["engines"].values()
    )


def test_a_request_with_several_answers_stays_together(shared: Replicas) -> None:
    before = [one["prompt_tokens"] for one in shared.figures()["engines"].values()]
    body = {"prompt": ["Hello", "World"], "n": 3, "max_tokens": 2}
    assert send(f"{shared.url}/v1/completions", body)[0] == 200
    after = [one["prompt_tokens"] for one in shared.figures()["engines"].values()]
    assert sorted(new > old for new, old in zip(after, before, strict=True)) == [False, True]


def test_what_steers_an_engine_reaches_every_replica(shared: Replicas) -> None:
    assert send(f"{shared.url}/pause", {}) == (
        200,
        {"status": "ok", "epoch": 0, "weight_version": "0"},
    )
    wait_until(lambda: shared.states() == ["paused", "paused"])
    assert send(f"{shared.url}/resume", {})[0] == 200
    wait_until(lambda: shared.states() == ["ok", "ok"])
    status, refused = send(f"{shared.url}/update_weights", {"path": "wrong"})
    assert status == 400
    assert "missing in wrong" in refused["error"]["message"]
    assert send(f"{shared.url}/update_weights", {"path": "new"}) == (
        200,
        {"status": "ok", "epoch": 1, "weight_version": "1"},
    )
    assert [one["epoch"] for one in shared.figures()["engines"].values()] == [1, 1]
    with urllib.request.urlopen(f"{shared.url}/server_info") as answer:
        info = json.load(answer)
    name = info["system_fingerprint"]
    assert name is not None and info["fingerprint"] == {"model": {"weights": "new"}}
    assert info["engines"] == {number: {"system_fingerprint": name} for number in "01"}
    _, said = send(f"{shared.url}/v1/completions", {"prompt": "Hello", "max_tokens": 1})
    assert said["system_fingerprint"] == name


def test_an_abort_finds_its_request_wherever_it_runs(shared: Replicas, hold: Hold) -> None:
    with hold:
        streams = shared.streams([1, 1])
        names = {
            line.split()[1].rpartition("-")[0]
            for one in shared.figures()["engines"].values()
            for line in one["log"][-1:]
            if line.startswith("add ")
        }
        assert len(names) == 2
        for name in names:
            assert send(f"{shared.url}/abort", {"request_id": name}) == (200, {"aborted": 1})
        assert all(b'"finish_reason":"abort"' in text for text in finish(streams))


def test_without_the_coordinator_requests_are_placed_and_it_comes_back(
    shared: Replicas, hold: Hold
) -> None:
    coordinators = coordinator_pids(shared)
    assert len(coordinators) == 1
    os.kill(coordinators[0], signal.SIGKILL)
    with hold:
        streams = shared.streams([2, 2])
    assert all(map(is_whole, finish(streams)))
    wait_until(lambda: coordinator_pids(shared) not in ([], coordinators))


def coordinator_pids(replicas: Replicas) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"replicas.coordinator\0" in command and parent == replicas.front_end():
            found.append(int(process.name))
    return found


def test_a_replica_with_other_settings_is_refused(shared: Replicas) -> None:
    with pytest.raises(AssertionError, match="Replica 0 .* is running already"):
        shared.start(0)
    with pytest.raises(AssertionError, match="runs with other settings"):
        shared.start(2, "--data-parallel-size", "3")
    assert shared.states() == ["ok", "ok"]


def test_a_killed_replica_takes_only_its_own_requests_with_it(own: Replicas, hold: Hold) -> None:
    front_end = own.front_end()
    with hold:
        streams = own.streams([2, 2])
        own.servers[1].process.kill()
        wait_until(lambda: own.states() == ["ok", "down"])
    texts = finish(streams)
    assert [is_whole(text) for text in texts] == [True, True, False, False]
    assert all(b"engine process has ended" in text for text in texts[2:])
    assert own.states() == ["ok", "down"]
    assert send(f"{own.url}/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200
    own.start(1)
    wait_until(lambda: own.states() == ["ok", "ok"])
    with hold:
        streams = own.streams([1, 1])
    assert all(map(is_whole, finish(streams)))
    assert own.front_end() == front_end


def test_a_replica_that_ends_in_order_answers_its_requests_and_the_last_one_ends_all(
    own: Replicas, hold: Hold
) -> None:
    front_end = own.front_end()
    with hold:
        streams = own.streams([1, 1])
        own.servers[0].process.send_signal(signal.SIGTERM)
        wait_until(lambda: own.states() == ["draining", "ok"])
        streams += own.streams([0, 3])
        assert own.running() == [1, 4]
    assert all(map(is_whole, finish(streams)))
    assert own.servers[0].process.wait(10) == 0
    assert is_alive(front_end)
    assert own.states() == ["down", "ok"]
    with hold:
        streams = own.streams([0, 1])
        own.servers[1].process.send_signal(signal.SIGTERM)
    assert all(map(is_whole, finish(streams)))
    assert own.servers[1].process.wait(10) == 0
    wait_until(lambda: not is_alive(front_end))


@thorough  # test_faults.py: after a rank of one group is lost
def test_a_group_that_is_restarted_whole_finds_its_front_end(own: Replicas, hold: Hold) -> None:
    """As torchrun does it: one rank dies, the agent sends SIGTERM to the others, and starts all."""
    front_end = own.front_end()
    with hold:
        streams = own.streams([1, 1])
        own.servers[0].process.kill()
        own.servers[1].process.send_signal(signal.SIGTERM)
        wait_until(lambda: own.states() == ["down"])  # one is, and the other takes no more
    texts = finish(streams)
    assert [is_whole(text) for text in texts] == [False, True]
    assert own.servers[1].process.wait(10) == 0
    status, body = send(f"{own.url}/v1/completions", {"prompt": "Hello"})
    assert status == 503, body
    for rank in range(2):
        own.servers[rank] = own.start(rank)
    wait_until(lambda: own.states() == ["ok", "ok"])
    assert own.front_end() == front_end


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--data-parallel-rank", "2", "--data-parallel-size", "2"), "--data-parallel-size is 2"),
        (("--data-parallel-size", "2", "--port", "0"), "choose a port"),
        (
            ("--data-parallel-size", "2", "--ask", "a", "--exit-after-answer"),
            "there are 2 replicas",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_starts(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(flags)) == 2
    assert sentence in capsys.readouterr().err


def test_replicas_of_a_server_that_was_killed_whole_are_not_waited_for(
    tokenizer_folder: Path, hold: Hold
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        before = Replicas(tokenizer_folder, folder, hold)
        front_end = before.front_end()
        processes = [front_end, *coordinator_pids(before)]
        for pid in (*processes, *(server.process.pid for server in before.servers)):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, processes)))
        server = before.start(0, "--data-parallel-size", "1")
        front_end = before.front_end()
        assert server.stop() == 0
        wait_until(lambda: not is_alive(front_end), 10.0)  # it would wait for a minute
        before.close()


def test_a_worker_that_ends_leaves_the_servers_folder(own: Replicas) -> None:
    front_end = own.front_end()
    coordinators = coordinator_pids(own)
    workers = [
        pid
        for server in own.servers
        for pid in server.descendants()
        if pid not in (front_end, *coordinators)
    ]
    for server in own.servers:
        server.process.kill()
    wait_until(lambda: own.states() == ["down"])
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    wait_until(lambda: not any(map(is_alive, workers)))
    for rank in range(2):
        own.servers[rank] = own.start(rank)
    wait_until(lambda: own.states() == ["ok", "ok"])
    assert own.front_end() == front_end
    assert coordinator_pids(own) == coordinators
