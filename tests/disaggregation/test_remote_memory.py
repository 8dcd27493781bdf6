"""Reads out of another process's memory: by NIXL where it is there, over TCP and on one machine."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from megatron_hybrid.disaggregation import remote_memory
from megatron_hybrid.disaggregation.remote_memory import NixlMemory, Piece, _batches
from megatron_hybrid.errors import ConfigurationError, StoreError

PAGE = 64 << 10
PAGES = 1024
NBYTES = PAGES * PAGE

try:
    remote_memory._load()
except ConfigurationError as error:
    reason = str(error)
else:
    reason = ""
needs_package = pytest.mark.skipif(bool(reason), reason=reason)

OWNER = """
import sys, time
import numpy as np
from megatron_hybrid.disaggregation.remote_memory import NixlMemory

name, nbytes, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = np.arange(nbytes // 8, dtype=np.uint64) + np.uint64(start)
memory = NixlMemory(name, memoryview(words))
print(memory.metadata().hex(), flush=True)
for line in sys.stdin:
    if line == "compute\\n":
        sys.setswitchinterval(1000)
        print("computing", flush=True)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pow(3, 20_000)
"""


class Owner:
    """A process whose memory has the words start, start + 1, ..."""

    def __init__(self, name: str = "owner", start: int = 0) -> None:
        self.start = start
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, name, str(NBYTES), str(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.metadata = b""

    def wait(self) -> Owner:
        self.metadata = bytes.fromhex(self.answer())
        return self

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def page(self, index: int) -> np.ndarray:
        first = self.start + index * PAGE // 8
        return np.arange(first, first + PAGE // 8, dtype=np.uint64)


class Reader:
    """Own memory of as many pages."""

    def __init__(self) -> None:
        self.words = np.zeros(NBYTES // 8, np.uint64)
        self.memory = NixlMemory("reader", self.words.data)
        self.address = self.words.ctypes.data

    def connect(self, owner: Owner) -> str:
        return self.memory.connect(owner.metadata)

    def page(self, index: int) -> np.ndarray:
        return self.words[index * PAGE // 8 : (index + 1) * PAGE // 8]

    def pieces(self, peer: str, pairs: list[tuple[int, int]]) -> list[Piece]:
        """Pages of the peer, and where they go."""
        start, _ = self.memory.region(peer)
        return [(start + i * PAGE, self.address + j * PAGE, PAGE) for i, j in pairs]

    def read(self, peer: str, pairs: list[tuple[int, int]], seconds: float = 30) -> None:
        self.memory.read(peer, self.pieces(peer, pairs), seconds)


REVERSED = [(index, PAGES - 1 - index) for index in range(PAGES)]


@pytest.fixture(scope="module", params=["tcp", "all"])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", request.param)
        yield str(request.param)


@pytest.fixture(scope="module")
def owner(transport: str) -> Iterator[Owner]:
    """One for all tests that leave it alone."""
    owner = Owner().wait()
    yield owner
    owner.kill()


@pytest.fixture
def new_owner(transport: str) -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def new(name: str = "owner", start: int = 0) -> Owner:
        owners.append(Owner(name, start))
        return owners[-1]

    yield new
    for owner in owners:
        owner.kill()


@pytest.fixture
def reader(transport: str) -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.memory.close()


@needs_package
def test_one_piece_and_many_are_what_the_owner_has(owner: Owner, reader: Reader) -> None:
    peer = reader.connect(owner)
    assert peer == "owner"
    assert reader.memory.region(peer)[1] == NBYTES
    reader.read(peer, [(5, 2)])
    assert (reader.page(2) == owner.page(5)).all()
    assert not reader.page(1).any()
    assert not reader.page(3).any()

    random.Random(1).shuffle(pairs := list(REVERSED))
    reader.read(peer, pairs)
    assert all((reader.page(j) == owner.page(i)).all() for i, j in pairs)

    start, _ = reader.memory.region(peer)  # all of it, and a few odd bytes
    reader.memory.read(peer, [(start, reader.address, NBYTES)], 30)
    assert (reader.words == np.arange(NBYTES // 8, dtype=np.uint64)).all()
    reader.memory.read(peer, [(start + 7 * 8, reader.address + 3, 5)], 30)
    assert bytes(reader.words.view(np.uint8)[2:9]) == bytes([0, 7, 0, 0, 0, 0, 1])
    reader.memory.read(peer, [], 30)


@needs_package
def test_what_lies_outside_of_either_memory_is_refused(owner: Owner, reader: Reader) -> None:
    peer = reader.connect(owner)
    start, nbytes = reader.memory.region(peer)
    for remote, own, size in (
        (start + nbytes, reader.address, PAGE),
        (start + nbytes - PAGE, reader.address, PAGE + 1),
        (start - 1, reader.address, PAGE),
        (start, reader.address - 1, PAGE),
        (start, reader.address + NBYTES - PAGE, PAGE + 1),
        (start, reader.address, -1),
    ):
        with pytest.raises(StoreError, match="memory"):
            reader.memory.read(peer, [(start, reader.address, 8), (remote, own, size)], 30)
    assert not reader.words.any()
    reader.read(peer, [(1, 1)])
    assert (reader.page(1) == owner.page(1)).all()


@needs_package
def test_something_else_is_no_description(owner: Owner, reader: Reader) -> None:
    whole = owner.metadata
    for metadata in (b"", b"junk", b"x" * 600, whole[:20], whole[:100], whole[:-5]):
        with pytest.raises(StoreError):
            reader.memory.connect(metadata)
    with pytest.raises(StoreError, match="not connected"):
        reader.memory.read("owner", [], 1)
    reader.read(reader.connect(owner), [(1, 1)])


@needs_package
def test_owner_that_computes_is_read(new_owner: Callable[..., Owner], reader: Reader) -> None:
    owner = new_owner().wait()
    peer = reader.connect(owner)
    assert owner.tell("compute") == "computing"
    begin = time.monotonic()
    reader.read(peer, REVERSED)
    assert time.monotonic() - begin < 15
    assert (reader.page(0) == owner.page(PAGES - 1)).all()


@needs_package
def test_threads_read_at_once_from_two_peers(
    new_owner: Callable[..., Owner], reader: Reader
) -> None:
    owners = [new_owner("a"), new_owner("b", 7)]
    peers = [reader.connect(owner.wait()) for owner in owners]
    errors: list[BaseException] = []

    def read(part: int) -> None:
        try:
            for _ in range(3):
                reader.read(peers[part % 2], REVERSED[part::4])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i, j in REVERSED:
        assert (reader.page(j) == owners[i % 4 % 2].page(i)).all()


@needs_package
def test_dead_peer_is_an_error_and_others_are_read_on(
    new_owner: Callable[..., Owner], reader: Reader
) -> None:
    dead, other = new_owner("dead"), new_owner("other")
    peers = [reader.connect(owner.wait()) for owner in (dead, other)]
    reader.read(peers[0], [(1, 1)])
    dead.kill()
    begin = time.monotonic()
    with pytest.raises(StoreError, match="dead"):
        reader.read(peers[0], REVERSED)
    assert time.monotonic() - begin < 10
    with pytest.raises(StoreError, match="not connected"):
        reader.read(peers[0], REVERSED)
    with suppress(StoreError):  # at once, or at the first read
        reader.read(reader.connect(dead), REVERSED, 1)
        raise AssertionError("there is nobody to be read")
    reader.read(peers[1], [(3, 3)])
    assert (reader.page(3) == other.page(3)).all()


@needs_package
def test_peer_that_dies_during_reads_ends_them_all(
    new_owner: Callable[..., Owner], reader: Reader
) -> None:
    owner = new_owner().wait()
    peer = reader.connect(owner)
    reader.read(peer, REVERSED)
    errors: list[StoreError] = []

    def read(part: int) -> None:
        try:
            while True:
                reader.read(peer, REVERSED[part::3])
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    owner.kill()
    begin = time.monotonic()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - begin < 15
    assert len(errors) == 3
    reader.words[:] = 1
    time.sleep(0.2)
    assert (reader.words == 1).all()


@needs_package
def test_peer_started_anew_under_its_name_is_read(
    new_owner: Callable[..., Owner], reader: Reader
) -> None:
    owner, later = new_owner(), new_owner("owner", 1000)
    peer = reader.connect(owner.wait())
    reader.read(peer, [(1, 1)])
    owner.kill()  # which nobody has noticed
    assert reader.connect(later.wait()) == peer
    reader.read(peer, [(1, 1)])
    assert (reader.page(1) == later.page(1)).all()
    assert reader.connect(later) == peer  # twice is once
    reader.read(peer, [(2, 2)])
    assert (reader.page(2) == later.page(2)).all()


@needs_package
def test_nothing_is_written_after_a_peer_that_stands_still_was_given_up(
    new_owner: Callable[..., Owner], reader: Reader, transport: str
) -> None:
    if transport == "all":
        pytest.skip("the kernel reads a stopped process's memory, too")
    owner = new_owner().wait()
    peer = reader.connect(owner)
    reader.read(peer, [(1, 1)])
    owner.process.send_signal(signal.SIGSTOP)
    reader.words[:] = 1
    begin = time.monotonic()
    with pytest.raises(StoreError, match="too long"):
        reader.read(peer, REVERSED, 0.2)
    assert time.monotonic() - begin < 10
    reader.words[:] = 1
    owner.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert (reader.words == 1).all()
    with pytest.raises(StoreError, match="not connected"):
        reader.read(peer, [(1, 1)])


@needs_package
def test_time_that_is_up_leaves_a_peer_that_answers_connected(owner: Owner, reader: Reader) -> None:
    peer = reader.connect(owner)
    reader.read(peer, [(1, 1)])
    with pytest.raises(StoreError, match="too long"):
        reader.read(peer, REVERSED, -1)
    reader.read(peer, REVERSED)
    assert (reader.page(0) == owner.page(PAGES - 1)).all()


@needs_package
def test_closed_memory_is_not_read(owner: Owner, reader: Reader) -> None:
    peer = reader.connect(owner)
    reader.read(peer, [(1, 1)])
    reader.memory.disconnect(peer)
    reader.memory.disconnect(peer)
    with pytest.raises(StoreError, match="not connected"):
        reader.read(peer, [(1, 1)])
    reader.connect(owner)
    reader.memory.close()
    reader.memory.close()
    for call in (
        lambda: reader.memory.read(peer, [], 1),
        lambda: reader.memory.connect(owner.metadata),
        reader.memory.metadata,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


@needs_package
def test_package_leaves_signals_and_logging_alone() -> None:
    code = (
        "import logging, re, numpy as np\n"
        "def caught():\n"
        "    status = open('/proc/self/status').read()\n"
        "    return int(re.search(r'SigCgt:\\s*(\\w+)', status)[1], 16) & 0x7FFFFFFF\n"
        "before = caught(), logging.raiseExceptions\n"
        "from megatron_hybrid.disaggregation.remote_memory import NixlMemory\n"
        "memory = NixlMemory('a', memoryview(np.zeros(64)))\n"
        "memory.metadata()\n"
        "print(before == (caught(), logging.raiseExceptions))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.stdout, process.stderr, process.returncode) == ("True\n", "", 0)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_memory, "MODULES", ("no_nixl_cu13", "no_nixl_cu12"))
    with pytest.raises(ConfigurationError, match="no_nixl_cu13.*install the package nixl-cu13"):
        NixlMemory("a", memoryview(bytearray(8)))


def test_memory_that_can_not_be_written_is_refused() -> None:
    for memory in (memoryview(b"abc"), memoryview(bytearray(8))[::2], memoryview(bytearray())):
        with pytest.raises(ValueError, match="writable, contiguous"):
            NixlMemory("a", memory)


def test_batches_join_neighbours_and_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_memory, "_BATCH_BYTES", 100)
    monkeypatch.setattr(remote_memory, "_BATCH_PIECES", 2)

    def batches(*pieces: Piece) -> list[list[list[int]]]:
        return [batch.tolist() for batch in _batches(pieces)]

    assert batches((10, 500, 5), (15, 505, 6), (21, 600, 1)) == [[[10, 500, 11], [21, 600, 1]]]
    assert batches((0, 1000, 250)) == [[[0, 1000, 100]], [[100, 1100, 100]], [[200, 1200, 50]]]
    assert batches((0, 0, 1), (5, 5, 1), (9, 9, 1)) == [[[0, 0, 1], [5, 5, 1]], [[9, 9, 1]]]
    assert batches((0, 0, 60), (200, 200, 60)) == [[[0, 0, 60], [200, 200, 40]], [[240, 240, 20]]]
    assert batches() == []
    assert batches((3, 4, 0)) == []
