"""Objects in Mooncake's store: with a client in memory, and with the package where it is there."""

from __future__ import annotations

import importlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.ports import free_address, free_port
from megatron_hybrid.cache.object_store import ObjectStore
from megatron_hybrid.cache.stores import mooncake
from megatron_hybrid.cache.stores.mooncake import CLIENT_SETTINGS, MooncakeStore
from megatron_hybrid.errors import ConfigurationError, StoreError

MIB = 1 << 20
HEADER_BYTES = 49

try:
    package: Any = importlib.import_module("mooncake.store")
except ImportError as error:
    package, reason = None, f"Mooncake can't be imported: {error}"
else:
    reason = ""
needs_package = pytest.mark.skipif(package is None, reason=reason)


class FakeClient:
    """What MooncakeStore uses of a MooncakeDistributedStore, as that behaves."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.objects: dict[str, bytes] = {}
        self.code = 0  # that every call fails with
        self.setup_args: tuple[Any, ...] = ()
        self.buffers_fail = False
        self.closed = 0
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.delay = 0.0  # of a call with data

    def setup(self, *args: Any) -> int:
        self.setup_args = args
        return self.code

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.code or int(key in self.objects) for key in keys]

    def get_size(self, key: str) -> int:
        if self.code:
            return self.code
        return len(self.objects[key]) if key in self.objects else -704

    def get_buffer(self, name: str) -> memoryview | None:
        self._transfer()
        if self.code or self.buffers_fail or name not in self.objects:
            return None
        return memoryview(bytearray(self.objects[name])).cast("b")

    def upsert_parts(self, key: str, *parts: Any) -> int:
        self._transfer()
        data = b"".join(parts)
        if self.code or sum(map(len, self.objects.values())) + len(data) > self.room:
            return self.code or -200
        self.objects[key] = data
        return 0

    def remove(self, key: str, force: bool = False) -> int:
        if not force:
            return -706
        return self.code or (0 if self.objects.pop(key, None) is not None else -704)

    def close(self) -> int:
        self.closed += 1
        return 0

    def _transfer(self) -> None:
        assert not self.closed
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(self.delay)
        with self.lock:
            self.running -= 1


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store sets for its client in the environment is gone after a test."""
    for variable, value in CLIENT_SETTINGS.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def address() -> Iterator[str]:
    """Where something listens, which a fake client does not talk with."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"mooncake://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def store(address: str, client: FakeClient) -> MooncakeStore:
    return MooncakeStore(address, client=client)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data_of(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def name_of(key: bytes) -> str:
    return f"megatron_hybrid/{key.hex()}"


def get(store: MooncakeStore, key: bytes, *sizes: int) -> bytes | None:
    parts = [memoryview(bytearray(size)) for size in sizes]
    return b"".join(parts) if store.get(key, parts) else None


def check_round_trips(store: MooncakeStore) -> None:
    data = data_of(1, 1_000_003)
    view = memoryview(data)
    parts: list[memoryview | bytes] = [
        view[:1],
        b"",
        view[1:500_000],
        data[500_000:],
        *[b"ab"] * 300,
    ]
    key = key_of(1)
    assert store.put(key, parts)
    whole = data + b"ab" * 300
    assert get(store, key, len(whole)) == whole
    assert get(store, key, 7, 0, len(whole) - 8, 1) == whole
    assert get(store, key, *[1] * 600, len(whole) - 600) == whole
    assert store.read(key) == whole
    assert store.has([key_of(2), key, key_of(3), key]) == [False, True, False, True]
    assert store.has([]) == []
    assert get(store, key_of(2), 10) is None and store.read(key_of(2)) is None

    assert store.put(key, [b"shorter"]) and store.read(key) == b"shorter"
    assert store.put(key, [data]) and get(store, key, len(data)) == data  # in its place
    assert store.put(b"", []) and store.read(b"") == b"" and get(store, b"") == b""
    assert store.put(b"k", [b"v"]) and get(store, b"k", 1) == b"v"


def check_wrong_objects(store: MooncakeStore, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    """raw: a client by which others put what is no object of ours."""
    data = data_of(2, 10_000)
    key, other = key_of(1), key_of(2)
    assert store.put(key, [data]) and store.put(other, [data[::-1]])
    good, strange = (bytes(memoryview(raw.get_buffer(name_of(k)))) for k in (key, other))
    assert len(good) == HEADER_BYTES + len(data)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    wrong = (flipped, strange, bytes(len(good)), good[:20], good[:-1], good + b"x", b"X" + good[1:])
    for content in wrong:
        for read in (lambda: get(store, key, len(data)), lambda: store.read(key)):
            assert raw.upsert_parts(name_of(key), content) == 0
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert read() is None
            assert [record.name for record in caplog.records] == [mooncake.__name__]
            assert name_of(key) in caplog.text
            assert store.has([key, other]) == [False, True]  # it is not found again
    assert store.put(key, [data]) and get(store, key, len(data)) == data
    assert get(store, key, len(data) - 1) is None  # another size than was put
    assert store.has([key]) == [False]


def check_threads(store: MooncakeStore, count: int, sizes: list[int]) -> None:
    """Each of several threads puts and gets its own, and reads one that all replace."""
    failures: list[BaseException] = []
    shared = data_of(99, sizes[0])

    def work(number: int) -> None:
        try:
            for step, size in enumerate(sizes):
                key, data = key_of(100 * number + step), data_of(number, size)
                assert store.put(key, [data[:3], data[3:]])
                assert get(store, key, size) == data
                assert store.has([key]) == [True]
                assert store.put(key_of(99), [shared])
                assert store.read(key_of(99)) in (None, shared)  # never another
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_what_is_put_comes_back(store: MooncakeStore) -> None:
    checked: ObjectStore = store
    assert checked.name == "mooncake" and checked.max_bytes == 0
    check_round_trips(store)


def test_a_wrong_object_is_a_miss(
    store: MooncakeStore, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    check_wrong_objects(store, client, caplog)


def test_threads(store: MooncakeStore) -> None:
    check_threads(store, 6, [1000, 20 * MIB, 5, 100])


def test_how_the_client_is_set_up(
    address: str, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "77")
    monkeypatch.delenv("MC_STORE_CLIENT_SETUP_RETRIES")
    MooncakeStore(
        address,
        name="far",
        segment_bytes=5 * MIB,
        buffer_bytes=3 * MIB,
        protocol="rdma",
        local_host="h7",
        client=client,
    )
    master = address.removeprefix("mooncake://")
    assert client.setup_args == ("h7", "P2PHANDSHAKE", 5 * MIB, 3 * MIB, "rdma", "", master)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "77"  # the operator's word
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "3"


@pytest.mark.parametrize(
    "address",
    ["host:5", "mooncake://host", "mooncake://:50051", "mooncake://h:x", "mooncake://h:70000"]
    + ["mooncake://h:0", "http://h:1", "mooncake://h:1/path", ""],
)
def test_an_address_that_is_none(address: str, client: FakeClient) -> None:
    with pytest.raises(ConfigurationError, match="mooncake://MASTER_HOST:PORT"):
        MooncakeStore(address, client=client)


def test_a_master_that_is_not_there(client: FakeClient) -> None:
    address = f"mooncake://{free_address()}"
    with pytest.raises(ConfigurationError, match=f"{address} can't be reached"):
        MooncakeStore(address, client=client)
    assert not client.setup_args


def test_a_client_that_can_not_be_set_up(address: str, client: FakeClient) -> None:
    client.code = -1
    with pytest.raises(ConfigurationError, match=rf"(?s){address}.*\(code -1\)"):
        MooncakeStore(address, client=client)


def test_the_package_is_missing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigurationError, match="install the package mooncake-transfer-engine"):
        MooncakeStore(address)


@pytest.mark.parametrize(
    "code, meaning", [(-900, "can't be reached"), (-901, "in time"), (-1, "internal"), (-4242, "")]
)
def test_every_code_is_an_error(
    store: MooncakeStore, client: FakeClient, code: int, meaning: str
) -> None:
    client.code = code
    key = key_of(1)
    calls = (
        lambda: store.has([key]),
        lambda: store.get(key, [memoryview(bytearray(1))]),
        lambda: store.read(key),
        lambda: store.put(key, [b"1"]),
    )
    for call in calls:
        with pytest.raises(StoreError, match=rf"{meaning}.*\(code {code}\)"):
            call()
    assert store.usage() == (0, 0)


@pytest.mark.parametrize("code", [-703, -704, -712])
def test_what_is_not_there_yet_or_any_more_is_a_miss(
    store: MooncakeStore, client: FakeClient, code: int
) -> None:
    client.code = code
    assert store.read(b"k") is None and get(store, b"k", 3) is None


@pytest.mark.parametrize("code", [-601, -705])
def test_another_process_stores_the_same(
    store: MooncakeStore, client: FakeClient, code: int
) -> None:
    client.code = code
    assert store.put(b"k", [b"v"])


def test_removed_while_it_is_put(
    store: MooncakeStore, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    upsert = client.upsert_parts
    codes = [-704, -704]
    client.upsert_parts = (  # type: ignore[method-assign]
        lambda key, *parts: codes.pop() if codes else upsert(key, *parts)
    )
    assert store.put(b"k", [b"v"]) and store.read(b"k") == b"v"
    monkeypatch.setattr(mooncake, "RETRY_SECONDS", 0.1)
    client.code = -704
    with pytest.raises(StoreError, match=r"code -704"):
        store.put(b"k", [b"v"])


def test_data_that_can_not_be_had(
    store: MooncakeStore, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.put(b"k", [b"v"])
    get_buffer = client.get_buffer
    answers = iter([lambda name: None, lambda name: None, get_buffer])
    client.get_buffer = lambda name: next(answers)(name)  # type: ignore[method-assign]
    assert store.read(b"k") == b"v"  # it was being replaced
    client.get_buffer = get_buffer  # type: ignore[method-assign]
    monkeypatch.setattr(mooncake, "RETRY_SECONDS", 0.1)
    client.buffers_fail = True
    with pytest.raises(StoreError, match=r"code -800"):
        store.read(b"k")
    get_size = client.get_size
    sizes = iter([get_size(name_of(b"k")), -704])
    client.get_size = lambda key: next(sizes)  # type: ignore[method-assign]
    assert store.read(b"k") is None  # it went in between


def test_no_room(address: str) -> None:
    store = MooncakeStore(address, client=FakeClient(room=1000))
    assert store.put(b"a", [bytes(500)])
    assert not store.put(b"b", [bytes(500)])
    assert store.has([b"a", b"b"]) == [True, False]
    assert store.usage() == (500 + HEADER_BYTES, 1)


def test_larger_than_the_buffer(address: str, client: FakeClient) -> None:
    store = MooncakeStore(address, buffer_bytes=MIB, client=client)
    with pytest.raises(StoreError, match=f"{MIB + HEADER_BYTES} bytes.* only {MIB}"):
        store.put(b"a", [bytes(MIB)])
    client.objects[name_of(b"a")] = bytes(2 * MIB)
    with pytest.raises(StoreError, match=f"{2 * MIB} bytes"):
        store.read(b"a")


def test_usage(store: MooncakeStore, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        assert store.put(key_of(number), [bytes(100)])
    assert store.put(key_of(0), [bytes(200)])
    assert store.usage() == (400 + 3 * HEADER_BYTES, 3)
    client.objects.pop(name_of(key_of(0)))
    client.objects.pop(name_of(key_of(1)))
    assert store.has([key_of(0)]) == [False] and store.read(key_of(1)) is None
    assert store.usage() == (100 + HEADER_BYTES, 1)
    monkeypatch.setattr(mooncake, "_MAX_REMEMBERED", 2)
    for number in range(5):
        assert store.put(key_of(number), [bytes(number)])
    assert store.usage() == (3 + 4 + 2 * HEADER_BYTES, 2)


@pytest.mark.parametrize("size, at_once", [(MIB, 4), (MIB + 1, 1)])
def test_what_the_buffer_has_room_for(
    address: str, client: FakeClient, size: int, at_once: int
) -> None:
    store = MooncakeStore(address, buffer_bytes=8 * MIB, client=client)
    client.delay = 0.05
    data = bytes(size - HEADER_BYTES)
    threads = [
        threading.Thread(target=lambda n=n: (store.put(key_of(n), [data]), store.read(key_of(n))))
        for n in range(7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.most_running == at_once


def test_close_waits_for_calls(store: MooncakeStore, client: FakeClient) -> None:
    client.delay = 0.2
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(store.put(b"k", [b"v"])))
    thread.start()
    while not client.running:
        time.sleep(0.001)
    store.close()
    assert client.closed == 1 and not client.running
    thread.join()
    assert done == [True]
    store.close()
    assert client.closed == 1
    for call in (lambda: store.has([b"k"]), lambda: store.read(b"k"), lambda: store.put(b"k", [])):
        with pytest.raises(StoreError, match="closed"):
            call()


# With the package. Its program is beside its modules.


class Master:
    """A mooncake_master on this machine."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        program = Path(package.__file__).parent / "mooncake_master"
        flags = f"--rpc_port={port} --rpc_address=127.0.0.1 --metrics_host=127.0.0.1"
        metrics = f"--metrics_port={free_port()}"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [program, *flags.split(), metrics], stdout=output, stderr=output
            )
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, log.read_text()
                time.sleep(0.05)

    @property
    def address(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(free_port(), tmp_path / "master.log")
    yield master
    master.kill()


@pytest.fixture
def real(master: Master) -> Iterator[MooncakeStore]:
    """With 512 MiB in this process."""
    store = MooncakeStore(master.address, segment_bytes=512 * MIB)
    yield store
    store.close()


@needs_package
def test_package_round_trips(real: MooncakeStore) -> None:
    check_round_trips(real)
    large = data_of(3, 100_000_001)
    assert real.put(key_of(9), [large[: 1 << 20], large[1 << 20 :]])
    assert get(real, key_of(9), 50_000_000, 50_000_001) == large


@needs_package
def test_package_wrong_objects(real: MooncakeStore, caplog: pytest.LogCaptureFixture) -> None:
    check_wrong_objects(real, real._client, caplog)


@needs_package
def test_package_threads(real: MooncakeStore) -> None:
    check_threads(real, 4, [1_000_000, 17 * MIB, 4_000_001, 5])


@needs_package
def test_package_another_process_has_the_memory(master: Master, real: MooncakeStore) -> None:
    other = MooncakeStore(master.address)
    data = data_of(4, 4_000_000)
    assert other.put(b"k", [data]) and get(real, b"k", len(data)) == data
    other.close()
    assert get(real, b"k", len(data)) == data


@needs_package
def test_package_no_room(master: Master) -> None:
    store = MooncakeStore(master.address)
    assert not store.put(b"k", [b"v"])  # nobody has added memory
    store.close()
    store = MooncakeStore(master.address, segment_bytes=32 * MIB)
    data = data_of(5, 4 * MIB)
    assert not store.put(b"larger than all of it", [bytes(40 * MIB)])
    stored = [store.put(key_of(number), [data]) for number in range(12)]
    assert stored[0] and not all(stored)
    for number in range(12):  # whole, or dropped by the master
        assert get(store, key_of(number), len(data)) in (None, data)
    store.close()


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_package_who_has_the_memory_is_gone(master: Master, how: signal.Signals) -> None:
    store = MooncakeStore(master.address)
    program = (
        "import sys, time\n"
        "from megatron_hybrid.cache.stores.mooncake import MooncakeStore\n"
        f"store = MooncakeStore({master.address!r}, segment_bytes={64 * MIB})\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        assert store.put(b"k", [bytes(4 * MIB)]) and get(store, b"k", 4 * MIB)
        owner.send_signal(how)
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"code -800"):
            get(store, b"k", 4 * MIB)
        assert time.monotonic() - start < 20
        deadline = time.monotonic() + 60
        while store.has([b"k"]) != [False]:  # the master notices it
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert get(store, b"k", 4 * MIB) is None
        assert not store.put(b"k", [b"v"])
        owner.kill()
    store.close()


def check_failures(store: MooncakeStore, seconds: float) -> None:
    calls = (
        lambda: store.has([b"k"]),
        lambda: get(store, b"k", 1000),
        lambda: store.read(b"k"),
        lambda: store.put(b"other", [b"v"]),
    )
    for call in calls:
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"master .*\(code -90[01]\)"):
            call()
        assert time.monotonic() - start < seconds


@needs_package
@pytest.mark.slow
def test_package_the_master_is_killed(master: Master, tmp_path: Path) -> None:
    store = MooncakeStore(master.address, segment_bytes=64 * MIB)
    assert store.put(b"k", [bytes(1000)])
    master.kill()
    check_failures(store, 15)
    again = Master(master.port, tmp_path / "again.log")
    try:
        deadline = time.monotonic() + 60
        while True:  # this process adds its memory again
            try:
                if store.put(b"k", [b"v"]):
                    break
            except StoreError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert get(store, b"k", 1) == b"v"
        store.close()
    finally:
        again.kill()


@needs_package
@pytest.mark.slow
def test_package_the_master_does_not_answer(master: Master) -> None:
    store = MooncakeStore(master.address, segment_bytes=64 * MIB)
    assert store.put(b"k", [bytes(1000)])
    master.process.send_signal(signal.SIGSTOP)
    check_failures(store, 15)
    master.process.send_signal(signal.SIGCONT)
    assert get(store, b"k", 1000) == bytes(1000)
    store.close()


@needs_package
@pytest.mark.slow
def test_package_something_else_listens(address: str) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigurationError, match=address):
        MooncakeStore(address)
    assert time.monotonic() - start < 60
