"""The driver's calls for memory that comes and goes, in the order in which it wants them."""

from __future__ import annotations

import ctypes
import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_hybrid.memory.driver import Driver, DriverError
from megatron_hybrid.memory.pages import CHUNK_BYTES, CudaPages

GRANULE = 2 * 2**20
DEVICE = torch.device("cuda", 1)
BASE = 0x7000_0000_0000


class View(NamedTuple):
    """In place of a tensor."""

    driver: FakeDriver
    address: int
    size: int
    array: Any

    def zero_(self) -> None:
        driver = self.driver
        assert driver.mapped.keys() == driver.allowed
        driver.zeroed.append((self.address, self.size))


class FakeDriver(Driver):
    """Holds the driver's rules: what is mapped has to be memory, at reserved and free addresses;
    what is unmapped has to be mapped; memory that goes must be mapped nowhere."""

    def __init__(self, room: int) -> None:
        self.room, self.reserved, self.handles = room, 0, 0
        self.created: dict[int, int] = {}  # bytes by handle
        self.mapped: dict[int, tuple[int, int]] = {}  # (bytes, handle) by address
        self.allowed: set[int] = set()
        self.zeroed: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.fails_to_map = self.fails_to_allow = False

    def granule(self, device: int) -> int:
        assert device == 1
        return GRANULE

    def reserve(self, size: int) -> int:
        assert size % GRANULE == 0 and not self.reserved
        self.reserved = size
        return BASE

    def free(self, address: int, size: int) -> None:
        assert (address, size) == (BASE, self.reserved) and not self.mapped and not self.created
        self.reserved = 0

    def create(self, device: int, size: int) -> int:
        assert device == 1 and size % GRANULE == 0
        if sum(self.created.values()) + size > self.room:
            raise MemoryError("cuMemCreate failed: out of memory (2).")
        self.handles += 1
        self.created[self.handles] = size
        return self.handles

    def release(self, memory: int) -> None:
        assert memory not in [handle for _, handle in self.mapped.values()]
        del self.created[memory]

    def map(self, address: int, size: int, memory: int) -> None:
        if self.fails_to_map:
            raise DriverError("cuMemMap failed: invalid argument (1).")
        assert self.created[memory] == size
        assert address >= BASE and address + size <= BASE + self.reserved
        for other, (taken, _) in self.mapped.items():
            assert address + size <= other or other + taken <= address
        self.mapped[address] = size, memory

    def unmap(self, address: int, size: int) -> None:
        is_used = address in self.allowed
        assert not is_used or "synchronize" in self.calls, "a kernel may be under way there"
        assert self.mapped.pop(address)[0] == size
        self.allowed.discard(address)

    def allow(self, device: int, address: int, size: int) -> None:
        assert device == 1 and self.mapped[address][0] == size
        if self.fails_to_allow:
            raise DriverError("cuMemSetAccess failed: invalid argument (1).")
        self.allowed.add(address)

    def synchronize(self, device: torch.device | None) -> None:
        self.calls.append("synchronize")

    def tensor(self, array: Any, device: torch.device) -> Tensor:
        found = array.__cuda_array_interface__
        assert device == DEVICE and found["typestr"] == "|u1" and found["data"][1] is False
        return View(self, found["data"][0], found["shape"][0], array)  # type: ignore[return-value]


def mapped_from_the_start(driver: FakeDriver) -> int:
    """Bytes that are mapped and may be used, without a gap."""
    place = BASE
    while place in driver.mapped and place in driver.allowed:
        place += driver.mapped[place][0]
    assert len(driver.mapped) == len(driver.allowed)
    return place - BASE


def test_memory_grows_in_chunks_at_addresses_that_follow_one_another() -> None:
    driver = FakeDriver(room=2**40)
    pages = CudaPages(DEVICE, driver, capacity=10 * CHUNK_BYTES + 5)
    assert driver.reserved == 10 * CHUNK_BYTES + GRANULE and not driver.created
    pages.grow(100)
    assert pages.nbytes == CHUNK_BYTES == mapped_from_the_start(driver)
    pages.grow(CHUNK_BYTES)
    assert len(driver.created) == 1
    pages.grow(4 * CHUNK_BYTES + 1)
    assert pages.nbytes == 4 * CHUNK_BYTES + GRANULE == mapped_from_the_start(driver)
    pages.grow(10 * CHUNK_BYTES)
    pages.grow(10 * CHUNK_BYTES + GRANULE)  # the last chunk is smaller
    assert pages.nbytes == driver.reserved == mapped_from_the_start(driver)
    with pytest.raises(MemoryError, match="bytes are wanted"):
        pages.grow(driver.reserved + 1)
    view = pages.view(300, 500)
    assert isinstance(view, View) and (view.address, view.size) == (BASE + 300, 200)


def test_dropped_memory_comes_back_at_the_same_addresses_with_zeros() -> None:
    driver = FakeDriver(room=2**40)
    pages = CudaPages(DEVICE, driver, capacity=2**32)
    pages.grow(1)
    pages.grow(3 * CHUNK_BYTES)
    before = {address: size for address, (size, _) in driver.mapped.items()}
    pages.drop()
    assert driver.calls == ["synchronize"] and not driver.mapped and not driver.created
    assert pages.nbytes == 3 * CHUNK_BYTES and driver.reserved
    pages.restore()
    assert {address: size for address, (size, _) in driver.mapped.items()} == before
    assert driver.zeroed == [(BASE, 3 * CHUNK_BYTES)]
    pages.grow(3 * CHUNK_BYTES + 1)
    assert mapped_from_the_start(driver) == 4 * CHUNK_BYTES


def test_what_does_not_come_back_leaves_nothing_and_can_be_tried_again() -> None:
    driver = FakeDriver(room=2**40)
    pages = CudaPages(DEVICE, driver, capacity=2**32)
    for count in range(1, 5):
        pages.grow(count * CHUNK_BYTES)
    pages.drop()
    driver.room = 3 * CHUNK_BYTES  # another process has taken the rest
    with pytest.raises(MemoryError, match="out of memory"):
        pages.restore()
    assert not driver.mapped and not driver.created and not driver.zeroed
    driver.room, driver.fails_to_map = 2**40, True
    with pytest.raises(DriverError, match="cuMemMap"):
        pages.restore()
    assert not driver.mapped and not driver.created
    driver.fails_to_map = False
    pages.restore()
    assert mapped_from_the_start(driver) == pages.nbytes == 4 * CHUNK_BYTES


def test_memory_that_can_not_grow_stays_as_it_was() -> None:
    driver = FakeDriver(room=CHUNK_BYTES)
    pages = CudaPages(DEVICE, driver, capacity=2**32)
    pages.grow(CHUNK_BYTES)
    with pytest.raises(MemoryError):
        pages.grow(CHUNK_BYTES + 1)
    assert pages.nbytes == CHUNK_BYTES == mapped_from_the_start(driver)
    driver.room = 2**40
    for failing in ("fails_to_map", "fails_to_allow"):
        setattr(driver, failing, True)
        with pytest.raises(DriverError):
            pages.grow(CHUNK_BYTES + 1)
        setattr(driver, failing, False)
        assert pages.nbytes == CHUNK_BYTES == mapped_from_the_start(driver)
        assert len(driver.created) == 1


def test_everything_goes_with_the_last_tensor() -> None:
    driver = FakeDriver(room=2**40)
    pages = CudaPages(DEVICE, driver, capacity=2**32)
    pages.grow(1)
    view = pages.view(0, 1)
    del pages
    gc.collect()
    assert driver.mapped, "a tensor is still there"
    del view
    gc.collect()
    assert not driver.mapped and not driver.created and not driver.reserved


class _Library:
    """libcuda.so.1: takes down what it is called with."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.code = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append((name, arguments))
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
                return 0
            return self.code

        return call


def driver_with(library: _Library) -> Driver:
    driver = Driver.__new__(Driver)
    driver._cuda = library  # type: ignore[assignment]
    return driver


def test_structures_are_laid_out_as_the_driver_has_them() -> None:
    library = _Library()
    driver = driver_with(library)
    driver.create(3, 4096)
    driver.allow(3, BASE, 4096)
    (_, (_, size, properties, flags)), (_, (address, _, access, count)) = library.called
    raw = bytes(ctypes.string_at(ctypes.addressof(properties._obj), 32))
    assert ctypes.sizeof(properties._obj) == 32 and size.value == 4096 and flags.value == 0
    # pinned memory, no handles to share it; a device, number 3; nothing else
    assert raw == bytes([1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]) + bytes(16)
    raw = bytes(ctypes.string_at(ctypes.addressof(access._obj), 12))
    assert ctypes.sizeof(access._obj) == 12 and raw == bytes([1, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0])
    assert (address.value, count.value) == (BASE, 1)


def test_errors_say_which_call_failed_and_lack_of_memory_is_told_apart() -> None:
    library = _Library()
    driver = driver_with(library)
    library.code = 2
    with pytest.raises(MemoryError, match=r"cuMemCreate failed: out of memory \(2\)"):
        driver.create(0, 4096)
    library.code = 1
    with pytest.raises(DriverError, match=r"cuMemUnmap failed: .* \(1\)"):
        driver.unmap(BASE, 4096)
