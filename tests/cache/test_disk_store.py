"""Objects in a folder's files: whole or not there, within a budget, for several processes."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from megatron_hybrid.cache.object_store import ObjectStore
from megatron_hybrid.cache.stores.disk import HEADER_BYTES, DiskStore
from megatron_hybrid.errors import ConfigurationError, StoreError

LARGE = 1 << 30
TEMPORARY = ".12345-0123abcd-7.tmp"  # what a process that was killed leaves


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def data_of(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def file_of(store: DiskStore, number: int) -> Path:
    return store.folder / f"{key_of(number).hex()}.safetensors"


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def split(data: bytes, sizes: list[int]) -> list[memoryview]:
    parts, at = [], 0
    for size in sizes:
        parts.append(memoryview(data)[at : at + size])
        at += size
    assert at == len(data)
    return parts


def get(store: DiskStore, number: int, sizes: list[int]) -> bytes | None:
    parts = [memoryview(bytearray(size)) for size in sizes]
    return b"".join(parts) if store.get(key_of(number), parts) else None


def put(store: DiskStore, number: int, size: int) -> bool:
    """An object that takes `size` bytes with its header."""
    return store.put(key_of(number), [data_of(number, size - HEADER_BYTES)])


def age(store: DiskStore, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file_of(store, number), (then, then))


def have(store: DiskStore, count: int) -> list[int]:
    there = store.has([key_of(number) for number in range(count)])
    return [number for number in range(count) if there[number]]


@pytest.fixture
def store(tmp_path):
    return DiskStore(tmp_path / "cache", LARGE)


SIZES = {
    "one": [100_000],
    "odd": [1, 4095, 4097, 13, 70_001],
    "empty ones": [0, 5, 0, 0, 7, 0],
    "nothing": [],
    "only empty ones": [0, 0],
    "more than a call takes": [1 + number % 7 for number in range(5000)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_is_put_is_there_in_parts_of_any_sizes(store, sizes):
    data = data_of(1, sum(sizes))
    parts: list[memoryview | bytes] = list(split(data, sizes))
    parts[::2] = [bytes(part) for part in parts[::2]]
    as_protocol: ObjectStore = store
    assert as_protocol.put(key_of(1), parts)
    assert get(store, 1, sizes) == data
    assert get(store, 1, list(reversed(sizes))) == data
    assert store.read(key_of(1)) == data
    assert store.usage() == (HEADER_BYTES + len(data), 1)


def test_what_is_not_there_is_not_an_error(store, caplog):
    assert store.has([key_of(1), key_of(2)]) == [False, False]
    assert get(store, 1, [5]) is None and store.read(key_of(1)) is None
    put(store, 2, 5000)
    assert store.has([key_of(1), key_of(2)]) == [False, True]
    store.close()
    assert not caplog.records


def partly(call, most: int):
    """`call`, which moves the first `most` bytes only, over as many parts as they span."""

    def moved(file, parts, position):
        few, room = [], most
        for part in parts:
            few.append(memoryview(part).cast("B")[:room])
            room -= len(few[-1])
            if not room:
                break
        return call(file, few, position)

    return moved


@pytest.mark.parametrize("most", [5, LARGE])
def test_parts_may_have_any_shape_and_type(store, monkeypatch, most):
    monkeypatch.setattr(os, "pwritev", partly(os.pwritev, most))
    monkeypatch.setattr(os, "preadv", partly(os.preadv, most))
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert store.put(b"k", [memoryview(numbers), memoryview(np.zeros((0, 3)))])
    back = np.zeros_like(numbers)
    assert store.get(b"k", [memoryview(back)])
    assert (back == numbers).all()


@pytest.mark.parametrize("most", [1, 1000, 4096, 5001])
def test_calls_that_move_only_some_bytes(store, monkeypatch, most):
    sizes = [3000, 1, 1095, 8000, 2]

    monkeypatch.setattr(os, "pwritev", partly(os.pwritev, most))
    monkeypatch.setattr(os, "preadv", partly(os.preadv, most))
    data = data_of(1, sum(sizes))
    assert store.put(key_of(1), split(data, sizes))
    assert get(store, 1, sizes) == data
    monkeypatch.undo()
    assert store.read(key_of(1)) == data


def test_the_last_one_put_is_there(store):
    store.put(key_of(1), [data_of(1, 5000)])
    store.put(key_of(1), [data_of(2, 300)])
    assert store.read(key_of(1)) == data_of(2, 300)
    assert store.usage() == (HEADER_BYTES + 300, 1)
    assert names(store.folder) == {file_of(store, 1).name}


def test_files_are_safetensors(store):
    data = data_of(1, 1001)
    store.put(key_of(1), split(data, [1000, 1]))
    store.put(key_of(2), [])
    assert load_file(file_of(store, 1))["data"].tobytes() == data
    assert load_file(file_of(store, 2))["data"].shape == (0,)
    with safe_open(file_of(store, 1), framework="np") as file:
        assert list(file.keys()) == ["data"]
        metadata = file.metadata()
        assert metadata["version"] == "1" and metadata["key"] == key_of(1).hex()
        assert len(bytes.fromhex(metadata["checksum"])) == 4
    assert HEADER_BYTES % 4096 == 0


def test_objects_outlive_the_store(store):
    put(store, 1, 6000)
    store.close()
    again = DiskStore(store.folder, LARGE)
    assert again.usage() == (6000, 1)
    assert again.read(key_of(1)) == data_of(1, 6000 - HEADER_BYTES)


# The folder.


def test_only_this_user_can_read(tmp_path):
    store = DiskStore(tmp_path / "a" / "b", LARGE)
    put(store, 1, 5000)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(store, 1).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o755, 0o777, 0o500])
def test_a_folder_that_is_open_to_others_or_closed_to_us_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigurationError) as refusal:
        DiskStore(folder, LARGE)
    message = str(refusal.value)
    assert str(folder) in message and f"{mode:04o}" in message
    assert "--prefix-caching-disk" in message


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    DiskStore(tmp_path / "cache", LARGE)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigurationError, match=r"--prefix-caching-disk.*0700.*not this user's"):
        DiskStore(tmp_path / "cache", LARGE)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "cache").write_bytes(b"")
    (tmp_path / "cache").chmod(0o700)
    with pytest.raises(ConfigurationError, match="--prefix-caching-disk.*is not a folder"):
        DiskStore(tmp_path / "cache", LARGE)
    with pytest.raises(ConfigurationError, match="--prefix-caching-disk.*Not a directory"):
        DiskStore(tmp_path / "cache" / "in it", LARGE)


def test_what_killed_processes_left_is_removed_after_an_hour(store):
    old, new = store.folder / TEMPORARY, store.folder / TEMPORARY.replace("7", "8")
    other = store.folder / ".other.tmp"
    for path in old, new, other:
        path.write_bytes(bytes(100))
    for path in old, other:
        os.utime(path, (time.time() - 3700,) * 2)
    again = DiskStore(store.folder, LARGE)
    assert names(store.folder) == {new.name, other.name}
    assert again.usage() == (100, 0)  # what is being written takes its room


def test_files_of_other_names_are_neither_counted_nor_deleted(store):
    others = {"README", "model.safetensors", f"{key_of(1).hex()}.bin", f"{key_of(1).hex()}"}
    for name in others:
        (store.folder / name).write_bytes(bytes(50_000))
    small = DiskStore(store.folder, 20_000)
    assert small.usage() == (0, 0)
    for number in range(10):
        assert put(small, number, 6000)
    assert others < names(store.folder)
    assert small.usage()[0] <= 20_000


# The budget.


def test_what_was_used_least_recently_goes_first(tmp_path):
    store = DiskStore(tmp_path / "cache", 50_000)
    for number in range(5):
        assert put(store, number, 10_000)
    for number, seconds in enumerate([500, 400, 900, 100, 800]):
        age(store, number, seconds)
    assert store.usage() == (50_000, 5)
    assert put(store, 5, 5000)  # takes 5000, and a twentieth is to be free besides
    assert have(store, 6) == [0, 1, 3, 4, 5]
    assert put(store, 6, 10_000)
    assert have(store, 7) == [0, 1, 3, 5, 6]
    assert store.usage() == (45_000, 5)


def test_reading_is_use(tmp_path):
    store = DiskStore(tmp_path / "cache", 30_000)
    for number in range(3):
        put(store, number, 10_000)
        age(store, number, 1000 - number)
    assert get(store, 0, [10_000 - HEADER_BYTES])
    assert store.read(key_of(1))
    store.has([key_of(2)])  # which isn't
    put(store, 3, 5000)
    assert have(store, 4) == [0, 1, 3]


def test_a_file_is_touched_once_a_minute(store):
    put(store, 1, 5000)
    for seconds, is_touched in (40, False), (80, True), (-80, True):
        age(store, 1, seconds)
        before = file_of(store, 1).stat().st_mtime_ns
        assert store.read(key_of(1))
        after = file_of(store, 1).stat().st_mtime_ns
        assert (before != after) == is_touched
        assert not is_touched or abs(time.time() - after / 1e9) < 30


def test_what_is_larger_than_the_budget_is_not_stored(tmp_path):
    store = DiskStore(tmp_path / "cache", 20_000)
    put(store, 1, 10_000)
    assert not put(store, 2, 20_001)
    assert have(store, 3) == [1] and store.usage() == (10_000, 1)
    assert put(store, 2, 20_000)
    assert have(store, 3) == [2] and store.usage() == (20_000, 1)
    assert store.read(key_of(2)) == data_of(2, 20_000 - HEADER_BYTES)


def test_what_is_being_written_has_its_room_already(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "cache", 20_000)
    put(store, 1, 6000)
    writes, may_go_on = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def wait(*args):
        writes.set()
        assert may_go_on.wait(20)
        return pwritev(*args)

    monkeypatch.setattr(os, "pwritev", wait)
    thread = threading.Thread(target=put, args=(store, 2, 12_000))
    thread.start()
    assert writes.wait(20)
    monkeypatch.setattr(os, "pwritev", pwritev)
    assert store.usage() == (6000, 1)
    assert not put(store, 3, 8001) and have(store, 4) == [1]  # in vain: nothing is deleted
    assert put(store, 3, 7000) and have(store, 4) == [3]
    may_go_on.set()
    thread.join()
    assert have(store, 4) == [2, 3] and store.usage() == (19_000, 2)


def test_two_stores_on_one_folder(tmp_path):
    budget, size = 1_000_000, 10_000
    one, two = (DiskStore(tmp_path / "cache", budget) for _ in range(2))
    for number in range(400):
        store = (one, two)[number % 2]
        assert put(store, number, size)
        taken = sum(file.stat().st_size for file in store.folder.iterdir())
        assert taken <= budget * 1.05 + 2 * size
    assert taken > budget * 0.8
    there = have(one, 400)
    assert there == have(two, 400) and there[-2:] == [398, 399]
    assert get(one, 399, [size - HEADER_BYTES]) == data_of(399, size - HEADER_BYTES)


def test_a_file_that_another_store_has_deleted(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "cache", 30_000)
    for number in range(3):
        put(store, number, 10_000)
        age(store, number, 1000 - number)
    unlink = os.unlink

    def too_late(path):
        unlink(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", too_late)
    assert put(store, 3, 10_000)
    assert have(store, 4) == [2, 3] and store.usage() == (20_000, 2)


def test_the_folder_is_looked_through_now_and_then(tmp_path, monkeypatch):
    looks = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    store = DiskStore(tmp_path / "cache", 1_000_000)
    for number in range(400):  # four times the budget
        put(store, number, 10_000)
        get(store, number, [10_000 - HEADER_BYTES])
        store.has([key_of(number)])
        store.usage()
    assert 4 < len(looks) <= 400 / 5 + 2


# What is not what was put there.


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_in_header(path: Path) -> None:
    os.truncate(path, 100)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(at: int):
    def flip_bit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return flip_bit


def replace(old: bytes, new: bytes):
    def replace_bytes(path: Path) -> None:
        data = path.read_bytes()
        assert data.count(old) == 1 and len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    return replace_bytes


def swap(path: Path) -> None:
    store = DiskStore(path.parent, LARGE)
    put(store, 2, path.stat().st_size)
    file_of(store, 2).replace(path)


WRONG = {
    "cut": (cut, "bytes instead of"),
    "cut in the header": (cut_in_header, "100 bytes instead of"),
    "longer": (lengthen, "bytes instead of|checksum"),
    "empty": (lambda path: path.write_bytes(b""), "0 bytes instead of"),
    "first bit": (flip(HEADER_BYTES), "checksum"),
    "last bit": (flip(-1), "checksum"),
    "bit in the length of the header": (flip(0), "header"),
    "bit in the header": (flip(9), "header"),
    "bit after the header": (flip(HEADER_BYTES - 1), "header"),
    "version": (replace(b'"version": "1"', b'"version": "2"'), "version"),
    "another key's": (swap, "key"),
    "foreign": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "header"),
    "text": (lambda path: path.write_bytes(b"[" * path.stat().st_size), "header"),
}


@pytest.mark.parametrize("way", ["get", "read"])
@pytest.mark.parametrize("spoil, why", WRONG.values(), ids=WRONG)
def test_a_spoiled_file_is_a_miss_and_goes(store, caplog, spoil, why, way):
    sizes = [3000, 2001]
    data = data_of(1, sum(sizes))
    store.put(key_of(1), split(data, sizes))
    path = file_of(store, 1)
    spoil(path)
    if way == "get":
        assert get(store, 1, sizes) is None
    else:
        assert store.read(key_of(1)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    # without parts, the size of the data is not known: a file cut there has a wrong checksum
    assert re.search(why if way == "get" else f"{why}|checksum", record.getMessage())
    assert not path.exists() and store.usage()[1] == 0
    assert store.put(key_of(1), split(data, sizes)) and get(store, 1, sizes) == data


def test_parts_of_another_size_are_a_miss(store, caplog):
    put(store, 1, 5000)
    assert get(store, 1, [5001 - HEADER_BYTES]) is None
    assert len(caplog.records) == 1 and have(store, 2) == []
    assert store.usage() == (0, 0)


def as_link(path: Path) -> None:
    other = path.parent / "elsewhere"
    path.replace(other)
    path.symlink_to(other)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("change", [as_link, as_folder, as_pipe])
def test_what_is_not_a_file_is_not_followed(store, caplog, change):
    put(store, 1, 5000)
    path = file_of(store, 1)
    change(path)
    assert store.has([key_of(1)]) == [False]
    assert get(store, 1, [5000 - HEADER_BYTES]) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage() and record.levelno == logging.WARNING
    assert store.read(key_of(1)) is None
    assert os.path.lexists(path)
    assert DiskStore(store.folder, LARGE).usage() == (0, 0)


def test_a_link_is_replaced_but_not_written_through(store):
    elsewhere = store.folder.parent / "elsewhere"
    elsewhere.write_bytes(b"precious")
    file_of(store, 1).symlink_to(elsewhere)
    assert put(store, 1, 5000)
    assert elsewhere.read_bytes() == b"precious"
    assert store.read(key_of(1)) == data_of(1, 5000 - HEADER_BYTES)


# What the system refuses.


def failing(call, number: int, times: int):
    """`call`, which fails so many times after it has done something."""
    left = [times]

    def fail(file, parts, position):
        if left[0]:
            left[0] -= 1
            call(file, parts[:1], position)
            raise OSError(number, os.strerror(number))
        return call(file, parts, position)

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_cannot_be_written_leaves_nothing(store, monkeypatch, number):
    put(store, 1, 5000)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, number, 2))
    with pytest.raises(StoreError) as error:
        put(store, 2, 50_000)
    assert str(file_of(store, 2)) in str(error.value)
    assert os.strerror(number) in str(error.value)
    is_full = number != errno.EIO
    assert names(store.folder) == (set() if is_full else {file_of(store, 1).name})
    assert store.usage() == ((0, 0) if is_full else (5000, 1))
    monkeypatch.undo()
    assert put(store, 2, 50_000)  # and its room is not taken


def test_failures_give_their_room_back(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "cache", 20_000)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO, 10))
    for _ in range(10):
        with pytest.raises(StoreError):
            put(store, 1, 15_000)
    assert put(store, 1, 15_000) and store.usage() == (15_000, 1)


def test_on_a_full_disk_the_oldest_files_make_room(store, monkeypatch):
    for number in range(10):
        put(store, number, 10_000)
        age(store, number, 1000 - number)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, errno.ENOSPC, 1))
    assert put(store, 10, 14_000)
    # a twentieth of what was there besides: 19,000 bytes are two files
    assert have(store, 11) == list(range(2, 11))
    assert store.usage() == (94_000, 9)
    assert store.read(key_of(10)) == data_of(10, 14_000 - HEADER_BYTES)
    assert len(names(store.folder)) == 9


def test_what_cannot_be_read_is_told(store, monkeypatch, caplog):
    put(store, 1, 5000)

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    for call in lambda: get(store, 1, [5000 - HEADER_BYTES]), lambda: store.read(key_of(1)):
        with pytest.raises(StoreError) as error:
            call()
        assert str(file_of(store, 1)) in str(error.value)
        assert os.strerror(errno.EIO) in str(error.value)
    assert have(store, 2) == [1] and not caplog.records


def test_a_folder_that_is_gone(store):
    put(store, 1, 5000)
    shutil.rmtree(store.folder)
    assert have(store, 2) == [] and store.read(key_of(1)) is None
    with pytest.raises(StoreError, match="No such file"):
        put(store, 1, 5000)


# Processes and threads.

WRITER = """
import sys
from pathlib import Path
from megatron_hybrid.cache.stores.disk import DiskStore

store = DiskStore(Path(sys.argv[1]), 1 << 30)
number = 0
while True:
    number += 1
    store.put((number % 20).to_bytes(2, "big"), [bytes([number % 256]) * 400_000] * 10)
    print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_only_whole_objects(tmp_path):
    folder = tmp_path / "cache"
    left = 0
    for attempt in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for _ in range(5):
                assert writer.stdout.readline()
            time.sleep(0.001 * attempt)
            while attempt % 2 and not any(name.startswith(".") for name in names(folder)):
                assert writer.poll() is None  # until it writes
            writer.send_signal(signal.SIGKILL)
        temporary = [path for path in folder.iterdir() if path.name.startswith(".")]
        store = DiskStore(folder, LARGE)
        keys = [number.to_bytes(2, "big") for number in range(20)]
        there = [key for key, is_there in zip(keys, store.has(keys), strict=True) if is_there]
        assert len(there) >= 5 and len(there) + len(temporary) == len(names(folder))
        for key in there:
            data = store.read(key)
            assert data is not None and data == data[:1] * 4_000_000
        left += len(temporary)
        for path in temporary:
            os.utime(path, (time.time() - 3700,) * 2)
        DiskStore(folder, LARGE)
        assert len(names(folder)) == len(there)
        if left and attempt >= 2:
            break
    assert left  # one was killed while it wrote


def test_threads_put_and_get_at_once(tmp_path, caplog):
    budget = 2_000_000
    store = DiskStore(tmp_path / "cache", budget)
    failures: list[str] = []
    hits = [0] * 6

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(150):
                number = draw.randrange(40)
                sizes = [1000 * (number + 1), 0, 50_001]
                data = bytes([number]) * sum(sizes)
                if draw.random() < 0.5:
                    if not store.put(key_of(number), split(data, sizes)):
                        failures.append("no room")
                elif (found := get(store, number, sizes)) is not None:
                    hits[seed] += 1
                    if found != data:
                        failures.append(f"{number} differs")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(len(hits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not caplog.records and all(hits)
    taken = [file.stat().st_size for file in store.folder.iterdir()]
    assert sum(taken) <= budget
    assert DiskStore(store.folder, budget).usage() == (sum(taken), len(taken))
    assert all(not name.startswith(".") for name in names(store.folder))
