"""Addresses that memory comes to and goes from: of the host, and of a GPU."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.memory.driver import Driver

CHUNK_BYTES = 64 * 2**20  # that a GPU's memory is taken in, at least
# Of Linux; Python has no name for it. Addresses alone count for nothing.
_NO_RESERVE = 0x4000


class HostPages:
    """Of the host; the system gives memory for what is written to."""

    def __init__(self, capacity: int | None = None) -> None:
        """capacity: bytes, at most; None: as many as the machine has."""
        self.device = torch.device("cpu")
        self.nbytes = 0
        if capacity is None:
            capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = mmap.mmap(-1, capacity, flags=flags)

    def grow(self, nbytes: int) -> None:
        """As Pages'."""
        if nbytes > len(self._memory):
            raise MemoryError(f"{nbytes} bytes are wanted; there are {len(self._memory)}.")
        self.nbytes = max(self.nbytes, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def drop(self) -> None:
        """As Pages'."""
        if self.nbytes:
            self._memory.madvise(mmap.MADV_DONTNEED, 0, self.nbytes)

    def restore(self) -> None:
        """As Pages'. There is nothing to do: it comes when something is written."""

    def view(self, start: int, stop: int) -> Tensor:
        """As Pages'."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=stop - start, offset=start)


class CudaPages:
    """Of a GPU, by the driver's calls for virtual memory."""

    def __init__(self, device: torch.device, driver: Driver, capacity: int | None = None) -> None:
        """capacity: bytes, at most; None: as many as the GPU has. Raises DriverError."""
        self.device = device
        self._driver = driver
        self._granule = driver.granule(device.index)
        if capacity is None:
            capacity = torch.cuda.get_device_properties(device).total_memory
        self._capacity = self._rounded(capacity)
        self._address = driver.reserve(self._capacity)
        self._sizes: list[int] = []  # of chunks of memory, one behind the other
        self._chunks: list[int] = []  # of these that are there
        parts = driver, self._address, self._capacity, self._sizes, self._chunks
        weakref.finalize(self, _end, *parts).atexit = False  # at the end of all it goes anyway

    @property
    def nbytes(self) -> int:
        """As Pages'."""
        return sum(self._sizes)

    def grow(self, nbytes: int) -> None:
        """As Pages'."""
        have = self.nbytes
        if nbytes <= have:
            return
        size = self._rounded(max(nbytes - have, min(CHUNK_BYTES, self._capacity - have)))
        if have + size > self._capacity:
            raise MemoryError(f"{nbytes} bytes are wanted; the GPU has {self._capacity}.")
        self._put(have, size)
        self._sizes.append(size)

    def drop(self) -> None:
        """As Pages'."""
        self._driver.synchronize(self.device)
        _unmap(self._driver, self._address, self._sizes, self._chunks)

    def restore(self) -> None:
        """As Pages'."""
        place = 0
        try:
            for size in self._sizes:
                self._put(place, size)
                place += size
        except BaseException:
            self.drop()
            raise
        if self._sizes:
            self.view(0, self.nbytes).zero_()

    def view(self, start: int, stop: int) -> Tensor:
        """As Pages'."""
        return self._driver.tensor(_Bytes(self, self._address + start, stop - start), self.device)

    def _put(self, place: int, size: int) -> None:
        """A chunk of memory at an offset. Raises MemoryError."""
        driver, address = self._driver, self._address + place
        chunk = driver.create(self.device.index, size)
        with ExitStack() as undo:
            undo.callback(driver.release, chunk)
            driver.map(address, size, chunk)
            undo.callback(driver.unmap, address, size)
            driver.allow(self.device.index, address, size)
            undo.pop_all()
        self._chunks.append(chunk)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule


class _Bytes:
    """Memory in the form in which torch takes others' arrays."""

    def __init__(self, pages: CudaPages, address: int, nbytes: int) -> None:
        self._pages = pages  # which live as long as a tensor does
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _unmap(driver: Driver, address: int, sizes: list[int], chunks: list[int]) -> None:
    while chunks:
        size = sizes[len(chunks) - 1]
        driver.unmap(address + sum(sizes[: len(chunks) - 1]), size)
        driver.release(chunks.pop())


def _end(driver: Driver, address: int, capacity: int, sizes: list[int], chunks: list[int]) -> None:
    driver.synchronize(None)  # no kernel may be under way there
    _unmap(driver, address, sizes, chunks)
    driver.free(address, capacity)
